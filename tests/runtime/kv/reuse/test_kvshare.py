"""kvshare: what the most similar stored prompt has is taken over, and computed again where it deviates or is read."""

import numpy as np
import pytest

from accel.ir.axis import find_axes
from accel.ir.errors import RecipeError
from accel.runtime.kv.reuse._store import Store, most_alike
from accel.runtime.session.prompt.pieces import PieceReuse

from ....pieces_case import asked, blended, put, repaired, reusing
from ....prefill_case import built, far, module
from ....session_ways import variants

RNG = np.random.default_rng(3)
STORED, OTHER, MORE = (RNG.integers(3, 50, n) for n in (40, 30, 8))
# A template whose first words and middle are filled in otherwise, and a part of another prompt.
PROMPT = np.concatenate([MORE[:3], STORED[2:18], MORE[3:6], STORED[20:34], OTHER[5:11], MORE[6:]])
PARTS = [put(3, STORED, 2, 16), put(22, STORED, 20, 14)]
COUNT = 30  # tokens that are taken over
NEXT = RNG.integers(3, 50, 7)
OPTIONS = {"ratio": 0.2, "attended": 0.1, "watch": 0.5, "threshold": 0.0, "repairs": 3}


def first(worth, count):
    """Which [n] of the highest."""
    return np.isin(np.arange(worth.size), np.argsort(-worth, kind="stable")[:count])


class Told:
    """What the method says, said again: tokens computed again at the prompt, and those watched after it."""

    def __init__(self):
        self.places = np.concatenate([np.arange(p.start, p.start + p.count) for p in PARTS])

    def stale(self, deviation, drawn):
        found = first(deviation, 6)
        found |= first(np.where(found, -1, drawn), 3)
        stays = ~found
        self.watched = self.places[stays][first(deviation[stays], 10)]
        return found

    def again(self, share):
        found = self.watched[np.sort(np.argsort(-share[self.watched], kind="stable")[:3])]
        self.watched = np.setdiff1d(self.watched, found)
        return found


def runs(tokens, stored, least):
    """How many tokens of a prompt lie in runs of `least` or more that this stored prompt has, by trying all of both;
    the longest run first, then what is left of others.
    """
    free = np.ones(tokens.size, bool)
    while True:
        best = (0, 0)
        for start in range(tokens.size):
            for offset in range(stored.size):
                count = 0
                while (
                    start + count < tokens.size
                    and offset + count < stored.size
                    and free[start + count]
                    and tokens[start + count] == stored[offset + count]
                ):
                    count += 1
                best = max(best, (count, -start))
        if best[0] < least:
            return int((~free).sum())
        free[-best[1] : -best[1] + best[0]] = False


def test_no_stored_prompt_has_more_of_a_prompt_than_the_one_that_is_found():
    """So a search by meaning would find none that is better, where only equal tokens are taken over."""
    rng, least, found = np.random.default_rng(1), 6, 0
    for _ in range(12):
        store, texts = Store(1000, least), [rng.integers(3, 9, 40) for _ in range(3)]
        for text in texts:
            store.add(0, text, dict)
        spans = rng.integers([[0, 0, 4]] * 3, [3, 20, 18]).tolist()
        parts = [texts[i][start : start + count] for i, start, count in spans]
        prompt = np.concatenate([*parts, rng.integers(3, 9, 5)])
        pieces = most_alike(store.matches(0, prompt), least)
        covered = sum(piece.count for piece in pieces)
        assert covered == max(runs(prompt, text, least) for text in texts)
        found += covered
    assert found > 60


def law_share(target="eager"):
    """After the prompt, and after each token behind it, what transformers gives with these keys and values; when all
    that is watched was computed again, the step runs as usual.
    """
    model, told = reusing("kvshare", target=target, **OPTIONS), Told()
    asked(model, OTHER, STORED)
    want, merged = blended(module("llama"), PROMPT, PARTS, 1, told.stale)
    with model.session() as session:
        got = session.prompt(PROMPT[None])
        assert session.stats["reused"] == COUNT - 9 and far(got[0, 0], want) < 1e-4
        one = session.observer(PieceReuse)
        for place in range(NEXT.size):
            assert session.room.tolist() == [1 if told.watched.size else 512]
            calls = session.stats["calls"]
            got = session.run(NEXT[None, [place]])
            assert session.stats["calls"] - calls == (2 if told.watched.size else 1)
            long = np.concatenate([PROMPT, NEXT[: place + 1]])
            want, merged = repaired(module("llama"), long, merged, 1, told.again)
            assert far(got[0, 0], want) < 1e-4
        assert one.repaired == 10 and not told.watched.size


def test_it_is_what_transformers_gives_with_these_keys_and_values():
    law_share()


@pytest.mark.parametrize("broken", ["deviation", "attention", "watched", "repaired", "stream"])
def test_the_law_catches(broken, monkeypatch):
    """Other tokens computed again at the prompt, watched, or computed again later; what other tokens' layers gave."""
    kind = find_axes()["kv.reuse"].method("kvshare")
    right = {name: getattr(kind, name) for name in ("stale", "watched", "repaired")}
    name, wrong = {
        "deviation": ("stale", lambda self, far, paid: right["stale"](self, -far, paid)),
        "attention": ("stale", lambda self, far, paid: right["stale"](self, far, -paid)),
        "watched": ("watched", lambda self, far: right["watched"](self, -far)),
        "repaired": ("repaired", lambda self, share: right["repaired"](self, share)[::-1]),
        "stream": ("", None),
    }[broken]
    if name:
        monkeypatch.setattr(kind, name, wrong)
    else:
        late = PieceReuse._repair.__globals__["TwoParts"].late
        target = "accel.runtime.session.prompt._two_parts.TwoParts.late"
        monkeypatch.setattr(target, lambda s, at, streams: late(s, at, [x[::-1] for x in streams]))
    with pytest.raises(AssertionError):
        law_share()


def test_what_is_exact():
    """Ratio 1; no match; the same prompt again. The control: else it is not."""
    want, _ = asked(built("llama"), PROMPT)
    model = reusing("kvshare", **OPTIONS)
    got, session = asked(model, PROMPT)
    assert np.array_equal(got, want) and session.stats["reused"] == 0
    again, session = asked(model, PROMPT)
    assert far(again, want) < 1e-5 and session.stats["reused"] == PROMPT.size - 1
    full = reusing("kvshare", **{**OPTIONS, "ratio": 1.0})
    assert far(asked(full, STORED, PROMPT)[0], want) < 1e-5
    assert far(asked(reusing("kvshare", **OPTIONS), STORED, PROMPT)[0], want) > 1e-3


def test_little_attention_computes_nothing_again_and_repairs_may_be_left_out():
    for options, calls, room in (({"threshold": 1.0}, 2, 1), ({"repairs": 0}, 1, 512)):
        model = reusing("kvshare", **{**OPTIONS, **options})
        asked(model, STORED)
        with model.session() as session:
            session.prompt(PROMPT[None])
            before = session.stats["calls"]
            assert session.room.tolist() == [room]
            session.run(NEXT[None, :1])
            assert session.stats["calls"] - before == calls
            assert session.observer(PieceReuse).repaired == 0


def test_rows_forks_and_files_go_on_as_one_row(tmp_path):
    """What is watched follows its row: behind a prompt that shares nothing, through a copy, a rewind and a file."""
    model = reusing("kvshare", **OPTIONS)
    asked(model, STORED)
    with model.session() as alone:
        alone.prompt(PROMPT[None])
        want = [alone.run(NEXT[None, [i]])[0, 0] for i in range(3)]
    tokens = np.array([PROMPT, np.pad(OTHER, (0, PROMPT.size - OTHER.size))])
    model = reusing("kvshare", **OPTIONS)
    asked(model, STORED)
    with model.session(2) as session:
        session.prompt(tokens, [PROMPT.size, OTHER.size])
        got = session.run(np.repeat(NEXT[None, :1], 2, 0))
        assert far(got[0, 0], want[0]) < 1e-5
        session.select([0, 0])
        with session.fork() as other:
            got = other.run(np.array([NEXT[[1]], [0]]), [1, 0])  # the second row reads nothing
            assert far(got[0, 0], want[1]) < 1e-5
            assert far(other.run(np.array([NEXT[[2]], NEXT[[1]]]))[:, 0], [want[2], want[1]]) < 1e-5
            other.select([1, 0])
            assert other.observer(PieceReuse)._watched[1].at.size == 1
            other.rewind(5)
            assert all((one.at < 5).all() for one in other.observer(PieceReuse)._watched)
        session.save(tmp_path / "two.session")
    with model.open_session(tmp_path / "two.session") as session:
        for place in (1, 2):
            got = session.run(np.repeat(NEXT[None, [place]], 2, 0))
            assert far(got[:, 0], [want[place]] * 2) < 1e-5


def test_a_call_that_fails_leaves_all_as_it_was(monkeypatch):
    model = reusing("kvshare", **OPTIONS)
    asked(model, STORED)
    with model.session() as session:
        session.prompt(PROMPT[None])
        with session.fork() as other:
            want = other.run(NEXT[None, :1])
        part = session._core.backend.part

        def fails(entry, given):
            found = part(entry, given)
            if entry == "blend.1":
                raise RuntimeError("out of luck")
            return found

        monkeypatch.setattr(session._core.backend, "part", fails)
        with pytest.raises(RuntimeError, match="luck"):
            session.run(NEXT[None, :1])
        monkeypatch.undo()
        assert session.length == PROMPT.size
        assert far(session.run(NEXT[None, :1]), want) < 1e-6


@pytest.mark.long
def test_an_artifact_does_as_the_eager_target():
    """And loops go on token by token."""
    model = reusing("kvshare", **OPTIONS)
    asked(model, STORED)
    want = model.generate(PROMPT.tolist(), 6, eos=[]).tokens
    artifact = reusing("kvshare", target="onnx", **OPTIONS)
    for _, loaded in variants(artifact):
        asked(loaded, STORED)
        assert loaded.generate(PROMPT.tolist(), 6, eos=[]).tokens == want
    assert want != built("llama").generate(PROMPT.tolist(), 6, eos=[]).tokens


@pytest.mark.parametrize(
    "options", [{"attended": 1.1}, {"watch": -0.5}, {"threshold": 2.0}, {"repairs": -1}]
)
def test_options_that_mean_nothing_are_refused(options):
    (name,) = options
    with pytest.raises(RecipeError, match=f"kv.reuse.kvshare: {name} is .*; give 0"):
        find_axes()["kv.reuse"].build("kvshare", **options)
