"""Which models are loaded: each when it is first asked for, within the memory that all may take, until nobody asks."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from threading import Condition, Thread
from time import monotonic
from typing import Any

from accel.ir.errors import AccelError, InputError, shown, unknown
from accel.ir.scratch import trim
from accel.runtime.serve.embedder import Embedder
from accel.runtime.serve.engine import Engine, Full
from accel.serve.errors import ApiError
from accel.serve.events import CANCELLED
from accel.serve.models import Served, Source
from accel.serve.place import Place

RETRY_SECONDS = 30  # what a client is told to wait where a model does not fit
MOST_ADAPTERS = 64  # that clients brought, of one model


class Models:
    """All of them, by id. Safe to share between threads; a thread of its own loads and unloads, one at a time."""

    def __init__(
        self,
        served: Sequence[Served | Source],
        *,
        memory: int | None = None,
        idle: float | None = None,
        say: Callable[[str], None] = lambda _: None,
    ):
        """`memory`: bytes that models may take together, as `Source.bytes` counts them; `idle`: seconds after which a
        model that nobody uses is unloaded; `say`: told a line when one is loaded, unloaded, or cannot be. Raises
        InputError where two have one name, or one does not fit into the memory.
        """
        self._memory, self._idle, self._say = memory, idle, say
        self.places = tuple(
            Place(one.name, one) if isinstance(one, Source) else Place(one.name, None, one)
            for one in served
        )
        names = [one.name for one in self.places]
        for place in self.places:
            if names.count(place.name) > 1:
                raise InputError(f"two artifacts are named {place.name}; rename the folder of one")
            if place.source is not None and memory is not None and place.source.bytes > memory:
                raise InputError(f"--memory: {self._too_large(place.source)}")
        self._changed = Condition()
        self._queue: list[
            Place
        ] = []  # that are to be loaded, in the order in which they were asked for
        self._closing = False
        self._thread: Thread | None = None

    def load(self, name: str) -> None:
        """Load one now, in this thread, before any request comes. Raises AccelError."""
        place, _ = self.place(name)
        assert place.source is not None, "it is to be loaded"
        with self._changed:
            self._loaded(place, place.stack.enter_context(place.source.open()))
            self._start()

    def place(self, name: str | None) -> tuple[Place, str | None]:
        """A model's place and the adapter to use; None: the only one. Raises ApiError: 404; 400 for None of several."""
        if name is None:
            if len(self.places) == 1:
                return self.places[0], None
            ids = ", ".join(one.name for one in self.places)
            raise ApiError(400, f"model is missing; give one of {ids}", param="model")
        for one in self.places:
            if name in (names := one.names):
                return one, names[name]
        known = [name for one in self.places for name in one.names]
        raise ApiError(404, unknown("model", name, known), param="model", code="model_not_found")

    def find(self, name: str | None) -> tuple[Served, str | None]:
        """As `place`, of a model that `use` has loaded. Raises ApiError."""
        place, adapter = self.place(name)
        if (served := place.served) is None:
            told = (
                f"the model {place.name} is not loaded; send a request that uses it, then try again"
            )
            raise ApiError(503, told, code="not_loaded")
        return served, adapter

    async def use(self, name: str | None, until: ExitStack) -> tuple[Served, str | None]:
        """A model and an adapter, as `place` finds them, once it is loaded. It stays so until that closes. Raises
        ApiError, Full.
        """
        place, adapter = self.place(name)
        wait = self._ask(place, adapter)
        try:
            served = await asyncio.wrap_future(wait)
        except asyncio.CancelledError:
            with self._changed:
                if wait.cancel():
                    self._changed.notify_all()
                elif wait.exception() is None:
                    self._release(place, adapter)
            raise
        until.callback(self._release, place, adapter)
        return served, adapter

    def entries(self) -> list[dict[str, Any]]:
        """What GET /v1/models lists."""
        return [one.entry(name) for one in self.places for name in one.names]

    def add_adapter(self, model: str, name: str, path: Path) -> None:
        """Let requests choose an adapter of a folder, in a model that is loaded and used. One of this name that nobody
        uses is replaced. Raises ApiError, InputError.
        """
        place, _ = self.place(model)
        assert place.served is not None, "it is used"
        engine, one = place.served.engine, place.served.model
        if not isinstance(engine, Engine):
            told = "requests run in several processes, which know the artifact's own adapters; build it with this one"
            if isinstance(engine, Embedder):
                told = "the model makes vectors of texts, and takes no adapters; leave it out"
            raise ApiError(400, f"lora_name: {told}", param="lora_name")
        with self._changed:
            if place.owns(name):
                raise _own(name)
            if name in place.added and place.users[name]:
                told = f"lora_name: requests use {shown(name)}; replace it when they have ended, or give another name"
                raise ApiError(400, told, param="lora_name", code="adapter_in_use")
            if len(place.added.keys() | {name}) > MOST_ADAPTERS:
                told = f"{model} has {MOST_ADAPTERS} adapters that were loaded; unload one"
                raise ApiError(400, told, param="lora_name", code="too_many_adapters")
        one.load_adapter(name, path)
        with self._changed:
            place.added[name] = path

    def remove_adapter(self, model: str, name: str) -> None:
        """Let no later request choose an adapter that was added; those that use it keep it. Raises ApiError,
        InputError.
        """
        place, _ = self.place(model)
        with self._changed:
            if place.owns(name):
                raise _own(name)
            if name not in place.added:
                told = unknown("adapter", name, place.added)
                raise ApiError(404, told, param="lora_name", code="adapter_not_found")
            del place.added[name]
            if place.served is not None:
                place.served.model.unload_adapter(name)

    def close(self) -> None:
        """Unload all, once a load that has begun is over; who waits for one is told that the server ends."""
        with self._changed:
            self._closing = True
            for place in self.places:
                place.refuse(CANCELLED)
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        for place in self.places:
            place.stack.close()

    def __enter__(self) -> Models:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, place: Place, adapter: str | None) -> Future[Served]:
        """Its model for a request, which uses it from when it is there. Raises Full."""
        wait: Future[Served] = Future()
        with self._changed:
            if self._closing:
                raise CANCELLED
            if place.asked_for() and len(place.waits) >= place.most_waits:
                told = f"{place.most_waits} requests wait for {place.name} to be loaded; try again later"
                raise Full(told)
            place.waits.append((wait, adapter))
            if place.served is not None and not place.leaving:
                place.give()
            elif place not in self._queue:
                self._queue.append(place)
                self._start()
        return wait

    def _release(self, place: Place, adapter: str | None) -> None:
        """A request is over."""
        with self._changed:
            place.users -= Counter({adapter: 1})
            place.last = monotonic()
            self._changed.notify_all()

    def _start(self) -> None:
        """The thread has something to do. Under the lock."""
        if self._thread is None:
            self._thread = Thread(target=self._work, name="accel-loader", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    # What follows is of that thread.

    def _work(self) -> None:
        while (found := self._awaited()) is not None:
            place, act = found
            act(place)

    def _awaited(self) -> tuple[Place, Callable[[Place], None]] | None:
        """What is to be done next; None: it ends."""
        with self._changed:
            while not self._closing:
                self._make_room()
                due = min(self._due(), key=lambda one: one[0], default=None)
                if due is not None and due[0] <= monotonic():
                    due[1].leaving = True
                for place in self.places:
                    if place.leaving and not place.users:
                        return place, self._unload
                if self._queue and not any(place.leaving for place in self.places):
                    return self._queue[0], self._load
                self._changed.wait(None if due is None else due[0] - monotonic())
            return None

    def _due(self) -> Iterator[tuple[float, Place]]:
        """When models are to be unloaded because nobody uses them."""
        for place in self.places:
            if self._idle is not None and place.bytes and not place.users:
                yield place.last + self._idle, place

    def _make_room(self) -> None:
        """Choose which models leave, for the first of the queue: those that nobody uses, then those whose last request
        came first. A place is in the queue once; what nobody waits for any more leaves it.
        """
        for place in self.places:
            place.leaving = False
        queue, self._queue = [place for place in self._queue if place.asked_for()], []
        for place in queue:
            if place.served is None or self._queue:  # it waits behind what it makes room for
                self._queue.append(place)
            else:
                place.give()
        if not self._queue or self._memory is None or self._queue[0].source is None:
            return
        if (need := self._queue[0].source.bytes) > self._memory:
            return  # it is refused
        left = self._memory - need - sum(one.bytes for one in self.places)
        for place in sorted(self.places, key=lambda one: (bool(one.users), one.last)):
            if left < 0 and place.bytes:
                place.leaving = True
                left += place.bytes

    def _load(self, place: Place) -> None:
        """Load what the folder holds now. It waits on where that does not fit any more."""
        try:
            assert place.source is not None, "what has none is loaded"
            before, place.source = place.source.bytes, place.source.again()
            if self._memory is not None and place.source.bytes > self._memory:
                told = self._too_large(place.source)
                headers = {"Retry-After": str(RETRY_SECONDS)}
                raise ApiError(503, told, code="model_too_large", headers=headers)
            if self._memory is not None and place.source.bytes > before:
                return
            served = place.stack.enter_context(place.source.open())
            self._add_again(place, served)
        except Exception as error:
            self._failed(place, error)
            return
        with self._changed:
            self._queue.remove(place)
            self._loaded(place, served)

    def _add_again(self, place: Place, served: Served) -> None:
        """Read what clients brought; what cannot be read any more is theirs to bring again."""
        for name, path in list(place.added.items()):
            try:
                served.model.load_adapter(name, path)
            except AccelError as error:
                self._say(f"{place.name}: the adapter {name} is left out: {error}")
                place.added.pop(name, None)

    def _loaded(self, place: Place, served: Served) -> None:
        """It is there. Under the lock."""
        for name in {*served.model.adapters} - {*place.about.adapters, *place.added}:
            served.model.unload_adapter(name)  # it was taken away meanwhile
        place.served, place.last = served, monotonic()
        place.count("loads_total")
        place.give()
        self._say(f"{place.name}: {served.engine.how}")

    def _failed(self, place: Place, error: Exception) -> None:
        """Tell those who wait; whoever asks next has it tried again."""
        named = "" if isinstance(error, AccelError | ApiError) else f"{type(error).__name__}: "
        self._say(f"{place.name} cannot be loaded: {named}{error}")
        words = f"the model {place.name} cannot be loaded; the server's log says why"
        told = error if isinstance(error, ApiError) else ApiError(500, words, code="load_failed")
        with self._changed:
            place.count("load_failures_total")
            self._queue.remove(place)
            place.refuse(told)

    def _unload(self, place: Place) -> None:
        with self._changed:
            served, place.served, place.leaving = place.served, None, False
        assert served is not None, "it is loaded"
        before = served.engine.stats
        place.stack.close()
        after = served.engine.stats  # those that ended with it
        for name in {*before, *after}:
            if "_total" in name or name == "moved_bytes":
                place.count(name, max(before.get(name, 0), after.get(name, 0)))
        del served
        trim()
        self._say(f"{place.name}: unloaded")

    def _too_large(self, source: Source) -> str:
        return (
            f"{source.name} takes about {source.bytes:,} bytes, and all models of this server may take "
            f"{self._memory:,}; serve with a larger --memory, or a smaller --max-batch"
        )


def _own(adapter: str) -> ApiError:
    told = (
        f"lora_name: {shown(adapter)} is the artifact's own adapter, which stays; give another name"
    )
    return ApiError(400, told, param="lora_name")
