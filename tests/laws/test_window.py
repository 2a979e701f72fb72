"""What layers with a window keep changes no logits, whatever a session does, and bounds their bytes."""

import numpy as np
import pytest

import accel
from accel.compiler.assemble import assemble
from accel.compiler.explain import costs
from accel.compiler.facts_json import kv_bytes
from accel.compiler.smoke.tiny_models import small_model
from accel.ir.axis import find_axes
from accel.ir.errors import AccelError, InputError, PassError, RecipeError
from accel.ir.recipe import Recipe
from accel.ir.window import Window
from accel.lowering.triton.lowered import lower_program
from accel.passes.window._default import Windows
from accel.runtime.backends import buffers
from accel.runtime.backends.eager import EagerSession
from accel.runtime.backends.triton.backend import TritonBackend
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.session import core
from accel.runtime.session.state.window import WindowState

from ..prefill_case import built, far
from ..session_case import session_of

BACK = 8
LONG = np.random.default_rng(11).integers(3, 90, (3, 126))
PROMPTS = np.array([50, 31, 2])
NEWEST = {"window": {"use": "newest", "back": BACK}}
ALL = {"window": {"use": "all"}}


def pair(name, target="eager", tables=None):
    return [built(name, target, tables={**(tables or {}), **window}) for window in (ALL, NEWEST)]


def driven(session):
    """Logits of prompts longer than the window, single tokens, calls of several, a rewind of as many tokens as is
    promised, a fork, rows that go on as others, and rows that begin anew.
    """
    tokens = LONG % session.vocab_size
    found = [session.prompt(tokens[:, :50], PROMPTS)]
    start = 50

    def run(session, width, **more):
        found.append(session.run(tokens[:, start : start + width], **more))

    for width in (*[1] * 26, 5, 1, 1):
        run(session, width)
        start += width
    session.rewind(session.lengths - BACK)
    run(session, 4)
    with session.fork() as other:
        other.select([2, 2, 0])
        run(other, 3)
        run(other, 9, lengths=[9, 1, 0])
        other.rewind(other.lengths - BACK)
        run(other, 1)
    run(session, 30)
    session.rewind([0, int(session.lengths[1]) - BACK, 0])
    run(session, 25, lengths=[25, 3, 4])
    for _ in range(3):
        run(session, 1)
    return found


def law_of_logits(plain, session, near=1e-5):
    """They are those of layers that keep everything, up to the order of sums; and tokens were dropped."""
    want, got = driven(plain), driven(session)
    for a, b in zip(want, got, strict=True):
        assert far(b, a) < near
        assert (a.argmax(-1) == b.argmax(-1)).all()


@pytest.mark.parametrize(
    ("name", "target", "tables"),
    [
        ("mistral", "eager", {}),
        pytest.param("gemma2", "eager", {}, marks=pytest.mark.long),
        pytest.param("gemma2", "onnx", {}, marks=pytest.mark.long),
        pytest.param("mistral", "onnx", {"kv.codec": {"use": "kv-int8"}}, marks=pytest.mark.long),
        pytest.param(
            "mistral", "eager", {"prefill.prune": {"use": "yoco", "layers": 0}}, marks=pytest.mark.long
        ),
    ],
)  # fmt: skip
def test_logits_are_those_of_layers_that_keep_all(name, target, tables):
    plain, model = pair(name, target, tables)
    with plain.session(3) as a, model.session(3) as b:
        law_of_logits(a, b)
        assert (b.observer(WindowState).first > 0).any()
        genai = target == "onnx" and "kv.codec" not in tables
        assert "genai" in model.artifact.entries if genai else True


@pytest.mark.long
@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "llama4_text"])
def test_other_windows_and_chunks(name):
    module, models = small_model(name), []
    for window in (ALL, NEWEST):
        models.append(
            accel.optimize(
                module, window, target="eager", max_context=128, max_batch=3, verify=False
            )
        )
    with models[0].session(3) as a, models[1].session(3) as b:
        law_of_logits(a, b)
        assert (b.observer(WindowState).first > 0).any()


@pytest.mark.long
def test_buffers_of_triton_stay_where_they_are():
    plain, eager = pair("mistral")
    lowered = lower_program(eager.program)
    model = CompiledModel(TritonBackend(lowered), eager.facts, recipe=eager.recipe, program=lowered)
    with plain.session(3) as a, model.session(3) as b:
        law_of_logits(a, b, 1e-4)
        assert (b.observer(WindowState).first > 0).any()


@pytest.mark.parametrize("broken", ["one too few", "stale positions", "rows alike"])
def test_the_law_catches(broken, monkeypatch):
    plain, model = pair("mistral")
    drop = EagerSession.drop

    def stale(self, first):
        held = self._state["kv.pos.1"].clone()
        drop(self, first)
        self._state["kv.pos.1"] = held

    if broken == "one too few":
        monkeypatch.setattr(Window, "tokens_kept", property(lambda self: self.size - 2))
        monkeypatch.setattr(WindowState, "held_from", np.zeros(3, np.int64))
    elif broken == "stale positions":
        monkeypatch.setattr(EagerSession, "drop", stale)
    else:
        monkeypatch.setattr(
            EagerSession, "drop", lambda self, first: drop(self, np.full(3, first.max()))
        )
    with plain.session(3) as a, model.session(3) as b, pytest.raises(AssertionError):
        law_of_logits(a, b)


def test_what_is_dropped_is_the_same_in_arrays():
    """The buffers of ONNX Runtime are arrays; those of eager sessions tensors."""
    _, model = pair("mistral")
    with model.session(3) as session:
        session.prompt(LONG[:, :40], [40, 30, 20])
        backend, first = session._core.backend, np.array([3, 0, 11])
        arrays = {name: array.copy() for name, array in backend.buffers().items()}
        backend.drop(first)
        buffers.drop(model.program.state, arrays, first)
        for name, array in backend.buffers().items():
            used = slice(0, array.shape[-1 if name.startswith("kv.pos") else 2] - 11)
            where = (slice(None), used) if array.ndim == 2 else (slice(None), slice(None), used)
            assert np.array_equal(array[where], arrays[name][where]), name
        assert np.array_equal(backend.buffers()["kv.pos.1"], arrays["kv.pos.1"])


@pytest.fixture
def short(monkeypatch):
    """Calls of up to 32 tokens, over slots by 16."""
    for module in (core, costs):
        monkeypatch.setattr(module, "CHUNK", 32)
        monkeypatch.setattr(module, "STEP", 16)


def test_bytes_are_bounded_equal_to_the_formula_and_to_what_explain_says(short):
    plain, model = pair("gemma2")
    window, layers = model.facts.window, model.facts.layers
    assert window == Window(6, BACK) and plain.facts.window is None
    small = sum(layer.window > 0 for layer in layers)
    each = 2 * layers[0].num_kv_heads * layers[0].head_dim * 4
    assert 0 < small < len(layers)
    assert kv_bytes(plain.program) == len(layers) * each + 8
    assert kv_bytes(model.program) == (len(layers) - small) * each + 8
    prompts = (10, 64, 125)
    for program, bounded in ((plain.program, False), (model.program, True)):
        found = costs.cache(program, None, {}, prompts, 0)
        for prompt in prompts:
            with session_of(program) as session:
                session.prompt(LONG[:1, :prompt])
                session.run(LONG[:1, :1])
                held = session.stats["kv_bytes"]
            slots = -(-(prompt + 1) // 16) * 16
            own = min(slots, -(-(window.tokens_kept + 32) // 16) * 16) if bounded else slots
            of_layers = each * ((len(layers) - small) * slots + small * own)
            assert held == of_layers + 8 * (slots + bounded * own)
            assert held == found.bytes(prompt)


def test_as_many_tokens_can_be_taken_back_as_is_promised_and_others_are_refused():
    _, model = pair("mistral")
    with model.session(2) as session:
        session.prompt(LONG[:2, :60])
        least = []
        for token in LONG[:2, 60:90].T:
            session.run(token[:, None], lengths=[1, len(least) % 2])
            least.append((session.lengths - session.held_from).tolist())
        # a row that got no token by the call before which some were dropped has the fewest
        assert np.min(least, axis=0).tolist() == [BACK + 1, BACK]
        assert session.capabilities.back == BACK
        low, end = int(session.held_from[0]), int(session.lengths[1])
        with pytest.raises(
            InputError, match=rf"to {low - 1}: .* window of 7 .*give {low}..90, or 0"
        ):
            session.rewind([low - 1, end])
        session.rewind([low, end])
        want = session.run(LONG[:2, low:90], lengths=[90 - low, 0])[0, 90 - low - 1]
        session.rewind(0)
        assert not session.held_from.any()
        assert far(session.prompt(LONG[:2, :90])[0, 0], want) < 1e-5


def test_a_call_that_fails_leaves_the_session_or_closes_it(monkeypatch):
    """Where tokens were dropped that its rows would see again, it closes; else it goes on."""
    _, model = pair("mistral")
    step = EagerSession.step

    def failing(after):
        calls = iter(range(1000))

        def wrong(self, *args, **more):
            if next(calls) == after:
                raise RuntimeError("no")
            return step(self, *args, **more)

        return wrong

    monkeypatch.setattr("accel.runtime.session.core.CHUNK", 20)
    for after, begun in ((0, 30), (2, 30), (2, 0)):
        with model.session(1) as session, model.session(1) as other:
            if begun:
                session.run(LONG[:1, :begun])
                other.run(LONG[:1, :begun])
            with monkeypatch.context() as patch:
                patch.setattr(EagerSession, "step", failing(after))
                with pytest.raises((AccelError, RuntimeError), match="no"):
                    session.run(LONG[:1, begun : begun + 60])
            if after and begun:
                with pytest.raises(InputError, match="closed"):
                    session.run(LONG[:1, :1])
            else:
                rows = [s.run(LONG[:1, begun : begun + 60]) for s in (session, other)]
                assert far(*rows) < 1e-5


@pytest.mark.parametrize(
    "recipe", ["prompt-lookup", pytest.param("token-recycling", marks=pytest.mark.long)]
)
def test_drafts_are_taken_back_and_tokens_stay_the_same(recipe):
    tables = Recipe.load(recipe).tables
    plain, model = pair("mistral", tables=tables)
    prompt = np.tile(LONG[:1, :9], 4)
    want, got = (each.generate(prompt, 60, eos=[]) for each in (plain, model))
    assert [list(t) for t in want.tokens] == [list(t) for t in got.tokens]


def test_a_recipe_has_it_unless_it_says_otherwise_or_a_method_conflicts():
    def names(tables):
        return [type(step).__name__ for step in assemble(Recipe(tables=tables)).unasked]

    assert names({}) == names({"kv.codec": {"use": "kv-int8"}}) == ["Windows"]
    for tables in (
        ALL,
        {"kv.score": {"use": "knorm"}},
        {"kv.codec": {"use": "kivi"}},
        {"kv.select": {"use": "quest"}},
        {"kv.reuse": {"use": "paged-prefix"}},
        {"numerics": {"use": "batch-invariant"}},
        {"depth": {"use": "shortgpt"}},
        {"prefill.prune": {"use": "promptdistill"}},
        {"prefill.sparse": {"use": "tri-shape"}},
    ):
        assert names(tables) == [], tables
        assert tables is ALL or refused({**tables, **NEWEST})
    assert built("mistral").facts.window is None  # 128 tokens are fewer than the window and 256


def refused(tables):
    with pytest.raises(RecipeError, match="window = newest"):
        assemble(Recipe(tables=tables))
    return True


def test_models_without_a_window_are_refused_by_name_where_it_is_asked_for():
    with pytest.raises(PassError, match="no layer sees a window .* leave window out"):
        built("llama", tables=NEWEST)
    with pytest.raises(PassError, match="shorter by 256 tokens than the maximum context of 128"):
        built("mistral", tables={"window": {"use": "newest"}})
    left = Windows().run(built("llama").program).refused
    assert len(left) == 1 and "leave window out" not in left[0], "the recipe does not name it"
    with pytest.raises(RecipeError, match=r"window\.newest: back is 0"):
        find_axes()["window"].build("newest", back=0)


def test_a_window_is_kept_where_it_and_twice_what_is_taken_back_are_less_than_the_context(stateful):
    axis, most = find_axes()["window"], stateful("mistral").facts.max_context
    size = next(layer.window for layer in stateful("mistral").facts.layers if layer.window)
    whole = (most - size - 1) // 2
    for back, changed in ((whole, True), (whole + 1, False)):
        report = axis.build("newest", back=back).run(stateful("mistral"))
        assert bool(report.changed) is changed, (size, back, most)


def test_the_formula_counts_slots_of_calls():
    window = Window(100, 10)
    assert window.slots([40]) == 40 and window.slots([60, 60]) == 120
    assert window.slots([60, 61]) == 121 and window.slots([120, 1]) == 120
    assert window.slots([500]) == 500 and window.slots([500, 512]) == 109 + 512
    assert window.tokens_kept == 109
