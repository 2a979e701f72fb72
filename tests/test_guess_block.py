"""Guesses that see both ways: a block's logits are those of one masked call of the whole model, and nothing is held."""

import models
import numpy as np
import pytest

from accel.ir.errors import InputError
from accel.runtime.model.load import from_artifact

from .block_case import cached, sight, whole
from .lowering.test_triton_models import beside
from .tree_case import with_trees

HELD = (9, 125, 14)  # tokens of each row; a chunk of attention ends within the second's block
KINDS = {  # architecture, target, which of the artifact's graphs
    "eager": ("llama", "eager", None),
    "window": ("mistral", "eager", None),
    "onnx": ("llama", "onnx", "native"),
    "onnx window": ("mistral", "onnx", "native"),
    "portable": ("mistral", "onnx", "grouped"),
    "triton": ("mistral", "triton", None),
}


@pytest.fixture(scope="module")
def build():
    """A model of each kind, built once, and its module: name -> (model, module)."""
    made, opened = {}, []

    def get(name):
        architecture, target, kernels = KINDS[name]
        lowered = "onnx" if target == "onnx" else "eager"
        if (architecture, lowered) not in made:
            module = models.ARCHITECTURES[architecture]()
            options = dict(target=lowered, max_context=256, max_batch=3, verify=False)
            made[architecture, lowered] = with_trees(module, **options), module
        model, module = made[architecture, lowered]
        if kernels or target == "triton":
            one = from_artifact(model.artifact, kernels=kernels) if kernels else beside(model)
            opened.append(one)
            return one, module
        return model, module

    yield get
    for model in [*opened, *(model for model, _ in made.values())]:
        model.close()


def calls(size: int = 6) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """What each token sees, and where it lies: a block, and one behind tokens in order that do not see it."""
    block = np.ones((size, size), bool)
    fused = np.tri(2 * size, dtype=bool)
    fused[size:, size:] = True
    twice = block.copy()  # two blocks over the same positions, of which neither sees the other
    half = size // 2
    twice[:half, half:] = twice[half:, :half] = False
    places = np.arange(2 * size)
    return {
        "block": (block, places[:size]),
        "fused": (fused, places),
        "two": (twice, np.tile(places[:half], 2)),
    }


def texts() -> tuple[np.ndarray, list[np.ndarray]]:
    rng = np.random.default_rng(0)
    rows = [rng.integers(3, 50, n) for n in HELD]
    padded = np.zeros((3, max(HELD)), np.int64)
    for row, ids in zip(padded, rows, strict=True):
        row[: ids.size] = ids
    return padded, rows


def guessed(build, name, kind, change=lambda seen: seen):
    """(a call's logits of each row, those of one masked call, the session's cache before and after)."""
    model, module = build(name)
    rng = np.random.default_rng(1)
    padded, rows = texts()
    tree, places = calls()[kind]
    counts = [len(tree), len(tree) - 1, len(tree)] if kind == "block" else [len(tree)] * 3
    tokens = rng.integers(3, 50, (3, len(tree)))
    with model.session(batch=3) as session:
        session.prompt(padded, [row.size for row in rows])
        before = cached(session)
        got = session.guess(
            tokens,
            np.repeat(change(tree)[None], 3, 0),
            counts,
            positions=session.lengths[:, None] + places,
        )
        assert session.lengths.tolist() == list(HELD)
        after = cached(session)
        session.rewind(session.lengths)  # which drops it
        dropped = cached(session)
    pairs = []
    for b, (row, count) in enumerate(zip(rows, counts, strict=True)):
        ids = np.concatenate([row, tokens[b, :count]])
        at = np.concatenate([np.arange(row.size), row.size + places[:count]])
        want = whole(module, ids, at, sight(row.size, tree[:count, :count]))
        pairs.append((got[b, :count], want[row.size :]))
    return pairs, before, after, dropped


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["block", "fused", "two"])
@pytest.mark.parametrize("name", KINDS)
def test_a_call_is_one_masked_call_of_the_whole_model(build, name, kind):
    pairs, before, *later = guessed(build, name, kind)
    for got, want in pairs:
        np.testing.assert_allclose(got, want, atol=1e-4, rtol=0)
    for found in later:
        for a, b in zip(before, found, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["eager", "onnx"])
def test_a_call_that_sees_one_way_would_be_noticed(build, name):
    """A control: logits of all but the last token are then others."""
    pairs, *_ = guessed(build, name, "block", np.tril)
    for got, want in pairs:
        assert np.abs(got - want).max(axis=1)[:-1].min() > 1e-3


def test_what_follows_is_as_if_it_had_not_run(build):
    """Also behind a block of which the tokens that see none behind them are kept."""
    model, _ = build("onnx")
    prompt, (fused, places) = np.arange(3, 12), calls()["fused"]
    tokens = np.arange(20, 20 + len(fused))
    with model.session() as session, model.session() as plain:
        for one in (session, plain):
            one.prompt(prompt[None])
        session.guess(tokens[None], fused[None], positions=9 + places[None])
        session.keep([np.arange(6)])
        plain.run(tokens[None, :6])
        assert session.length == 15
        np.testing.assert_allclose(session.run([[7]]), plain.run([[7]]), atol=5e-5, rtol=0)


def test_what_is_no_block_is_refused(build):
    model, _ = build("eager")
    block, places = calls(3)["block"]
    tokens = [[20, 30, 40]]
    with model.session() as session:
        session.run([[4, 5]])
        with pytest.raises(InputError, match="for a block .* the positions, too"):
            session.guess(tokens, block[None])
        for positions, match in (
            ([[2, 3]], r"have shape \[1, 2\]; give \[1, 3\]"),
            ([[1, 2, 3]], r"positions\[0\]\[0\] is 1, but the row holds 2 tokens .* give 2\.\.4"),
            ([[2, 3, 5]], r"positions\[0\]\[2\] is 5"),
        ):
            with pytest.raises(InputError, match=match):
                session.guess(tokens, block[None], positions=positions)
        with pytest.raises(InputError, match="itself; let the diagonal be true"):
            session.guess(tokens, ~np.eye(3, dtype=bool)[None], positions=2 + places[None])
        assert session.length == 2
        session.guess(tokens, block[None], positions=2 + places[None])
        with pytest.raises(InputError, match=r"token 0 saw \[1, 2\] behind it"):
            session.keep([[0]])
        session.guess(tokens, np.tri(3, dtype=bool)[None], positions=[[2, 2, 3]])
        with pytest.raises(InputError, match="has the position of token 0 after those of the row"):
            session.keep([[0, 1]])
        session.keep([[0]])
        assert session.length == 3
