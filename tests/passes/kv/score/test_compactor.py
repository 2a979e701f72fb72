"""Compactor: leverage, attention within chunks, and how both are mixed."""

import matrix
import numpy as np
import pytest
import torch

from accel.ir.errors import RecipeError
from accel.passes.kv.score.compactor import Compactor, chunk_attention, sketch, standard

from ....kv_slots import B, D, G, R, build, named, slots

T = 21


def call(seed=0, first=0):
    r = torch.Generator().manual_seed(seed)
    positions = (first + torch.arange(T)).repeat(B, 1)
    positions[1, -4:] = -1
    shapes = (B, G * R, T, D), (B, G, T, D), (B, G, T, D)
    return *(torch.randn(shape, generator=r) for shape in shapes), positions


@pytest.mark.parametrize("first, chunk, sinks", [(0, 8, 2), (13, 8, 2), (0, 64, 0)])
def test_keys_draw_attention_of_their_chunk_from_both_sides(first, chunk, sinks):
    q, k, _, positions = call(first=first)
    found = chunk_attention(q, k, positions, sinks, chunk)
    want = np.zeros((B, G, T))
    for row, head in np.ndindex(B, G * R):
        number = (positions[row] - sinks).div(chunk, rounding_mode="floor")
        for one in number.unique().tolist():
            mine = np.flatnonzero((number == one) & (positions[row] >= sinks))
            z = (q[row, head, mine].double() @ k[row, head // R, mine].double().T).softmax(-1)
            want[row, head // R, mine] += z.sum(0).numpy() / R
    np.testing.assert_allclose(found, want, atol=1e-4)
    for row in range(B):  # each query gives 1
        real = int((positions[row] >= sinks).sum())
        np.testing.assert_allclose(found[row].sum(-1), np.full(G, real), rtol=1e-4)
    assert not np.allclose(found, chunk_attention(q, k, positions, sinks, 5), atol=1e-2)


def test_what_is_noted_of_a_token_is_its_attention_times_its_value():
    q, k, v, positions = call()
    method = Compactor(chunk=8, sinks=2)
    found = method.note(q, k, v, positions)
    want = chunk_attention(q, k, positions, 2, 8) * v.norm(dim=-1)
    torch.testing.assert_close(found, want.transpose(1, 2))


def test_the_sketch_is_gaussian_and_of_its_seed():
    x = sketch(3, 64, 48, 0, torch.zeros(1)) * 48**0.5
    assert x.shape == (3, 64, 48)
    assert abs(float(x.mean())) < 0.02 and abs(float(x.std()) - 1) < 0.02
    assert abs(float((x**4).mean()) - 3) < 0.2
    near = torch.corrcoef(torch.stack((x[:, :, 1:].flatten(), x[:, :, :-1].flatten())))[0, 1]
    assert abs(float(near)) < 0.03
    assert not torch.allclose(x, sketch(3, 64, 48, 1, torch.zeros(1)) * 48**0.5)


def test_scores_of_a_row_have_mean_0_and_deviation_1():
    x, real = torch.randn(B, G, 9) * 4 + 7, torch.ones(B, G, 9).bool()
    real[1, 0, 3:] = False
    found = standard(x, real)
    for row in range(B):
        mine = found[row][real[row]]
        assert abs(float(mine.mean())) < 1e-5 and abs(float(mine.std()) - 1) < 1e-4
    assert not found[~real].any()
    assert torch.equal(
        standard(torch.full((1, 1, 3), 5.0), torch.ones(1, 1, 3).bool()), torch.zeros(1, 1, 3)
    )


def test_blending_is_the_share_that_goes_by_default():
    x = named(slots(0, base=(0, 0, 0), recent=(16, 9, 3)), kept=4)
    options = {"sinks": 2, "recent": 2, "sketch": 4, "chunk": 8}

    def scores(blending):
        method = Compactor(**options, blending=blending)
        return method(**{n: x[n] for n in method.reads - {"self"}})

    default, none, whole = (scores(b) for b in (-1.0, 0.0, 1.0))
    for row, n in enumerate((16, 9, 3)):
        share = max(0.0, 1 - 4 / n)
        want = none[row] + share * (whole[row] - none[row])
        torch.testing.assert_close(default[row], want, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(default, none, atol=1e-2)
    x["unrotated_keys"] = x["unrotated_keys"] * 5 + 2  # as one centre and one scale
    torch.testing.assert_close(scores(1.0)[0], whole[0], atol=0.05, rtol=0.05)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"sinks": -1}, "sinks is -1"),
        ({"recent": -1}, "recent is -1; give at least 0"),
        ({"chunk": 0}, "chunk is 0; give 1 to 65536"),
        ({"sketch": 0}, "sketch is 0; give 1 to 256"),
        ({"sketch": 1000}, "sketch is 1000; give 1 to 256"),
        ({"seed": -1}, "seed is -1; give at least 0"),
        ({"blending": float("nan")}, "blending is nan"),
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(RecipeError, match=words):
        build("score", "compactor", **options)


@pytest.mark.long
def test_onnx_equals_the_oracle():
    outcome = matrix.Matrix().run(matrix.Case("llama", (("kv.score", "compactor"),)))
    assert outcome.kind == "equal", outcome.why
