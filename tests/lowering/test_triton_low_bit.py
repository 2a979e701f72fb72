"""Products with weights of few bits on the Triton target, beside the reference of the operator."""

import models
import numpy as np
import pytest
import torch

import accel
from accel.ir.ops import quantized
from accel.lowering.triton import lowered

from ..op_case import randn
from .test_triton_models import beside
from .triton_case import Walls, close, poisoned

lowered._load_rules()

from accel.lowering.triton.rules import accel_quantized  # noqa: E402  (it imports triton)
from accel.lowering.triton.writer import chip  # noqa: E402

FORMS = [(bits, block) for bits in (2, 3, 4, 5, 6, 8) for block in (16, 32, 64, 128)]
ROWS = (1, 2, 3, 17, 70)


def weights(bits, n, k, block, zeros, dtype=torch.float32):
    """Random codes of N rows of K numbers; whole blocks."""
    rng, count = np.random.default_rng(bits), -(-k // block)
    codes = torch.from_numpy(rng.integers(0, 2**bits, (n, count, block), np.uint8))
    points = torch.from_numpy(rng.integers(0, 2**bits, (n, count), np.uint8))
    scales = torch.from_numpy((rng.random((n, count), np.float32) - 0.3) / 2**bits).to(dtype)
    offsets = quantized.pack(points, quantized.zero_bits(bits)) if zeros else None
    return [quantized.pack_blocks(codes, bits), scales, offsets]


def product(x, q, scales, zeros, bias, bits, block, walls=None):
    walls = walls or Walls()
    x, q, scales, zeros, bias = walls.around((x, q, scales, zeros, bias))
    with poisoned():
        codes, steps = accel_quantized.in_steps(x, block)
        out = accel_quantized.linear(x, codes, steps, q, scales, zeros, bias, bits, block)
    walls.check()
    return out.cpu()


@pytest.mark.few(5)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_product_is_as_the_reference_says(form, rows, monkeypatch):
    bits, block = form
    monkeypatch.setattr(chip, "processors", lambda device: rows % 4 * 2)  # of one split, or several
    rng, k, n = np.random.default_rng(rows), 133, 67
    x = randn(rng, rows, k) * 3
    zeros = bits in (2, 3, 4, 8) and rows % 2 == 1
    given = weights(
        bits, n, k, block, zeros, (torch.float32, torch.bfloat16, torch.float16)[rows % 3]
    )
    bias = randn(rng, n) if rows % 3 else None
    got = product(x, *given, bias, bits, block)
    close(got, quantized.quantized_linear(x, *given, bias, bits, block))


def test_inputs_of_any_strides_and_shapes():
    rng = np.random.default_rng(0)
    given = weights(4, 20, 64, 32, False)
    for x in (
        randn(rng, 2, 3, 64),
        randn(rng, 64, 5).T,
        randn(rng, 3, 7, 64)[:, 2:4],
        randn(rng, 0, 64),
    ):
        codes, steps = accel_quantized.in_steps(x, 32)
        got = accel_quantized.linear(x, codes, steps, *given, None, 4, 32)
        close(got, quantized.quantized_linear(x, *given, None, 4, 32))


def test_what_is_no_number_spoils_its_row_only():
    x = randn(np.random.default_rng(1), 4, 64)
    x[1, 3], x[2, 40], x[3, :32] = torch.nan, torch.inf, 0
    got = product(x, *weights(4, 20, 64, 32, False), None, 4, 32)
    assert got.isnan().any(1).tolist() == [False, True, True, False]


@pytest.mark.few(2)
@pytest.mark.parametrize("rows", [1, 2, 5, 17, 90])
@pytest.mark.parametrize("form", [(4, 32, False), (8, 16, True), (3, 128, True)], ids=str)
def test_rows_read_the_weights_of_their_experts(form, rows):
    bits, block, zeros = form
    rng, walls = np.random.default_rng(rows), Walls()
    one = [weights(bits, 20, 70, block, zeros) for _ in range(6)]
    q, scales, offsets = (None if c[0] is None else torch.stack(c) for c in zip(*one, strict=True))
    scales = scales * torch.arange(1, 7)[:, None, None]
    x, ids = randn(rng, rows, 70), torch.from_numpy(rng.choice([0, 2, 3, 5], rows))
    given = walls.around((ids, q, scales, offsets))
    with poisoned():
        codes, steps = accel_quantized.in_steps(*walls.around((x,)), block)
        tables = accel_quantized.routes(given[0], 6, block)
        got = accel_quantized.expert_linear(tables, codes, steps, *given[1:], bits, block).cpu()
    walls.check()
    want = quantized.quantized_expert_linear(x, ids, q, scales, offsets, bits, block)
    close(got, want)
    wrong = quantized.quantized_expert_linear(x, (ids + 1) % 6, q, scales, offsets, bits, block)
    assert not torch.allclose(wrong, want, atol=1e-2)


@pytest.mark.parametrize("part", ["codes", "scales", "zeros"])
def test_a_wrong_operand_is_seen(part):
    """The tests' own power: the first code, scale and zero point of the last row count."""
    x = randn(np.random.default_rng(2), 3, 70)
    given = weights(4, 9, 70, 32, True)
    want = quantized.quantized_linear(x, *given, None, 4, 32)
    given[["codes", "scales", "zeros"].index(part)].view(9, -1)[-1, 0].add_(1)
    with pytest.raises(AssertionError, match="not close"):
        close(product(x, *given, None, 4, 32), want)


@pytest.mark.long
@pytest.mark.parametrize("use", ["int4", "int8", "int3"])
def test_a_model_of_few_bits(use):
    """Layers round once what several products read: queries, keys and values, and gates with what they gate."""
    table = {"weights": {"use": use, "block": 16, "smallest": 256}}
    given = dict(target="eager", max_context=32, verify=False)
    tokens = np.random.default_rng(0).integers(3, 50, (2, 5))
    with accel.optimize(models.make("llama", 2), table, **given) as eager, beside(eager) as model:
        graph = model.program.compiled["step"].module.graph
        names = [getattr(n.target, "__name__", "") for n in graph.nodes if n.op == "call_function"]
        assert names.count("linear") >= names.count("in_steps") == 9
        assert not {n for n in names if n.startswith("quantized_linear")}
        want, got = eager.logits(tokens), model.logits(tokens)
    # a difference in the last place may take an input to the next step
    assert np.median(np.abs(got - want)) < 1e-4 * np.abs(want).max()
    assert np.abs(got - want).max() < 0.05 * np.abs(want).max()
