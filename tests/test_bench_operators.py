"""tools/bench/bench_operators.py: its reference of a product, its forms, and what limits a case."""

from dataclasses import replace

import bench_operators
import models
import numpy as np
import pytest
import torch
from bench_operators import Case, Weight, difference, forms, linear

import accel
from accel.ir.ops import quantized
from accel.runtime.artifact.nodes import Node
from accel.runtime.backends.onnx.peaks import Peaks
from accel.runtime.backends.onnx.work import Product, work_of

PEAK = Peaks(1, 10e9, 100e9, 50e9, "x")
CASE = Case("x", "x", {}, {}, 1000.0, 5000.0, "int8")


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("zeros", [False, True])
def test_the_reference_of_a_product_is_the_operators(bits, zeros):
    """Of codes; and norm, gate, offsets, scales in two levels and sum, each on top."""
    rng = np.random.default_rng(bits)
    n, blocks, block, width = 6, 3, 16, 45
    codes = torch.from_numpy(rng.integers(0, 2**bits, (n, blocks, block)).astype(np.uint8))
    points = torch.from_numpy(rng.integers(0, 2**bits, (n, blocks)).astype(np.uint8))
    q = quantized.pack_blocks(codes, bits)
    points = quantized.pack(points, quantized.zero_bits(bits)) if zeros else None
    scales = rng.random((n, blocks)).astype(np.float32)
    x = rng.standard_normal((4, width)).astype(np.float32)
    want = quantized.exact_linear(
        torch.from_numpy(x), q, torch.from_numpy(scales), points, None, bits, block
    )
    operands = [None, q.numpy(), scales, None if points is None else points.numpy(), *[None] * 6]

    def weight(middle=0, **more):
        arrays = [more.get(f"p{i}", o) for i, o in enumerate(operands)]
        return Weight.of_operands(arrays, bits, block, middle)

    plain = linear(x, weight(), None, None, None, 0, 0.0)
    np.testing.assert_allclose(plain, want.numpy(), rtol=1e-4, atol=1e-4)
    norm = rng.random(width).astype(np.float32)
    scaled = torch.nn.functional.rms_norm(torch.from_numpy(x), (width,), eps=1e-5).numpy() * norm
    got = linear(x, weight(), None, norm, None, 0, 1e-5)
    np.testing.assert_allclose(got, linear(scaled, weight(), None, None, None, 0, 0.0), rtol=1e-4)
    more = rng.standard_normal((4, n // 2))
    gate, up = torch.from_numpy(plain).chunk(2, -1)
    for number, act in ((1, {}), (2, {}), (3, {"approximate": "tanh"})):
        by = torch.nn.functional.gelu if number > 1 else torch.nn.functional.silu
        got = linear(x, weight(), None, None, more, number, 0.0)
        np.testing.assert_allclose(got, (by(gate, **act) * up).numpy() + more, rtol=1e-6)
    sums = np.pad(x, ((0, 0), (0, 3))).reshape(4, blocks, block).sum(-1)
    coarse = rng.standard_normal((n, 1)).astype(np.float16)
    fine = rng.integers(0, 64, (n, blocks)).astype(np.uint8)
    for least, wanted in (
        ({"p7": scales}, scales), ({"p7": coarse, "p9": fine}, coarse.astype(np.float32) * fine),
    ):  # fmt: skip
        got = linear(x, weight(middle=3, **least), None, None, None, 0, 0.0)
        added = sums @ (wanted + 3 * scales).T
        np.testing.assert_allclose(got, plain + added, rtol=1e-4, atol=1e-3)
        assert difference(plain, got) > 1e-3, "offsets are seen"


def test_forms_differ_by_what_makes_them_cost():
    node = Node("Linear", "accel", ["x", "w", ""], ["y"], {"bits": 4})
    one = Product(node, 8, 9, 4, "int8", 72, False)
    other = replace(one, node=replace(node, inputs=["x", "w", "zeros"]))
    found = forms([one, replace(one, bytes=1), other, replace(one, wide=10)])
    assert [count for _, count in found] == [2, 1, 1]


def test_what_takes_longer_limits():
    assert CASE.limit(PEAK) == (1000 / 10e9, True)
    assert replace(CASE, products=1e6).limit(PEAK) == (1e6 / 100e9, False)
    assert replace(CASE, products=1e6, kind="float32").limit(PEAK) == (1e6 / 50e9, False)


@pytest.fixture(scope="module")
def int4():
    with accel.optimize(models.make("llama", 1), "int4", max_context=32, verify=False) as made:
        yield made.artifact


@pytest.mark.long
@pytest.mark.skipif(
    bench_operators.library()[0] is None, reason=str(bench_operators.library()[1])
)  # fmt: skip
def test_cases_of_an_artifact_are_right_alone(int4, tmp_path, monkeypatch):
    """And a product that is computed wrong is seen."""
    monkeypatch.setattr(bench_operators, "COLD", 1 << 12)
    found = bench_operators.cases(int4, [1, 3], [8], tmp_path, 1)
    kinds = {case.name.partition(",")[0] for case in found}
    assert kinds == {"product", "attention"}
    assert len(work_of(int4, "native").products) > len(found) / 2
    for case in found:
        for name, call in case.ways.items():
            if call is not None:
                assert difference(case.wanted[name], call()) < 0.03, (case.name, case.shape, name)
    case = next(c for c in found if c.name.startswith("product"))
    assert difference(2 * case.wanted["native"], case.ways["native"]()) > 0.3
