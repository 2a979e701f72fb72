"""Bytes that stand for numbers of a table, read in place; and numbers at the same places of each row."""

import itertools

import models
import numpy as np
import onnx
import pytest
import torch

import accel
from accel.ir.axis import find_axes
from accel.ir.ops.codec import look_up_rows
from accel.lowering.onnx import native

from .test_native_int8 import run

pytestmark = pytest.mark.skipif(native.library()[0] is None, reason=native.library()[1])
SLOTS, STORED = 150, 40


def rows(rng, groups, count, width, scaled):
    """Bytes, a table, scales (or none) of random rows, and what they stand for [2,G,count,width]."""
    codes = rng.integers(0, 200, (2, groups, count, width)).astype(np.uint8)
    table = rng.standard_normal(200).astype(np.float32)
    scale = rng.random((2, groups, count)).astype(np.float32) if scaled else None
    given = [None if x is None else torch.from_numpy(x) for x in (codes, table, scale)]
    return codes, table, scale, look_up_rows(*given).numpy()


def attention(shape, tokens, scaled):
    """Operands of AttentionTable, each buffer with a table of its own, and of Attention over the numbers."""
    rng, (heads, groups, size) = np.random.default_rng(tokens), shape
    sizes = itertools.product((SLOTS, STORED), (size, size + 3))
    made = [rows(rng, groups, count, width, scaled) for count, width in sizes]
    q = rng.standard_normal((2, heads, tokens, size)).astype(np.float32)
    held = np.tile(np.arange(SLOTS), (2, 1)) + STORED
    held[0, -30:] = -1
    q_pos = STORED + SLOTS - 30 - tokens + np.tile(np.arange(tokens), (2, 1))
    places = np.where(rng.random((2, groups, STORED)) < 0.8, np.arange(STORED), -1)
    codes, tables, scales, numbers = zip(*made, strict=True)
    ends = [q_pos, held, None, None]
    coded = [q, *codes[:2], *ends, *codes[2:], places, None, *scales, *tables]
    return coded, [q, *numbers[:2], *ends, *numbers[2:], places]


SETTINGS = dict(scale=0.3, softcap=0.0, mask=0, window=0, exact=0, packed=0, page=0, partial=0)


@pytest.mark.parametrize("shape", [(4, 2, 24), (8, 1, 64), (2, 2, 7)], ids=str)
@pytest.mark.parametrize("scaled", [True, False])
def test_attention_is_that_over_the_numbers_bit_for_bit(shape, scaled):
    """The controls: the table of values one place on, and too many numbers in it."""
    for tokens in (1, 4, 17):
        coded, plain = attention(shape, tokens, scaled)
        (got,) = run("AttentionTable", coded, ["float32"], **SETTINGS)
        (want,) = run("Attention", plain, ["float32"], **SETTINGS)
        np.testing.assert_array_equal(got, want)
    coded[16] = np.roll(coded[16], 1)
    (got,) = run("AttentionTable", coded, ["float32"], **SETTINGS)
    assert np.abs(got - want).max() > 1e-3
    coded[16] = np.zeros(257, np.float32)
    with pytest.raises(Exception, match="do not fit"):
        run("AttentionTable", coded, ["float32"], **SETTINGS)


def test_numbers_of_a_table_and_of_columns_are_the_references():
    rng = np.random.default_rng(0)
    for width, scaled in itertools.product((1, 8, 21), (True, False)):
        *parts, want = rows(rng, 3, 70, width, scaled)
        (got,) = run("LookUp", parts, ["float32"])
        np.testing.assert_array_equal(got, want)
        index = rng.integers(-width, width, 37)
        np.testing.assert_array_equal(
            run("Columns", [want, index], ["float32"])[0], want[..., index]
        )
    parts[0] = np.full_like(parts[0], 201)  # beyond the table
    assert np.isnan(run("LookUp", parts, ["float32"])[0]).all()
    with pytest.raises(Exception, match="outside a row"):
        run("Columns", [want, index - 2 * width], ["float32"])


@pytest.mark.few(1)
@pytest.mark.parametrize("score", [None, "snapkv"])
def test_a_step_reads_bytes_in_place(score):
    """Of eviction, too, what was kept."""
    recipe = {"kv.codec": {"use": "kv-fp8", "scaled": not score}}
    if score:
        recipe["kv.score"] = {"use": score, **find_axes()["kv.score"].small(score)}
    with accel.optimize(models.ARCHITECTURES["llama"](), recipe, max_context=64) as compiled:
        path = compiled.artifact.path / "step.native.onnx"
        nodes = {n.op_type for n in onnx.load(path, load_external_data=False).graph.node}
    assert "AttentionTable" in nodes and not {"Attention", "LookUp"} & nodes
