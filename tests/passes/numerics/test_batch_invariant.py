"""The batch-invariant recipe: a token has the same bits whatever tokens and rows share its call."""

import models
import numpy as np
import pytest

import accel
from accel.compiler.quality import batch_invariant as exact
from accel.compiler.quality.batch_invariant import batch_difference, difference
from accel.compiler.smoke.tiny_models import small_model
from accel.ir.encoder import EncoderFacts
from accel.ir.errors import Miscompiled, PassError
from accel.ir.program import State
from accel.ir.state import Part
from accel.passes.numerics import batch_invariant
from accel.runtime.backends.onnx.backend import OrtBackend
from accel.runtime.session.session import Session

CONTEXT = 704
ROWS = 5
WIDTHS = (2, 3, 5, 8, 13, 16, 31, 32)
HELD = (1, 7, 250, 255, 256, 505, 668)


def llama(heads: int, groups: int, tied: bool):
    return models.random(
        "llama", vocab_size=101, hidden_size=16 * heads, intermediate_size=100, num_hidden_layers=2,
        num_attention_heads=heads, num_key_value_heads=groups, head_dim=20,
        max_position_embeddings=CONTEXT, tie_word_embeddings=tied,
    )  # fmt: skip


SHAPES = {"mha": (4, 4), "over2": (4, 2), "over4": (4, 1), "over7": (7, 1)}
WEIGHTS = ("base", "int8", "int4")
LONG = {
    "weights": {"use": "int4", "block": 64}
}  # of which onnxruntime rounds rows of a batch otherwise
FEW = [("mha", "int4", True), ("mha", "base", False), ("over2", "int8", True),
       ("over4", "base", True), ("over7", "int4", False)]  # fmt: skip
ALL = [(s, w, t) for s in SHAPES for w in WEIGHTS for t in (False, True)]
CASES = [pytest.param(*case, id="-".join(map(str, case))) for case in FEW] + [
    pytest.param(*c, id="-".join(map(str, c)), marks=pytest.mark.long) for c in ALL if c not in FEW
]


@pytest.fixture(scope="module")
def exactly():
    """exactly(shape, weights, tied) -> its artifact under the recipe."""
    made = {}

    def get(shape, weights, tied):
        if (shape, weights, tied) not in made:
            model = llama(*SHAPES[shape], tied)
            own = LONG if weights == "long" else weights
            recipe = [own, "batch-invariant"] if weights != "base" else "batch-invariant"
            made[shape, weights, tied] = accel.optimize(
                model, recipe, max_context=CONTEXT, max_batch=ROWS
            )
        return made[shape, weights, tied].artifact

    yield get
    for model in made.values():
        model.close()


class Tiled:
    """A backend session whose calls have tiles of another size."""

    def __init__(self, inner, tile):
        self.inner, self.tile = inner, tile

    def __getattr__(self, name):
        return getattr(self.inner, name)


def session(artifact, variant, threads, tile=None, rows=1) -> Session:
    facts, engine = artifact.facts, OrtBackend(artifact, threads=threads, kernels=variant)
    backend = engine.open_session(rows)
    backend = backend if tile is None else Tiled(backend, tile)
    return Session(backend, rows, vocab_size=facts.vocab_size, max_context=facts.max_context)


def worst(live: Session) -> float:
    """The largest difference over contexts and widths; they take turns, so that all pairs are near."""
    return max(
        difference(live, held, WIDTHS[(i + j) % len(WIDTHS)])
        for i, held in enumerate(HELD)
        for j in range(2)
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("shape", "weights", "tied"), CASES)
def test_rows_have_the_same_bits(exactly, shape, weights, tied, threads):
    artifact = exactly(shape, weights, tied)
    assert artifact.manifest.numerics == "batch-invariant"
    for variant in artifact.entries["step"].graphs:
        with session(artifact, variant, threads) as live:
            assert worst(live) == 0, variant
            for rows in (2, 3, ROWS):
                with session(artifact, variant, threads, rows=rows) as batch:
                    assert batch_difference(live, batch, 40) == 0, (variant, rows)


@pytest.mark.few(1)
@pytest.mark.parametrize(("shape", "weights"), [("mha", "base"), ("mha", "int4")])
def test_without_it_some_bit_differs(exactly, shape, weights):
    """The negative control: single tokens that stay alone."""
    artifact = exactly(shape, weights, weights == "int4")
    with session(artifact, "grouped", 1, tile=1) as live:
        assert worst(live) > 0


def test_without_it_some_bit_of_a_batch_differs(exactly):
    artifact = exactly("mha", "long", True)
    with (
        session(artifact, "grouped", 1, tile=1) as one,
        session(artifact, "grouped", 1, tile=1, rows=2) as two,
    ):
        assert batch_difference(one, two) > 0


def test_a_prompt_at_once_and_token_by_token(exactly):
    """Through the buffer's growth, with padded rows' logits asked for once, or for the last alone."""
    artifact = exactly("mha", "int4", True)
    tokens = np.random.default_rng(1).integers(0, 101, (1, 300))
    with session(artifact, "grouped", 1) as live:
        want = live.run(tokens)
        live.rewind(0)
        got = [live.run(tokens[:, [i]], last_only=i % 2 == 0) for i in range(300)]
        assert np.array_equal(np.concatenate(got, axis=1), want)
        live.rewind(0)
        assert np.array_equal(live.run(tokens, last_only=True), want[:, -1:])
        assert live.stats["tokens"] == 900
        live.rewind(299)
        with live.fork() as other:
            assert np.array_equal(other.run(tokens[:, -1:]), want[:, -1:])


def test_the_last_slot_of_the_context_can_be_reached(exactly):
    artifact = exactly("mha", "int4", True)
    tokens = np.random.default_rng(2).integers(0, 101, (1, CONTEXT))
    with session(artifact, "grouped", 1) as live:
        want = live.run(tokens)
        live.rewind(CONTEXT - 1)
        assert np.array_equal(live.run(tokens[:, -1:]), want[:, -1:])


def test_only_variants_that_promise_it_are_there(exactly):
    assert "fused" not in exactly("mha", "base", False).entries["step"].graphs


def test_a_build_that_breaks_the_promise_is_refused(monkeypatch):
    monkeypatch.setattr(exact.Session, "run", off_by_a_bit(exact.Session.run))
    with pytest.raises(Miscompiled, match="a call of 9 tokens differs from single-token calls"):
        accel.optimize(llama(4, 2, True), "batch-invariant", max_context=64)


def test_a_build_whose_batches_differ_is_refused(monkeypatch):
    monkeypatch.setattr(exact, "batch_difference", lambda *sessions: 1e-7)
    with pytest.raises(Miscompiled, match="a batch of 3 rows differs from one row by 1.0e-07"):
        accel.optimize(llama(4, 2, True), "batch-invariant", max_context=64, max_batch=4)
    with accel.optimize(llama(4, 2, True), "batch-invariant", max_context=64, max_batch=1):
        pass


def test_wide_heads_are_refused(monkeypatch):
    monkeypatch.setattr(batch_invariant, "WIDEST", 16)
    with pytest.raises(PassError, match="wider than 16"):
        accel.optimize(llama(4, 2, True), "batch-invariant", max_context=64)


def off_by_a_bit(run):
    def wrong(self, tokens, *args, **options):
        out = run(self, tokens, *args, **options)
        return out if tokens.shape[1] > 1 else np.nextafter(out, np.float32(np.inf))

    return wrong


def test_models_whose_rows_depend_on_the_call_are_refused(captured):
    program = captured("tiny")
    assert batch_invariant.BatchInvariant().run(program).changed == 0
    program.state.append(State(Part.RECURRENT, 0, "float32", ("B", 4), detail="sum"))
    with pytest.raises(PassError, match="recurrent"):
        batch_invariant.BatchInvariant().run(program)
    program.state.clear()
    program.facts.encoder = EncoderFacts(10, 5)
    with pytest.raises(PassError, match="cross-attention"):
        batch_invariant.BatchInvariant().run(program)


@pytest.mark.long
def test_a_model_of_experts_is_refused():
    with pytest.raises(PassError, match="experts"):
        accel.optimize(small_model("mixtral"), "batch-invariant", max_context=64, verify=False)


def test_a_tree_over_codes_has_the_bits_of_its_paths():
    """The build tries it, and refuses what differs."""
    recipe = ["kv-adaquant", "batch-invariant", "token-recycling"]
    with accel.optimize(llama(4, 2, True), recipe, max_context=64) as model:
        assert model.artifact.entries["step"].graphs.keys() >= {"native"}
        with model.session() as live:
            assert exact.tree_difference(live, 20, 16) == 0
