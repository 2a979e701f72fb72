"""GEAR: what rounding loses, less what is stored of it beside the codes."""

import numpy as np
import pytest
import torch

from accel.ir.axis import find_axes
from accel.passes.kv.codec import At

from ....prefill_case import TOKENS, built
from ....refused import refuses
from ....select_case import Selecting

AXIS = find_axes()["kv.codec"]
R, D = 64, 32


@pytest.fixture(scope="module")
def blocks():
    """[1,2,3,R,D] of a few directions, with noise and with outliers."""
    generator = torch.Generator().manual_seed(0)
    few = torch.randn(1, 2, 3, R, 3, generator=generator)
    x = few @ torch.randn(1, 2, 3, 3, D, generator=generator)
    x = x + 0.2 * torch.randn(x.shape, generator=generator)
    return x + 20 * x * (torch.rand(x.shape, generator=generator) < 0.01)


def parts(x, role="k", **options):
    method = AXIS.build("gear", **options)
    return method, method.encode(At(role, D), x)


def loss(x, role="k", change=None, **options):
    """Of all blocks. change: of the parts, before they are read."""
    method, found = parts(x, role, **options)
    found = found if change is None else change(found)
    return float((method.decode(At(role, D), found).unflatten(2, (-1, R)) - x).norm())


@pytest.mark.parametrize("role", ["k", "v"])
@pytest.mark.parametrize("options", [{"bits": 2, "group": 64}, {"bits": 4, "group": 32}])
def test_with_nothing_beside_the_codes_it_is_kivi(blocks, role, options):
    _, mine = parts(blocks, role, low_rank=0, outliers=0.0, **options)
    theirs = AXIS.build("kivi", residual=R, **options).encode(At(role, D), blocks)
    assert list(mine) == list(theirs) and all(torch.equal(mine[n], theirs[n]) for n in mine)
    more = parts(blocks, role, low_rank=0, outliers=0.1, **options)[1]
    assert not torch.equal(more[""], mine[""])  # the control


@pytest.mark.parametrize("role", ["k", "v"])
def test_error_falls_with_rank_and_with_outliers(blocks, role):
    """And not where what is stored belongs to other blocks."""
    for outliers in (0.0, 0.1):
        found = [loss(blocks, role, low_rank=r, outliers=outliers) for r in (0, 1, 2, 4, 8)]
        assert all(b < a for a, b in zip(found, found[1:], strict=False))
        for name in ("b", "outlier") if outliers else ("b",):
            other = loss(
                blocks,
                role,
                lambda x, name=name: {**x, name: x[name].roll(1, 2)},
                outliers=outliers,
            )
            assert other > found[0]
    found = [loss(blocks, role, outliers=s) for s in (0.0, 0.05, 0.2, 0.5, 1.0)]
    assert all(b < a for a, b in zip(found, found[1:], strict=False))
    assert found[-1] < 1e-3 * float(blocks.norm())


@pytest.mark.parametrize("role", ["k", "v"])
def test_the_low_rank_part_is_nearly_the_best_of_its_rank(blocks, role):
    """By singular values, of what the codes alone lose."""
    method, found = parts(blocks, role, low_rank=0, outliers=0.0)
    lost = blocks - method.decode(At(role, D), found).unflatten(2, (-1, R))
    values = torch.linalg.svdvals(lost)
    for rank in (1, 2, 4):
        gained = float(lost.square().sum()) - loss(blocks, role, low_rank=rank, outliers=0.0) ** 2
        best, first = (float(values[..., :n].square().sum()) for n in (rank, max(1, rank // 2)))
        assert gained < best * (1 + 1e-4) and gained > 0.9 * best
        assert rank == 1 or gained > first  # no smaller rank gains as much


def test_outliers_are_the_ends_of_channels_of_keys_and_of_tokens_of_values(blocks):
    for role, axis in (("k", -2), ("v", -1)):
        method, found = parts(blocks, role, outliers=0.2)
        back = method.decode(At(role, D), found).unflatten(2, (-1, R))
        order = blocks.argsort(axis).argsort(axis)
        size, ends = blocks.shape[axis], round(0.1 * blocks.shape[axis])
        stay = (order < ends) | (order >= size - ends)
        exact = back == blocks.half().float()
        assert exact[stay].all() and exact[~stay].float().mean() < 0.05


def test_what_lies_in_fewer_directions_than_the_rank_is_read_right():
    """A dependent column, of which Gram-Schmidt leaves only rounding, adds nothing."""
    line = torch.linspace(-1, 1, R)[:, None] * torch.linspace(1, 3, D)
    x = (line + 1e-7 * torch.sin(torch.arange(R * D).reshape(R, D))).expand(1, 1, 1, R, D)
    few, many = (loss(x, low_rank=r, outliers=0.0) for r in (1, 16))
    assert many <= few * 1.001 and np.isfinite(many)
    assert loss(1e-7 * x, low_rank=16) < 1e-5 and loss(torch.zeros_like(x), low_rank=4) == 0


def drive(case):
    tokens = case.tokens(1, 31)
    with case.session() as session:
        session.run(tokens[:, :30])
        return session.run(tokens[:, 30:])


@pytest.mark.long
def test_a_model_loses_less_with_more_beside_its_codes(stateful):
    options = {"bits": 4, "group": 4, "residual": 8}
    want, plain, more = (
        drive(Selecting(stateful("llama"), beside and AXIS.build("gear", **options, **beside)))
        for beside in (None, {"low_rank": 0, "outliers": 0.0}, {"low_rank": 3, "outliers": 0.5})
    )
    assert 1e-3 < np.abs(more - want).max() < 0.7 * np.abs(plain - want).max()


@pytest.mark.long
def test_onnx_reads_what_torch_reads():
    def logits(target, **codec):
        tables = {"kv.codec": {"use": "gear", "group": 4, "residual": 8, **codec}}
        with built("llama", target, tables=tables).session() as session:
            prompt = session.prompt(TOKENS[:1, :30])
            return np.concatenate([prompt, session.run(TOKENS[:1, [30]])], 1)

    options = {"bits": 4, "low_rank": 3, "outliers": 0.25}
    found = logits("onnx", **options)
    assert np.allclose(found, logits("eager", **options), atol=1e-3)
    assert not np.allclose(found, logits("eager", bits=4), atol=1e-3)  # the control


test_what_makes_no_sense_is_refused = refuses(
    "kv.codec.gear",
    {"bits": 3},
    ({"group": 48}, "kv.codec.gear: residual is 64; give a multiple of group = 48"),
    {"low_rank": -1},
    {"outliers": 1.5},
    {"outliers": -0.1},
)
