"""rotatekv: rotations that are exact, that spread outliers, and an order that brings like channels together."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from accel.ir.axis import find_axes
from accel.ir.ops.attention import Form
from accel.ir.tables import Observed, Rows
from accel.passes.kv.codec import At

from ....refused import refuses
from ....select_case import Selecting
from ....session_ways import after, close

AXIS = find_axes()["kv.codec"]
WIDTH = 32


def numbers(heads=4, outliers=4, seed=0):
    """Keys [1,G,256,D] about channel means, of which a few are far larger."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, heads, 256, WIDTH, generator=generator)
    x += 2 * torch.randn(heads, 1, WIDTH, generator=generator)
    x[..., :outliers] *= 20
    return x


def method_of(x, **options):
    """A method and its constants, measured of x."""
    method = AXIS.build("rotatekv", **options)
    rows = Rows(
        torch.zeros(1, x.shape[2] + 1),
        torch.ones(1, x.shape[2]),
        {0: Observed(x, x, x, Form("causal"), x)},
    )
    return method, method.measure([rows])[0]["order"]


def lost(x, role, method, order):
    joined = x.transpose(1, 2).flatten(2)[:, None].unflatten(2, (-1, method.recent))
    at = At(role, joined.shape[-1], constants={"order": order})
    back = method.decode(at, method.encode(at, joined))
    return float((back.unflatten(2, (-1, method.recent)) - joined).square().mean())


def sylvester(size):
    """By its recursion; the method counts bits."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


@pytest.mark.parametrize(
    ("role", "heads", "width", "size"),
    [("k", 4, 32, 128), ("k", 6, 32, 64), ("k", 3, 32, 32), ("k", 4, 80, 64), ("v", 4, 32, 32)],
)
def test_the_rotation_is_the_papers_and_its_inverse_exact(role, heads, width, size):
    """H_{4D} over four heads, fewer where they do not divide, per head for values; then the order."""
    method, x = AXIS.build("rotatekv"), torch.randn(7, heads * width)
    order = torch.randperm(heads * width).view(heads, width)
    want = x.numpy().reshape(7, -1, size) @ sylvester(size) / size  # / root, and / root for float16
    want = want.reshape(7, -1)
    want = want[:, order.flatten()] if role == "k" else want
    at = At(role, heads * width, constants={"order": order})
    got = method.turned(at, x)
    close(got, want)
    close(method.turned_back(at, got), x)
    other = order.flatten().roll(1).view(heads, width)  # the control
    at = replace(at, constants={"order": other})
    assert torch.allclose(method.turned_back(at, got), x, atol=1e-2) == (role == "v")


def test_the_order_is_that_of_the_sums():
    x = numbers()
    _, order = method_of(x)
    flat = x.transpose(1, 2).flatten(2)[0].double().numpy() @ sylvester(4 * WIDTH)
    sums = flat.sum(0)[order.flatten().numpy()]
    assert (np.diff(sums) >= -1e-6 * np.abs(sums).max()).all()
    assert sorted(order.flatten().tolist()) == list(range(4 * WIDTH))


@pytest.mark.parametrize("bits", [2, 4])
def test_rotations_and_the_order_lose_less_where_channels_are_outliers(bits):
    """Against the same groups unrotated, and rotated in no order; of numbers of one size the rotation gains nothing."""
    options = {"bits": bits, "group": 32}
    flat = AXIS.build("kv-adaquant", key_bits=bits, value_bits=bits, group=32)

    def unrotated(x):
        return float(
            (flat.decode(At("k", WIDTH), flat.encode(At("k", WIDTH), x)) - x).square().mean()
        )

    x = numbers()
    method, order = method_of(x, **options)
    none = torch.arange(order.numel()).view_as(order)
    in_order, unordered = (lost(x, "k", method, o) for o in (order, none))
    assert in_order < 0.8 * unordered < 0.8 * unrotated(x)
    assert lost(x, "v", method, order) < unrotated(x)
    even = torch.randn(1, 4, 256, WIDTH, generator=torch.Generator().manual_seed(1))
    assert lost(even, "v", method, order) > 0.9 * unrotated(even)  # the control


def drive(case, count):
    """Logits [1,2,V] after so many tokens, and the positions in codes."""
    found, session = after(case, count)
    state = session._core.backend._state
    return found, state["kept.pos"].flatten().tolist() if "kept.pos" in state else []


@pytest.mark.long
def test_sinks_and_new_tokens_are_exact_and_eight_bits_near(stateful):
    """A block of 8 goes into codes at 2 + 16 tokens."""
    whole, two, eight = (
        Selecting(
            stateful("llama"),
            AXIS.build("rotatekv", bits=b, first=2, recent=8, group=16) if b else None,
        )
        for b in (0, 2, 8)
    )
    assert np.array_equal(drive(two, 15)[0], drive(whole, 15)[0])
    (want, _), (coarse, held), (fine, _) = (drive(case, 38) for case in (whole, two, eight))
    assert held == list(range(2, 26))
    assert 8 * np.abs(fine - want).max() < np.abs(coarse - want).max()


test_what_makes_no_sense_is_refused = refuses(
    "kv.codec.rotatekv", {"bits": 3}, {"group": 0}, {"recent": 0}, {"first": -1}
)
