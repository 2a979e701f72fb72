"""Which models are loaded, as many ask at once and leave: over models that are only names and sizes."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest

from accel.serve import loading
from accel.serve.errors import ApiError
from accel.serve.loading import Models
from accel.serve.models import Source

SIZES = {"a": 1, "b": 2, "c": 3, "d": 2}
MEMORY = 4
ABOUT = SimpleNamespace(adapters=[])


class House:
    """Opens models, and looks that they fit, are used only while they are there, and are there once."""

    def __init__(self, monkeypatch):
        self.open, self.used, self.loads, self.most = set(), dict.fromkeys(SIZES, 0), 0, 0
        self.wrong, self.fails, self.tries = [], 4, 0  # each fourth load
        monkeypatch.setattr(Source, "again", lambda one: one)
        monkeypatch.setattr(Source, "open", lambda one: self.opened(one))
        monkeypatch.setattr(loading, "trim", lambda: None)

    @contextmanager
    def opened(self, source):
        self.tries += 1
        if self.tries % self.fails == 0:
            raise MemoryError
        self.loads += 1
        if source.name in self.open:
            self.wrong.append(f"{source.name} is loaded twice")
        self.open.add(source.name)
        size = sum(SIZES[name] for name in self.open)
        self.most = max(self.most, size)
        if size > MEMORY:
            self.wrong.append(f"{self.open} are loaded")
        time.sleep(0.001)
        engine = SimpleNamespace(how="", stats={})
        model = SimpleNamespace(adapters=[], facts=SimpleNamespace(adapters=None))
        yield SimpleNamespace(name=source.name, engine=engine, model=model, about=ABOUT)
        if self.used[source.name]:
            self.wrong.append(f"{source.name} was used")
        self.open.remove(source.name)


def models(idle=None):
    sources = [
        Source(name, None, ABOUT, size, None, None, {"max_waiting": 999})
        for name, size in SIZES.items()
    ]
    return Models(sources, memory=MEMORY, idle=idle)


async def asked(found, house, rng, told):
    """Requests one after another, of which some are given up."""
    for _ in range(12):
        name = rng.choice([*SIZES])
        with ExitStack() as until:
            try:
                async with asyncio.timeout(0.002 if rng.random() < 0.3 else 10):
                    served, _ = await found.use(name, until)
            except TimeoutError:
                told.append("left")
                continue
            except ApiError:
                told.append("failed")
                continue
            assert served.name == name
            house.used[name] += 1
            await asyncio.sleep(rng.choice([0, 0.001, 0.004]))
            house.used[name] -= 1
            told.append("served")


@pytest.mark.parametrize("idle", [None, 0.002])
def test_models_fit_and_nobody_is_forgotten(monkeypatch, idle):
    house, told = House(monkeypatch), []

    async def all_at_once(found):
        works = [asked(found, house, random.Random(seed), told) for seed in range(24)]
        async with asyncio.timeout(30):
            await asyncio.gather(*works)

    with models(idle) as found:
        asyncio.run(all_at_once(found))
        assert not house.wrong
        assert {"left", "failed", "served"} == {*told} and len(told) == 24 * 12
        assert house.most == MEMORY and house.loads > 4
        assert [dict(place.users) for place in found.places] == [{}] * len(SIZES)
    assert not house.open


def test_one_that_counts_wrongly_is_caught(monkeypatch):
    house, told = House(monkeypatch), []
    house.fails = 99
    monkeypatch.setattr(Models, "_make_room", lambda self: None)

    async def some(found):
        async with asyncio.timeout(5):
            for name in "abc":
                with ExitStack() as until:
                    await found.use(name, until)

    with models() as found:
        asyncio.run(some(found))
        assert house.wrong and not told
