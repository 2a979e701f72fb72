"""What drafters keep from one request to the next: nothing unless asked; then it is bounded, safe between threads,
makes the next like request quicker, and never changes a token.
"""

import dataclasses
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from accel.ir.axis import Axis
from accel.ir.errors import RecipeError
from accel.runtime.draft.suffix_tree import SuffixTree
from accel.runtime.sample.standard import Standard
from accel.runtime.speculation.texts import TextStore

from ..store_case import SIZE, decode, plain

AXIS = Axis("draft", "accel.runtime.draft")
SHARED = [
    name
    for name in AXIS.names()
    if "shared" in {field.name for field in dataclasses.fields(AXIS.method(name))}
]
FACTS = SimpleNamespace(vocab_size=SIZE, max_context=64, name="table")


def prompts(seed, count=6):
    return np.random.default_rng(seed).integers(0, SIZE, (count, 3)).tolist()


def calls(method, store, asked, seed=0):
    return sum(decode(method, [prompt], store=store, seed=seed)[1] for prompt in asked)


def small(name):
    """A method whose store is twice the smallest that it may be, for requests of 64 tokens."""
    size = 1 << 10
    while True:
        method = AXIS.build(name, shared=True, bytes=2 * size)
        try:
            AXIS.build(name, shared=True, bytes=size).store(FACTS, None)
            return method
        except RecipeError:
            size *= 2


def keeps_tokens(method):
    """A store of other texts, and of this one, leaves greedy and seeded tokens as they are."""
    for sampler in (Standard(), Standard(temperature=0.9)):
        store = method.store(FACTS, None)
        want = plain([[1, 2, 3], [4, 5, 6]], sampler)
        calls(method, store, prompts(2), seed=7)  # of another table, so that drafts mislead
        for _ in range(2):
            assert decode(method, [[1, 2, 3], [4, 5, 6]], sampler, store=store)[0] == want


def drafts_better(method):
    """Of two like requests the second takes fewer calls, after other requests too."""
    store, alone = method.store(FACTS, None), calls(method, None, [[1, 2, 3]])
    first = calls(method, store, [[1, 2, 3]])
    calls(method, store, prompts(3))
    assert calls(method, store, [[1, 2, 3]]) < 0.8 * min(first, alone)
    assert calls(method, method.store(FACTS, None), [[1, 2, 3]]) == first, "stores share something"


def stays_small(method):
    """It holds no more than it may, by its own count and by Python's."""
    store, asked = method.store(FACTS, None), prompts(5, 2000)
    known = calls(method, store, asked[:1]) and calls(method, store, asked[:1])
    for n, prompt in enumerate(asked[1:]):
        calls(method, store, [prompt], seed=n % 8)
        assert store.bytes <= method.bytes
        if n % 25 == 24:
            assert held(store) <= 1.1 * method.bytes + 2000, "more than it says"
            if calls(method, store, asked[:1]) > known:
                return
    raise AssertionError("it never forgets")


def held(thing, seen=None):
    """The bytes of an object and all that it refers to."""
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, type):
        return 0
    seen.add(id(thing))
    parts = list(getattr(thing, "__dict__", {}).values())
    if isinstance(thing, dict):
        parts += [*thing.keys(), *thing.values()]
    elif isinstance(thing, (list, tuple, set, frozenset, deque)):
        parts += list(thing)
    elif isinstance(thing, np.ndarray) and thing.base is not None:
        parts.append(thing.base)
    return sys.getsizeof(thing) + sum(held(part, seen) for part in parts)


def outlives_threads(method):
    """Requests of several threads fill it as those of one do."""
    asked, stores = prompts(4, 16), [method.store(FACTS, None) for _ in range(2)]
    calls(method, stores[0], asked)
    every = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda prompt: calls(method, stores[1], [prompt]), asked))
    finally:
        sys.setswitchinterval(every)
    one, several = (calls(method, store, asked) for store in stores)
    assert several < 1.15 * one


def test_nothing_is_kept_unless_asked():
    assert SHARED
    for name in AXIS.names():
        assert name not in SHARED or AXIS.build(name).store(FACTS, None) is None
        if name in SHARED:
            method = AXIS.build(name)
            assert decode(method, [[1, 2, 3]])[1] == decode(method, [[1, 2, 3]])[1]


@pytest.mark.few(8)
@pytest.mark.parametrize("law", [keeps_tokens, drafts_better, stays_small, outlives_threads])
@pytest.mark.parametrize("name", SHARED)
def test_every_store(name, law):
    law(AXIS.build(name, shared=True) if law is not stays_small else small(name))


@pytest.mark.parametrize("name", SHARED)
def test_a_store_smaller_than_a_request(name):
    with pytest.raises(RecipeError, match=f"draft.{name}: .*at least"):
        AXIS.build(name, shared=True, bytes=100).store(FACTS, None)


class Deaf(TextStore):
    def add(self, text):
        pass


class Growing(TextStore):
    def __init__(self, most):
        super().__init__(1 << 30)

    @property
    def bytes(self):
        return 0


class Lossy(TextStore):
    """Two threads that write at once overwrite each other."""

    def add(self, text):
        before, size = self._tokens, self._size
        time.sleep(2e-3)
        tokens = np.concatenate([before[:size], [-1], text]).astype(np.int32)
        self._tokens, self._size = tokens[-self._most :], min(tokens.size, self._most)


@dataclass(frozen=True)
class Broken(SuffixTree):
    kind: type = Deaf

    def store(self, facts, tokenizer):
        return self.kind(self.bytes)


BROKEN = {Deaf: drafts_better, Growing: stays_small, Lossy: outlives_threads}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_store_is_caught(kind):
    with pytest.raises(AssertionError):
        BROKEN[kind](Broken(shared=True, bytes=1 << 12, kind=kind))
