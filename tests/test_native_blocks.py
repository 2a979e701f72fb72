"""Blocks of a pool read in place by native attention: bit for bit what it gives over the gathered slots."""

import itertools

import numpy as np
import onnx
import pytest
import torch

import accel
from accel.ir.ops.groups import group_quantize
from accel.ir.ops.kv import block_positions, gather_blocks
from accel.lowering.onnx import native

from .prefill_case import built
from .test_native_int8 import run

pytestmark = pytest.mark.skipif(native.library()[0] is None, reason=native.library()[1])
SLOTS, POOL, BLOCKS = 150, 40, 17  # slots of a row, blocks of the pool, those of the longest row
SHAPES = [(4, 2, 24), (8, 1, 64), (3, 3, 7)]
SETTINGS = dict(scale=0.3, softcap=0.0, exact=0, packed=0, page=0, partial=0)


def stored(rng, form, width, lead):
    """Keys or values of slots [*lead,width] in the parts that the form reads, and its table of bytes or none."""
    x = rng.standard_normal((*lead, width)).astype(np.float32)
    if form == "AttentionInt8":
        return [(x * 40).clip(-127, 127).astype(np.int8), rng.random(lead).astype(np.float32)], []
    if form == "AttentionTable":
        codes = [(x * 20 + 90).clip(0, 199).astype(np.uint8), rng.random(lead).astype(np.float32)]
        return codes, [rng.standard_normal(200).astype(np.float32)]
    if form == "AttentionCodes":
        parts = group_quantize(torch.from_numpy(x).unsqueeze(3), 4, 8, "channels")
        return [part.numpy() for part in parts], []
    return [x], []


def table_of(rng):
    """Three rows: one of all BLOCKS, one that shares its first five, one of a single block."""
    table = np.full((3, BLOCKS), -1)
    table[0] = rng.permutation(POOL)[:BLOCKS]
    table[1, :9] = [*table[0, :5], *rng.permutation(POOL)[:4]]
    table[2, 0] = rng.integers(POOL)
    return table


def laid(form, kept):
    """Of what lies in slots or blocks, in the order of native/attention.cc: keys and values, scales, tables."""
    (k, k_table), (v, v_table) = kept
    return (
        [k[0], v[0]],
        [part for both in zip(k[1:], v[1:], strict=True) for part in both],
        [*k_table, *v_table],
    )


def made(rng, form, shape, tokens, size, mask, flat=False):
    """Operands over the pool and over what is gathered from it, and how many come before the last ones."""
    heads, groups, width = shape
    old = [stored(rng, form, n, (POOL, groups, size)) for n in (width, width + 3)]
    new = [stored(rng, form, n, (3, groups, SLOTS)) for n in (width, width + 3)]
    table = table_of(rng)
    known = torch.from_numpy(table)
    lengths = (table >= 0).sum(1) * size
    q_pos = lengths[:, None] + np.arange(tokens) + np.array([[60], [100], [0]])
    held = np.where(
        np.arange(SLOTS) <= np.array([[60], [100], [0]]) + tokens - 1, np.arange(SLOTS), -1
    )
    held = np.where(held >= 0, held + lengths[:, None], -1)
    q = rng.standard_normal((3, heads, tokens, width)).astype(np.float32)
    owner = None
    if flat:
        counts = [tokens, 1, 3]
        owner = np.array([[row, i] for row, count in enumerate(counts) for i in range(count)])
        q = np.ascontiguousarray(
            q.transpose(0, 2, 1, 3)[owner[:, 0], owner[:, 1]].transpose(1, 0, 2)[None]
        )
        q_pos = q_pos[owner[:, 0], owner[:, 1]][None]
    places = block_positions(known, 1, size).numpy()
    gathered = [
        ([gather_blocks(torch.from_numpy(part), known).numpy() for part in parts], tables)
        for parts, tables in old
    ]
    operands = []
    for kept in (old, gathered):
        (k, v), scales, tables = laid(form, new)
        (old_k, old_v), old_scales, old_tables = laid(form, kept)
        more = [*scales, *old_scales]
        if form == "AttentionCodes":  # scale and least of keys, then of values
            more = [part for all_of in (new, kept) for parts, _ in all_of for part in parts[1:]]
        given = [
            q,
            k,
            v,
            q_pos,
            held,
            None,
            None,
            old_k,
            old_v,
            places,
            None,
            *more,
            *tables,
            *old_tables,
        ]
        operands.append([*given, *[None] * 5, owner])
    operands[0].append(table)
    settings = SETTINGS | dict(mask=mask, window=90 if mask else 0)
    if form == "AttentionCodes":
        settings |= dict(k_bits=4, v_bits=4, rows=1, k_group=8, v_group=8, k_along=0, v_along=0)
        settings |= dict(v_width=width + 3, k_down=0, v_down=0)
    return *operands, settings


@pytest.mark.few(3)
@pytest.mark.parametrize("form", ["Attention", "AttentionInt8", "AttentionTable", "AttentionCodes"])
@pytest.mark.parametrize("size", [4, 16, 24])
def test_blocks_in_place_are_the_gathered_slots_bit_for_bit(form, size):
    """Tokens that see all, that see a window, that are too many to be read row by row; rows of their own lengths, one
    with one block. The control: another block in a row's table.
    """
    for (number, shape), tokens in itertools.product(enumerate(SHAPES), (20, 4, 1)):
        mask = (number + tokens // 4) % 2
        rng = np.random.default_rng(number)
        blocks, slots, settings = made(rng, form, shape, tokens, size, mask, flat=tokens == 4)
        settings["exact"] = int(tokens == 20 and number == 0)
        threads = 1 + mask
        (got,) = run(form, blocks, ["float32"], threads, **settings)
        (want,) = run(form, slots, ["float32"], threads, **settings)
        np.testing.assert_array_equal(got, want)
        assert np.isfinite(want).all() and np.abs(want).max() > 1e-3
    blocks[-1][2, 0] = (blocks[-1][2, 0] + 1) % POOL
    (got,) = run(form, blocks, ["float32"], threads, **settings)
    assert np.abs(got - want).max() > 1e-3, "the control"


@pytest.mark.parametrize("wrong", ["beyond", "short"])
def test_a_table_that_does_not_fit_is_refused(wrong):
    blocks, _, settings = made(np.random.default_rng(0), "Attention", SHAPES[0], 1, 16, 0)
    if wrong == "beyond":
        blocks[-1][1, 0] = POOL
    else:
        blocks[-1] = blocks[-1][:, :-1].copy()
    with pytest.raises(Exception, match="the table of blocks does not fit"):
        run("Attention", blocks, ["float32"], **settings)


PAGED = {"kv.reuse": {"use": "paged-prefix", "block": 4, "blocks": 64}}
CODECS = {"plain": "Attention", "kv-int8": "AttentionInt8", "kv-fp8": "AttentionTable"}


def readers(file, start):
    """Operators that read values whose names begin so, in any order."""
    graph = onnx.load(file, load_external_data=False).graph
    return {n.op_type for n in graph.node for value in n.input if value.startswith(start)}


@pytest.mark.parametrize(
    "codec", ["plain", *(pytest.param(name, marks=pytest.mark.long) for name in [*CODECS][1:])]
)
def test_a_model_reads_its_pool_in_place(codec):
    """Native attention alone reads the pool; the portable graph gathers, and gives the same logits of rows that share
    some blocks. The control: a row's block is another one's.
    """
    tables = PAGED if codec == "plain" else PAGED | {"kv.codec": {"use": codec}}
    path = built("llama", "onnx", tables=tables).artifact.path
    assert readers(path / "step.native.onnx", "pool.") == {CODECS[codec]}
    assert readers(path / "step.onnx", "pool.") == {"Gather"}
    rng = np.random.default_rng(3)
    tokens = rng.integers(3, 50, (2, 30))
    tokens[1, :13] = tokens[0, :13]
    found = {}
    for kernels in ("native", "grouped"):
        with accel.load(path, kernels=kernels, threads=1) as model:
            with model.session() as session:
                session.prompt(tokens[:1])
            with model.session(2) as session:
                logits = [session.prompt(tokens, [30, 21])]
                assert session.stats["reused"] == 28 + 12
                logits += [session.run(tokens[:, i : i + 2]) for i in range(3)]
                table = session._core.backend.buffers()["table"].copy()
                found[kernels] = np.concatenate(logits, axis=1)
                session.rewind([32, 23])
                table[1, 4] = table[0, 5]
                session._core.put({"table": table})
                wrong = session.run(tokens[:, 1:3])
                assert np.abs(wrong[1] - logits[2][1]).max() > 1e-3, "the control"
                np.testing.assert_allclose(wrong[0], logits[2][0], atol=1e-4)
    np.testing.assert_allclose(found["native"], found["grouped"], atol=1e-4)
