"""Laws of a session, for every target, each with a broken variant that the law must catch."""

import threading
import weakref

import numpy as np
import pytest

from accel.ir.errors import InputError
from accel.runtime.backends.onnx import session as ort_session

from ..session_ways import close

TARGETS = ["ort", "eager"]


class Broken:
    """A backend session that passes everything on; subclasses spoil one thing."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def step(self, tokens, positions, slots, rows, want=(), tree=None, embeds=None):
        return self.inner.step(tokens, positions, slots, rows)


class PaddingIsReal(Broken):
    """Forgets that padding has position -1."""

    def step(self, tokens, positions, slots, rows, want=(), tree=None, embeds=None):
        return self.inner.step(tokens, np.abs(positions), slots, rows)


class NeverRewinds(Broken):
    """Keeps writing after what was forgotten, at later positions."""

    top = 0

    def step(self, tokens, positions, slots, rows, want=(), tree=None, embeds=None):
        shift = max(0, self.top - int(slots[0]))
        self.top = int(slots[0]) + shift + tokens.shape[1]
        return self.inner.step(tokens, positions + shift, slots + shift, rows)


class SharedFork(Broken):
    def copy(self):
        return self


class ForgetsOnGrowth(Broken):
    def resize(self, capacity):
        self.inner._buffers = {}
        self.inner.resize(capacity)


def law_ragged_is_alone(toy, target, wrap=None):
    tokens, lengths = toy.tokens(3, 9), np.array([9, 4, 0])
    more, more_lengths = toy.tokens(3, 5, seed=1), np.array([2, 5, 3])
    padded = np.where(np.arange(9) < lengths[:, None], tokens, -1)
    session = toy.session(target, 3, wrap)
    first = session.run(padded, lengths)
    second = session.run(more, more_lengths)
    for row in range(3):
        n, m = lengths[row], more_lengths[row]
        want = toy.oracle(np.concatenate([tokens[row, :n], more[row, :m]]))
        close(first[row, :n], want[:n])
        close(second[row, :m], want[n:])
        assert not first[row, n:].any() and not second[row, m:].any()
    assert session.length == [11, 9, 3]


def law_rewind_is_fresh(toy, target, wrap=None):
    tokens = toy.tokens(1, 12)
    session = toy.session(target, wrap=wrap)
    session.run(tokens)
    session.rewind(5)
    assert session.length == 5
    other = toy.tokens(1, 4, seed=3)
    got = session.run(other)
    close(got[0], toy.oracle(np.concatenate([tokens[0, :5], other[0]]))[5:])


def law_forks_are_apart(toy, target, wrap=None):
    tokens, a, b = toy.tokens(1, 6), toy.tokens(1, 3, seed=1), toy.tokens(1, 3, seed=2)
    session = toy.session(target, wrap=wrap)
    session.run(tokens)
    other = session.fork()
    session.run(a)
    other.run(b)
    close(session.run(a)[0], toy.oracle(np.concatenate([tokens[0], a[0], a[0]]))[-3:])
    close(other.run(b)[0], toy.oracle(np.concatenate([tokens[0], b[0], b[0]]))[-3:])


def law_calls_may_be_cut(toy, target, cuts, wrap=None):
    tokens = toy.tokens(1, sum(cuts))
    want = toy.oracle(tokens[0])
    session, start = toy.session(target, wrap=wrap), 0
    for cut in cuts:
        got = session.run(tokens[:, start : start + cut])
        close(got[0], want[start : start + cut])
        start += cut


LAWS = [law_ragged_is_alone, law_rewind_is_fresh, law_forks_are_apart]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("law", LAWS)
def test_law(toy, target, law):
    law(toy, target)


@pytest.mark.parametrize(
    "law, wrap", list(zip(LAWS, [PaddingIsReal, NeverRewinds, SharedFork], strict=True))
)
def test_law_catches_the_broken(toy, law, wrap):
    with pytest.raises(AssertionError):
        law(toy, "ort", wrap)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("cuts", [[1] * 20, [7, 1, 1, 2, 9], [20], [250, 1, 1, 10, 1], [600, 1, 3]])
def test_calls_may_be_cut_and_the_cache_grows(toy, target, cuts):
    law_calls_may_be_cut(toy, target, cuts)


def test_growth_law_catches_the_broken(toy):
    with pytest.raises(AssertionError):
        law_calls_may_be_cut(toy, "ort", [250, 10], ForgetsOnGrowth)


@pytest.mark.parametrize("target", TARGETS)
def test_long_calls_are_chunked_and_counted(toy, target):
    tokens, lengths = toy.tokens(2, 1200), np.array([1200, 520])
    session = toy.session(target, 2)
    got = session.run(tokens, lengths)
    close(got[0], toy.oracle(tokens[0]))
    close(got[1, :520], toy.oracle(tokens[1, :520]))
    assert session.stats["calls"] == 3 and session.stats["tokens"] == 1720
    last = toy.session(target, 2).run(tokens, lengths, last_only=True)
    close(last[:, 0], np.stack([got[0, 1199], got[1, 519]]))
    assert last.shape == (2, 1, toy.vocab)
    one = toy.tokens(2, 1, seed=5)
    close(session.run(one)[1, 0], toy.oracle(np.append(tokens[1, :520], one[1]))[-1])


def test_last_only_of_rows_without_tokens(toy):
    session = toy.session("ort", 2)
    got = session.run([[5, 6], [0, 0]], [2, 0], last_only=True)
    close(got[0, 0], toy.oracle(np.array([5, 6]))[-1])
    assert not got[1].any() and session.length == [2, 0]
    calls = session.stats["calls"]
    assert not session.run([[-1], [-1]], [0, 0]).any() and session.stats["calls"] == calls


def test_logits_belong_to_the_caller(toy):
    session = toy.session()
    session.run(toy.tokens(1, 3))
    first = session.run([[1]])
    kept = first.copy()
    session.run([[2]])
    assert np.array_equal(first, kept)
    first[:] = 0  # and writing into it harms nothing
    close(session.run([[3]])[0], toy.oracle(np.append(toy.tokens(1, 3)[0], [1, 2, 3]))[-1:])


def test_a_failed_call_changes_nothing(toy):
    class Fails(Broken):
        bad = False

        def step(self, tokens, positions, slots, rows, want=(), tree=None, embeds=None):
            if self.bad and int(slots[0]) >= 512:
                raise RuntimeError("no")
            return self.inner.step(tokens, positions, slots, rows)

    session = toy.session(wrap=Fails)
    tokens = toy.tokens(1, 700)
    session.run(tokens[:, :5])
    session._core.backend.bad = True
    with pytest.raises(RuntimeError):
        session.run(toy.tokens(1, 700, seed=4))
    with pytest.raises(InputError):
        session.run([[toy.vocab]])
    assert session.length == 5
    session._core.backend.bad = False
    close(session.run(tokens[:, 5:])[0], toy.oracle(tokens[0])[5:])


def test_rows_rewind_apart(toy):
    session = toy.session("ort", 2)
    tokens = toy.tokens(2, 8)
    session.run(tokens)
    session.rewind([8, 3])
    assert session.length == [8, 3] and session.lengths.tolist() == [8, 3]
    got = session.run([[4, 5], [6, 7]])
    close(got[0], toy.oracle(np.append(tokens[0], [4, 5]))[-2:])
    close(got[1], toy.oracle(np.append(tokens[1, :3], [6, 7]))[-2:])
    session.rewind(0)
    assert session.length == 0


@pytest.mark.parametrize("target", TARGETS)
def test_kv_bytes_follow_the_formula(toy, target):
    session = toy.session(target, 2)
    assert session.stats["kv_bytes"] == 0
    session.run(toy.tokens(2, 250))
    per_slot = 2 * (8 + 2 * 2 * 8 * 4)
    assert session.stats["kv_bytes"] == 256 * per_slot
    session.run(toy.tokens(2, 7))
    assert session.stats["kv_bytes"] == 512 * per_slot
    session.close()
    assert session.stats["kv_bytes"] == 0


def test_sessions_in_threads(toy):
    tokens, wrong = toy.tokens(8, 40), []
    want = [toy.oracle(row) for row in tokens]

    def work(i):
        with toy.session() as session:
            for t in range(40):
                if not np.allclose(
                    session.run(tokens[i : i + 1, t : t + 1])[0, 0], want[i][t], atol=2e-4
                ):
                    wrong.append((i, t))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


BAD = [
    ([[0, 999]], {}, "token 999 at row 0, column 1"),
    ([[0, -1]], {}, "token -1 at row 0, column 1"),
    ([[0.5]], {}, "float64"),
    ([["a"]], {}, "not an integer type"),
    ([[True]], {}, "bool"),
    ([0, 1], {}, r"shape \[2\]"),
    ([[1], [2]], {}, r"takes \[1, T\]"),
    ([[]], {}, "T >= 1"),
    ([[1, 2], [3]], {}, "rows differ"),
    ([[2**70]], {}, "tokens"),
    ([[1, 2]], {"lengths": [3]}, r"lengths\[0\] is 3"),
    ([[1, 2]], {"lengths": [-1]}, r"lengths\[0\] is -1"),
    ([[1, 2]], {"lengths": [1, 1]}, "one per row"),
    ([[1, 2]], {"lengths": [0.5]}, "lengths"),
    ([[1] * 1301], {}, "max_context is 1300"),
]


@pytest.mark.parametrize("tokens, options, words", BAD)
def test_bad_calls(toy, tokens, options, words):
    with pytest.raises(InputError, match=words):
        toy.session().run(tokens, **options)


def test_bad_rewinds_and_closed(toy):
    session = toy.session()
    session.run([[1, 2, 3]])
    for length in (4, -1, [1, 2], 1.5):
        with pytest.raises(InputError):
            session.rewind(length)
    session.close()
    session.close()
    for act in (lambda: session.run([[1]]), lambda: session.rewind(0), session.fork):
        with pytest.raises(InputError, match="closed"):
            act()


class Sizes(Broken):
    """Notes the room that is made."""

    def __init__(self, inner):
        super().__init__(inner)
        self.made = []

    def resize(self, *capacity):
        self.made.append(capacity[0])
        self.inner.resize(*capacity)


@pytest.mark.parametrize("target", TARGETS)
def test_a_long_prompt_makes_room_once(toy, target, monkeypatch):
    """Growing copies the cache: with each part of a prompt it would hold twice as much, again and again."""
    monkeypatch.setattr("accel.runtime.session.core.CHUNK", 4)
    monkeypatch.setattr("accel.runtime.session.core.STEP", 4)
    tokens, sizes = toy.tokens(2, 23), []
    session = toy.session(target, 2, lambda inner: sizes.append(Sizes(inner)) or sizes[0])
    close(session.run(tokens, np.array([23, 9]))[0], toy.oracle(tokens[0]))
    assert sizes[0].made == [24]


def test_what_growing_copies_is_a_share_of_the_context(toy, monkeypatch):
    """Room grows by an eighth: all copies together are of no more than nine times the tokens, where steps of four
    tokens would copy thirty times as many.
    """
    monkeypatch.setattr("accel.runtime.session.core.STEP", 4)
    tokens, sizes = toy.tokens(1, 240)[0], []
    session = toy.session("ort", 1, lambda inner: sizes.append(Sizes(inner)) or sizes[0])
    for start in range(0, 240, 4):
        session.run(tokens[None, start : start + 4])
    made = sizes[0].made
    assert sum(made[:-1]) <= 9 * 240 < sum(range(0, 240, 4))
    assert all(
        room <= max(4, 9 * have // 8 + 4) + 4 for have, room in zip(made, made[1:], strict=False)
    )


def test_growing_holds_one_buffer_twice(toy, monkeypatch):
    """Each is let go before the next is copied; what is not written of the new ones takes no memory."""
    session, alive = toy.session("ort"), []
    close(session.run(toy.tokens(1, 5))[0], toy.oracle(toy.tokens(1, 5)[0]))
    backend, real = session._core.backend, ort_session.fill
    old = [weakref.ref(array.base) for array in backend._buffers.values()]

    def fill(new, before):
        alive.append(sum(ref() is not None for ref in old))
        real(new, before)

    monkeypatch.setattr(ort_session, "fill", fill)
    backend.resize(4096)
    assert alive == list(range(len(old), 0, -1))
    assert not any(ref() for ref in old)
