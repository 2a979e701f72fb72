"""kvquant: points that a text's numbers lie near, ranges of channels, and a few numbers as they are."""

import numpy as np
import pytest
import torch

from accel.ir.axis import find_axes
from accel.ir.tables import Observed, Rows
from accel.passes.kv.codec import At

from ....refused import refuses
from ....select_case import Selecting
from ....session_ways import after

AXIS = find_axes()["kv.codec"]
HEADS, WIDTH, R = 4, 16, 32
ALL = HEADS * WIDTH
START = {2: 0, 3: 4, 4: 12}  # of a width's points among all


def numbers(seed=0, tokens=512):
    """[1,G,T,D]: channels of different size and middle, most numbers near the middle, a few far off."""
    generator = torch.Generator().manual_seed(seed)
    shape = HEADS, 1, WIDTH
    size, middle = (
        torch.rand(shape, generator=generator) + 0.2,
        torch.randn(shape, generator=generator),
    )
    x = torch.randn(1, HEADS, tokens, WIDTH, generator=generator)
    return x.abs().pow(2).copysign(x) * size + middle


def measured(x, **options):
    method = AXIS.build("kvquant", **options)
    rows = Rows(
        torch.zeros(1, x.shape[2] + 1), torch.ones(1, x.shape[2]), {0: Observed(x, x, x, 1.0, x)}
    )
    return method, method.measure([rows])[0]


def joined(x):
    """[1,1,P,R,G D]."""
    return x.transpose(1, 2).flatten(2)[:, None].unflatten(2, (-1, R))


def read(method, role, x, constants):
    at = At(role, ALL, constants=constants)
    back = method.decode(at, method.encode(at, x))
    return back.unflatten(2, (-1, R))


def formula(role, x, constants, bits, side):
    """Of one token [G D], as the paper says it."""
    x = x.double().numpy()
    points = constants["key_points" if role == "k" else "value_points"].double().numpy()
    points = points[START[bits] :][: 2**bits]
    if role == "k":
        middle, half = (
            constants[f"key_{n}"].flatten().double().numpy() for n in ("middle", "half")
        )
        rank = np.argsort((x - middle) / half)
    else:
        rank = np.argsort(x)
        least, most = x[rank[side]], x[rank[-side - 1]]
        middle, half = (least + most) / 2, (most - least) / 2
    back = np.array([points[np.abs(points - one).argmin()] for one in (x - middle) / half])
    back = back * half + middle
    out = [*rank[:side], *rank[-side:]]
    back[out] = x[out]
    return back


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("role", ["k", "v"])
def test_numbers_are_those_of_the_papers_formula(role, bits):
    """Up to float16: outliers, and the ranges of tokens."""
    method, constants = measured(numbers(), bits=bits, outliers=0.05)
    x = joined(numbers(1, R))
    back = read(method, role, x, constants)[0, 0, 0].numpy()
    want = np.stack([formula(role, one, constants, bits, 2) for one in x[0, 0, 0]])
    off = np.abs(back - want) > 2e-3 * (1 + np.abs(want))
    assert off.mean() < 2e-3  # what float16 puts past an edge between two points
    one_side = np.stack([formula(role, one, constants, bits, 1) for one in x[0, 0, 0]])
    assert (np.abs(back - one_side) > 2e-3 * (1 + np.abs(one_side))).mean() > 0.01  # the control


@pytest.mark.parametrize("role", ["k", "v"])
def test_points_that_are_learnt_beat_even_ones(role):
    """Of skewed numbers, which are as far off at the ends; and k-means has no better neighbours."""
    method, constants = measured(numbers(), outliers=0.1)
    x, name = joined(numbers(1)), "key_points" if role == "k" else "value_points"

    def lost(points):
        other = {**constants, name: constants[name].clone()}
        other[name][4:12] = points
        return float((read(method, role, x, other) - x).square().mean())

    learnt, even = constants[name][4:12], torch.linspace(-1, 1, 8)
    assert lost(learnt) < 0.85 * lost(even)
    assert lost(learnt) < min(lost(0.8 * learnt), lost(learnt.clamp(-0.5, 0.5)))


@pytest.mark.parametrize("role", ["k", "v"])
def test_outliers_lessen_the_error_down_to_float16(role):
    _, constants = measured(numbers())
    x, errors = joined(numbers(1)), []
    for share in (0.01, 0.05, 0.2, 1.0):
        method = AXIS.build("kvquant", outliers=share)
        errors.append(float((read(method, role, x, constants) - x).abs().max()))
    assert errors[0] > errors[1] > errors[2] > 30 * errors[3]
    assert errors[3] <= float(x.abs().max()) * 2**-11


def test_channels_of_keys_have_ranges_of_their_own():
    """The paper's first finding, where a few channels are far larger: one range for all loses the others. The control:
    channels that are alike.
    """
    even = torch.randn(1, HEADS, 512, WIDTH, generator=torch.Generator().manual_seed(0))
    uneven = even.clone()
    uneven[..., :2] *= 20
    gain = []
    for x in (even, uneven):
        method, constants = measured(x)
        half = constants["key_half"]
        one = {**constants, "key_middle": 0 * half, "key_half": 0 * half + half.max()}
        keys = joined(x)
        small = [
            (read(method, "k", keys, c) - keys).unflatten(-1, (HEADS, WIDTH))
            for c in (constants, one)
        ]
        own, common = (float(off[..., 2:].square().mean()) for off in small)
        gain.append(common / own)
    assert gain[0] < 1.5 < 10 < gain[1]


def test_a_number_takes_the_bits_of_the_page():
    """3 bits, 21 of 4096 channels on either side in 16 bits with 16 of place, and what a token's range takes."""
    method = AXIS.build("kvquant")
    assert method.bits_of(At("k", 4096)) == 3 + 42 * 32 / 4096
    assert method.bits_of(At("v", 4096)) == 3 + (42 * 32 + 32) / 4096
    assert method.bits_of(At("k", 256)) == 3 + 4 * 24 / 256  # places of a byte


@pytest.mark.long
def test_the_first_and_the_newest_tokens_are_exact(stateful):
    whole, few, all_ = (
        Selecting(
            stateful("llama"),
            AXIS.build("kvquant", recent=8, first=3, outliers=s, bits=2) if s else None,
        )
        for s in (0, 0.01, 1.0)
    )
    assert np.array_equal(after(few, 16)[0], after(whole, 16)[0])
    (want, _), (coarse, session), (halves, _) = (after(case, 38) for case in (whole, few, all_))
    assert session.held_from.tolist() == [3 + 24]
    assert np.abs(halves - want).max() < 2e-2 < 0.1 < np.abs(coarse - want).max()


test_what_makes_no_sense_is_refused = refuses(
    "kv.codec.kvquant",
    {"bits": 5},
    {"outliers": 0.0},
    {"outliers": 1.5},
    {"recent": 0},
    {"first": -1},
)
