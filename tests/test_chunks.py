"""Sessions sent in chunks: the level of each by what the wire carries, and what the receiver then holds."""

from functools import partial

import numpy as np
import pytest

from accel.ir.errors import InputError, SavedSessionError
from accel.runtime.session import chunks
from accel.runtime.session.chunks import HEAD, TEXT, Wire, choose, name_of
from accel.runtime.session.saved import imported

from .prefill_case import built, far

FILE = {"kv.file": {"use": "cachegen", "bins": 128, "deep_bins": 64, "coder": "arithmetic"}}
TOKENS = np.random.default_rng(6).integers(3, 50, 60)
AFTER = np.random.default_rng(7).integers(3, 50, (1, 5))


def by_search(counts, sizes, left, rate, speed):
    """The first of all levels, text before them, that is in time for all; else what takes least."""
    best = None
    for level in range(-1, len(sizes[0])):
        took = 0.0
        for count, each in zip(counts, sizes, strict=True):
            took += count / max(speed, 1e-12) if level < 0 else each[level] / rate
        if took <= left:
            return level
        if best is None or took < best[0]:
            best = took, level
    return best[1]


def test_the_level_is_the_nearest_that_comes_in_time():
    rng, seen = np.random.default_rng(0), set()
    for _ in range(300):
        count = int(rng.integers(1, 6))
        counts = rng.integers(1, 100, count).tolist()
        sizes = [sorted(rng.integers(1, 1000, 3).tolist(), reverse=True) for _ in range(count)]
        case = counts, sizes, *np.exp(rng.normal([0, 6, 3], 1.5)).tolist()
        assert choose(*case) == by_search(*case)
        seen.add(choose(*case))
    assert seen == {TEXT, 0, 1, 2}
    assert choose([5], [[9, 3]], 0.0, 1.0, 0.0) == 1, "nothing is computed where no speed is known"


class Slow:
    """A wire that carries `rates` bytes a second, one after another of the parts, on a clock of its own."""

    def __init__(self, parts, rates):
        self.parts, self.rates, self.now, self.names = parts, iter(rates), 0.0, []

    def fetch(self, name):
        self.names.append(name)
        self.now += len(self.parts[name]) / next(self.rates)
        return self.parts[name]

    def clock(self):
        return self.now


@pytest.fixture(scope="module")
def model():
    return built("llama", tables=FILE)


@pytest.fixture(scope="module")
def parts(model):
    with model.session() as session:
        session.prompt(TOKENS[None])
        return session.export_chunks(TOKENS, 16)


def law(model, parts, rates, seconds, speed, computed=0.0):
    """What came of each chunk at these rates, as the rule says it by hand; then the row goes on near the sender."""
    saved, wire = imported(parts[HEAD]), Slow(parts, rates)
    sizes, counts = saved.header["sizes"], [16, 16, 16, 12]
    with model.session() as session, model.session() as other:

        def prompt(plain, tokens, *rest):
            wire.now += tokens.shape[1] / computed if computed else 0.0
            return plain(tokens, *rest)

        session.prompt = partial(prompt, session.prompt)
        first = Wire(wire.fetch, rates[0], speed, wire.clock)
        took = session.import_chunks(saved, first, seconds)
        rate, now = rates[0], 0.0
        left = iter(rates)
        for i, one in enumerate(took):
            assert one.level == by_search(counts[i:], sizes[i:], seconds - now, rate, speed)
            if one.level == TEXT:
                speed = computed
                now += counts[i] / computed
            else:
                assert one.bytes == sizes[i][one.level]
                rate = next(left)
                now += one.bytes / rate
        assert session.length == 60 and (session.tokens[0] == TOKENS).all()
        other.prompt(TOKENS[None])
        lost = far(session.run(AFTER), other.run(AFTER))
    assert wire.names == [name_of(i, one.level) for i, one in enumerate(took) if one.level != TEXT]
    return [one.level for one in took], lost


def test_a_wire_that_slows_down_gets_coarser_levels(model, parts):
    size = len(parts[name_of(0, 0)])
    fast, near = law(model, parts, [size] * 9, 5.0, 0.0)
    slow, less = law(model, parts, [size, size / 3, size / 3, size / 3], 5.0, 0.0)
    assert fast == [0, 0, 0, 0] and slow[0] == 0 and slow[-1] > 0 and slow == sorted(slow)
    assert 0 < near < less < 0.3


def test_text_is_computed_where_that_is_in_time(model, parts):
    size = len(parts[name_of(0, 0)])
    assert law(model, parts, [size], 5.0, 100.0, 100.0) == ([TEXT] * 4, pytest.approx(0, abs=1e-5))
    levels, lost = law(model, parts, [size] * 9, 4.0, 20.0, 5.0)
    assert levels[0] == TEXT and set(levels[1:]) != {TEXT} and lost < 0.3
    levels, lost = law(model, parts, [size, size, size / 9], 6.0, 8.0, 50.0)
    assert levels[0] != TEXT and levels[-1] == TEXT and lost < 0.3


def test_the_law_catches_levels_that_ignore_the_wire(model, parts, monkeypatch):
    monkeypatch.setattr(chunks, "choose", lambda *_: 0)
    size = len(parts[name_of(0, 0)])
    with pytest.raises(AssertionError):
        law(model, parts, [size, size / 3, size / 3, size / 3], 5.0, 0.0)


def test_a_chunk_at_another_place_is_refused(model, parts):
    wrong = {**parts, name_of(1, 0): parts[name_of(2, 0)]}
    with pytest.raises(SavedSessionError, match=r"1\.0 is another part of a session"):
        law(model, wrong, [len(parts[name_of(0, 0)])] * 9, 5.0, 0.0)


def test_a_model_opens_what_comes_from_a_store(model, parts):
    session, took = model.import_chunks(parts.__getitem__, 1e6)
    with session:
        assert [one.level for one in took] == [TEXT] * 4 and session.length == 60
    session, took = model.import_chunks(parts.__getitem__, 0.0, speed=1e-9)
    with session:
        assert [one.level for one in took] == [2] * 4
        session.rewind(40)
        assert session.run(AFTER).shape[1] == 5


def test_what_cannot_be_sent_is_refused(model, parts):
    with model.session(2) as two, built("llama").session() as plain, model.session() as one:
        two.prompt([[3, 4], [5, 6]])
        with pytest.raises(InputError, match="one row, whose tokens it knows"):
            two.export_chunks([3, 4])
        with pytest.raises(InputError, match="build with one that does"):
            plain.export_chunks([3])
        one.prompt(TOKENS[None])
        with pytest.raises(InputError, match="size = 0 is out of range"):
            one.export_chunks(TOKENS, 0)
    with pytest.raises(SavedSessionError, match="is of recipe"):
        built("llama").import_chunks(parts.__getitem__, 1.0)
    cut = {**parts, name_of(0, 2): parts[name_of(0, 2)][:-9]}
    with pytest.raises(SavedSessionError, match=r"0\.2"):
        model.import_chunks(cut.__getitem__, 0.0, speed=1e-9)
    evicting = {**FILE, "kv.score": {"use": "knorm"}, "kv.budget": {"use": "uniform", "tokens_kept": 12}}  # fmt: skip
    with built("llama", tables=evicting).session() as session:
        session.prompt(TOKENS[None])
        with pytest.raises(InputError, match="a slot for each token"):
            session.export_chunks(TOKENS)
