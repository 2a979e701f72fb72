"""cacheblend: chunks are taken over wherever they lie, and what deviates most is computed again."""

import numpy as np
import pytest

from accel.compiler.assemble import assemble
from accel.ir.axis import find_axes
from accel.ir.encoder import EncoderFacts
from accel.ir.errors import InputError, PassError, RecipeError
from accel.ir.recipe import Recipe
from accel.passes.prefill.prune._blend import Blend
from accel.runtime.kv.reuse._store import Store, cover
from accel.runtime.session.prompt import _two_parts, pieces
from accel.runtime.session.prompt.pieces import PieceReuse

from ....pieces_case import CHUNKS, QUESTION, asked, blended, put, reusing
from ....prefill_case import built, far, module
from ....session_ways import variants

PROMPT = np.concatenate([[7, 8], *CHUNKS, QUESTION])
PARTS = [put(2 + 14 * i, chunk) for i, chunk in enumerate(CHUNKS)]
MORE = np.random.default_rng(7).integers(3, 50, 6)


def most(ratio):
    """As the paper picks: so many of the reused tokens, those that deviate most."""

    def stale(deviation, _):
        rank = np.argsort(-deviation, kind="stable")[: int(ratio * deviation.size)]
        return np.isin(np.arange(deviation.size), rank)

    return stale


def whole(*prompts, name="llama"):
    """Logits [V] after the last of them without reuse."""
    return asked(built(name), prompts[-1])[0]


def law_blend(ratio=0.25, name="llama"):
    """What transformers gives whose later layers read these keys and values, after the prompt and after more tokens;
    the cache then holds all tokens in order.
    """
    model = reusing("cacheblend", name, ratio=ratio)
    asked(model, *CHUNKS)
    with model.session() as session:
        session.run(PROMPT[None, :1])  # a session that holds tokens already
        got = session.prompt(PROMPT[None, 1:])
        assert session.stats["reused"] == 42 - int(ratio * 42)
        assert session._core.backend.buffers()["kv.pos"][0, :50].tolist() == [*range(49), -1]
        session.rewind(47)
        assert far(session.run(PROMPT[None, 47:])[0, -1], got[0, 0]) < 1e-5
        later = session.run(MORE[None])
    long = np.concatenate([PROMPT, MORE])
    for found, tokens in ((got[0, 0], PROMPT), (later[0, -1], long)):
        assert far(found, blended(module(name), tokens, PARTS, 1, most(ratio))[0]) < 1e-4


@pytest.mark.parametrize(
    ("name", "ratio"),
    [
        ("llama", 0.25),
        ("llama", 0.0),
        *(pytest.param(n, 0.25, marks=pytest.mark.long) for n in ("mistral", "gpt_neox", "qwen3")),
    ],
)
def test_later_layers_read_what_is_stored_but_for_what_deviates_most(name, ratio):
    law_blend(ratio, name)


@pytest.mark.parametrize("broken", ["mask", "turn", "least", "order", "kept"])
def test_the_law_catches(broken, monkeypatch):
    """Masks of the released code, which lets queries see later text; keys of other positions; the tokens that deviate
    least; keys and values that go to one another's slots; slots that still hold what was computed again.
    """
    method, parts = find_axes()["kv.reuse"].method("cacheblend"), _two_parts.TwoParts
    turned, part, move, stale = pieces._Blend._turned, parts._part, parts._move, method.stale

    def of_other_positions(self):
        self.first = self.first + 3
        found = turned(self)
        self.first = self.first - 3
        return found

    def masked_from_the_right(self, entry, given):
        if entry == "blend.1":
            count = given["positions"].shape[1]
            given["positions"] = self.total[:, None] - count + np.arange(count)
        return part(self, entry, given)

    where, name, wrong = {
        "mask": (parts, "_part", masked_from_the_right),
        "turn": (pieces._Blend, "_turned", of_other_positions),
        "least": (method, "stale", lambda self, far, paid: stale(self, -far, paid)),
        "order": (parts, "_move", lambda self, at: move(self, [one[::-1] for one in at])),
        "kept": (parts, "_empty", lambda self, at: None),
    }[broken]
    monkeypatch.setattr(where, name, wrong)
    with pytest.raises(AssertionError):
        law_blend()


def test_what_is_exact():
    """Ratio 1; no match; a true prefix and the same prompt again, whatever the ratio. The control: else it is not."""
    none = reusing("cacheblend", ratio=0.0)
    got, session = asked(none, PROMPT)
    assert np.array_equal(got, whole(PROMPT)) and session.stats["reused"] == 0
    again, session = asked(none, PROMPT)
    assert far(again, got) < 1e-5 and session.stats["reused"] == 48
    longer = np.concatenate([PROMPT, MORE])
    grown, session = asked(none, longer)
    assert far(grown, whole(longer)) < 1e-5 and session.stats["reused"] == 49
    assert far(asked(reusing("cacheblend", ratio=1.0), *CHUNKS, PROMPT)[0], got) < 1e-5
    approximate, session = asked(reusing("cacheblend", ratio=0.0), *CHUNKS, PROMPT)
    assert far(approximate, got) > 1e-3 and session.stats["reused"] == 42


def test_deviation_is_zero_where_the_text_before_is_the_same(monkeypatch):
    """A prefix of which the row holds some tokens already is reused as a piece, and nothing of it deviates."""
    model, seen = reusing("cacheblend", ratio=0.0), []
    method = find_axes()["kv.reuse"].method("cacheblend")
    stale = method.stale
    monkeypatch.setattr(
        method, "stale", lambda self, far, paid: seen.append(far) or stale(self, far, paid)
    )
    asked(model, PROMPT)
    with model.session() as session:
        session.run(PROMPT[None, :3])
        got = session.prompt(PROMPT[None, 3:])
        assert far(got[0, 0], whole(PROMPT)) < 1e-5 and session.stats["reused"] == 45
    assert seen[0].max() < 1e-8
    asked(model, CHUNKS[1], np.concatenate([CHUNKS[2], CHUNKS[1], QUESTION]))
    assert seen[1].max() > 1e-3


@pytest.mark.parametrize("chunk", [512, 10])
def test_rows_are_blended_as_if_alone(chunk, monkeypatch):
    """Of several chunks, of none, of a prefix and one; prompts longer than a call."""
    monkeypatch.setattr("accel.runtime.session.core.CHUNK", chunk)
    prompts = [PROMPT, MORE, np.concatenate([CHUNKS[1], MORE, CHUNKS[0], QUESTION])]
    alone = [asked(reusing("cacheblend"), *CHUNKS, prompt)[0] for prompt in prompts]
    model, longest = reusing("cacheblend"), max(map(len, prompts))
    asked(model, *CHUNKS)
    tokens = np.array([np.pad(prompt, (0, longest - len(prompt))) for prompt in prompts])
    with model.session(3) as session:
        got = session.prompt(tokens, [len(prompt) for prompt in prompts])
        assert session.lengths.tolist() == [len(prompt) for prompt in prompts]
        for row, want in enumerate(alone):
            assert far(got[row, 0], want) < 1e-5
        session.select([2, 0])
        with session.fork() as other:
            other.rewind([30, 40])
            session.rewind([30, 40])
            assert far(*(s.run([[5, 6], [5, 6]]) for s in (session, other))) < 1e-6


def test_only_what_was_computed_is_stored():
    """So that errors do not add up: of a blended row the tokens before what was taken over, and all after a rewind."""
    model = reusing("cacheblend", ratio=0.0)
    asked(model, CHUNKS[0], mixed := np.concatenate([MORE, CHUNKS[0], QUESTION]))
    observers = [factory.open(1) for factory in model._sessions.observers]
    (store,) = [one.reuse.store for one in observers if isinstance(one, PieceReuse)]
    held = sorted(one.tokens.tolist() for one in store._stored.values())
    assert held == sorted([CHUNKS[0].tolist(), MORE.tolist()])
    with model.session() as session:
        session.prompt(mixed[None])
        session.rewind(6)
        session.run(CHUNKS[1][None])
    held = [one.tokens.tolist() for one in store._stored.values()]
    assert [*MORE.tolist(), *CHUNKS[1].tolist()] in held and MORE.tolist() not in held


def test_a_call_that_fails_leaves_all_as_it_was(monkeypatch):
    model = reusing("cacheblend")
    asked(model, *CHUNKS)
    with model.session() as session, built("llama").session() as plain:
        for each in (session, plain):
            each.run(PROMPT[None, :2])
        part = session._core.backend.part

        def fails(entry, given):
            found = part(entry, given)
            if entry == "blend.1":
                raise RuntimeError("out of luck")
            return found

        monkeypatch.setattr(session._core.backend, "part", fails)
        with pytest.raises(RuntimeError, match="luck"):
            session.prompt(PROMPT[None, 2:])
        assert session.length == 2
        assert far(session.run(PROMPT[None, 2:]), plain.run(PROMPT[None, 2:])) < 1e-5


def test_a_store_is_full_and_no_fuller():
    a, b, c, d = np.random.default_rng(1).integers(0, 999, (4, 40))
    store = Store(120, 8)
    for text in (a[:8], a):  # the first is a beginning of the second
        store.add(0, text, dict)
    assert store.stats["prompts"] == 1
    long, short = np.random.default_rng(2).integers(0, 999, 121), d[:7]
    for text in (b, c, a[:20], long, short):  # a is used once more
        store.add(0, text, dict)
    assert store.stats == {**store.stats, "filled": 120, "prompts": 3}
    store.add(0, d, dict)
    found = [store.prefix(0, text) is not None for text in (a, b, c, d)]
    assert found == [True, False, True, True]
    assert store.prefix(0, c[:8]).count == 8 and store.prefix(0, c[:7]) is None
    assert store.prefix(1, c) is None


def test_a_store_finds_the_longest_runs_and_forgets_the_oldest():
    rng = np.random.default_rng(0)
    for least in (3, 4, 16):
        store, texts = Store(200, least), [rng.integers(0, 20, 60) for _ in range(3)]
        for text in texts:
            store.add(0, text, dict)
        tokens = rng.integers(0, 20, 50)
        tokens[7:40] = texts[1][11:44]
        found = store.matches(0, tokens)
        for p in found:
            assert (tokens[p.start :][: p.count] == p.stored.tokens[p.offset :][: p.count]).all()
        taken = cover(found, least)
        assert max(p.count for p in taken) >= 33 and min(p.count for p in taken) >= least
        assert all(a.start + a.count <= b.start for a, b in zip(taken, taken[1:], strict=False))
        assert store.prefix(0, texts[0]) and store.prefix(0, texts[2])
        store.add(0, rng.integers(20, 30, 60), dict)  # of 200 tokens: the least used goes
        assert [store.prefix(0, text) is not None for text in texts] == [True, False, True]
        assert store.stats == {**store.stats, "filled": 180, "prompts": 3}
        assert {id(s) for held in store._index.values() for s, _ in held} == set(store._stored)


def test_a_saved_session_goes_on(tmp_path):
    model = reusing("cacheblend", ratio=0.0)
    asked(model, *CHUNKS)
    with model.session() as session:
        session.prompt(PROMPT[None])
        session.save(tmp_path / "one.session")
        want = session.run(MORE[None])
    with model.open_session(tmp_path / "one.session") as session:
        assert np.array_equal(session.run(MORE[None]), want)
        assert session.observer(PieceReuse).blended.tolist() == [2]


@pytest.mark.long
def test_an_artifact_does_as_the_eager_target():
    want, _ = asked(reusing("cacheblend"), *CHUNKS, PROMPT)
    artifact = reusing("cacheblend", target="onnx")
    for _, model in variants(artifact):
        got, session = asked(model, *CHUNKS, PROMPT)
        assert far(got, want) < 1e-4 and session.stats["reused"] == 42 - 6
        assert model.pool["prompts"] == 3
    assert artifact.report["grade"] == "approximate"


@pytest.mark.parametrize(
    "options", [{"ratio": 1.5}, {"ratio": -0.1}, {"layer": -2}, {"least": 0}, {"tokens": 0}]
)
def test_options_that_mean_nothing_are_refused(options):
    (name,) = options
    with pytest.raises(RecipeError, match=f"kv.reuse.cacheblend: {name} is .*; give"):
        find_axes()["kv.reuse"].build("cacheblend", **options)


def test_models_and_recipes_that_cannot_are_refused(stateful):
    with pytest.raises(PassError, match="are not rotated.*leave kv.reuse = cacheblend out"):
        find_axes()["kv.reuse"].build("cacheblend").steps()[0].run(stateful("gpt2"))
    with pytest.raises(PassError, match="no layer comes after layer 2 of 3"):
        reusing("cacheblend", layer=2)
    program = stateful("llama")
    program.facts.encoder = EncoderFacts(30, 20)
    with pytest.raises(PassError, match="encoder input.*leave it out"):
        Blend("kv.reuse = cacheblend").run(program)
    recipe = Recipe(tables={"kv.reuse": {"use": "cacheblend"}, "kv.codec": {"use": "kv-int8"}})
    with pytest.raises(RecipeError, match="cacheblend cannot be combined with kv.codec = kv-int8"):
        assemble(recipe)
    with reusing("cacheblend").session() as session:
        session.prompt(PROMPT[None])
        with pytest.raises(InputError, match="kv.reuse = pie"):
            session.edit(0, 1, [5])
