"""Floats for llama.cpp's files: other channels, the same model."""

import numpy as np
import pytest
from llama_files import reordered

HIDDEN, HEADS, GROUPS, SIZE, INNER = 24, 6, 2, 4, 40


def floats():
    rng = np.random.default_rng(0)
    shapes = {
        "attn_q": (HEADS * SIZE, HIDDEN), "attn_k": (GROUPS * SIZE, HIDDEN), "attn_v": (GROUPS * SIZE, HIDDEN),
        "attn_output": (HIDDEN, HEADS * SIZE), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER), "attn_norm": (HIDDEN,),
    }  # fmt: skip
    found = {f"blk.0.{n}.weight": rng.standard_normal(s) for n, s in shapes.items()}
    found["blk.0.attn_v.bias"] = rng.standard_normal(GROUPS * SIZE)
    found["token_embd.weight"] = rng.standard_normal((9, HIDDEN))
    return found | {"output_norm.weight": np.arange(HIDDEN)}


def layer(w, x):
    """Attention of one token, which is its value, and the MLP behind it."""

    def part(name):
        return w[f"blk.0.{name}.weight"]

    x = x * part("attn_norm")
    value = (part("attn_v") @ x + w["blk.0.attn_v.bias"]).reshape(GROUPS, SIZE)
    x = x + part("attn_output") @ value.repeat(HEADS // GROUPS, axis=0).ravel()
    return x + part("ffn_down") @ (np.tanh(part("ffn_gate") @ x) * (part("ffn_up") @ x))


def test_reordered_floats_are_the_same_model():
    w = floats()
    new = reordered(w, HIDDEN, HEADS, GROUPS, INNER)
    stream = new["output_norm.weight"]
    x, y = w["token_embd.weight"][3], new["token_embd.weight"][3]
    np.testing.assert_allclose(layer(new, y), layer(w, x)[stream], rtol=1e-10)
    for name in ("attn_q", "attn_k"):
        key = f"blk.0.{name}.weight"
        np.testing.assert_allclose(new[key] @ y, w[key] @ x, rtol=1e-10)
    assert not np.array_equal(stream, np.arange(HIDDEN))
    with np.testing.assert_raises(AssertionError):  # the control: without the order it is another
        np.testing.assert_allclose(layer(new, x), layer(w, x), rtol=1e-3)


def test_tensors_of_another_model_are_refused():
    with pytest.raises(SystemExit, match="of no llama or qwen2 model"):
        reordered(
            {"blk.0.ssm_a.weight": np.ones((2, 2)), "blk.0.attn_v.weight": np.ones((8, 2))},
            2,
            6,
            2,
            2,
        )
