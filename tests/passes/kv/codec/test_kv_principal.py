"""kv-principal: points that lose least, bits by the size of directions, one scale a vector."""

import numpy as np
import pytest
import torch

from accel.ir.axis import find_axes
from accel.ir.ops.attention import Form
from accel.ir.tables import Observed, Rows
from accel.passes.kv.codec import At, _transform

from ....refused import refuses

AXIS = find_axes()["kv.codec"]
WIDTH = 32


def tables_of(x, use="kv-principal", **options):
    """A method and its constants, measured of x."""
    method = AXIS.build(use, **options)
    rows = Rows(
        torch.zeros(1, x.shape[2] + 1),
        torch.ones(1, x.shape[2]),
        {0: Observed(x, x, x, Form("causal"), x)},
    )
    return method, method.measure([rows])[0]


def sylvester(size):
    """By its recursion; the method counts bits."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


POINTS = {  # of a normal distribution, found here by Lloyd's iteration over its quantiles
    1: [0.7979],
    2: [0.4528, 1.5104],
    4: [0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326],
}


def test_the_points_lose_least_of_a_normal_distribution():
    """Each is the mean of the numbers that are nearest to it."""
    x = torch.distributions.Normal(0.0, 1.0).icdf((torch.arange(400_000) + 0.5).double() / 400_000)
    for bits, above in POINTS.items():
        points = _transform._points(bits, x).double()
        assert points[2 ** (bits - 1) :].tolist() == pytest.approx(above)
        nearest = torch.bucketize(x, (points[1:] + points[:-1]) / 2)
        means = torch.stack([x[nearest == i].mean() for i in range(2**bits)])
        assert (means - points).abs().max() < 1e-3


def alike(seed=0):
    """Keys [1,2,256,D] whose channels go together: few directions are large; about means."""
    generator = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(2, WIDTH, WIDTH, generator=generator)).Q
    x = torch.randn(1, 2, 256, WIDTH, generator=generator) * 0.8 ** torch.arange(WIDTH)
    return x @ turn + 2 * torch.randn(2, 1, WIDTH, generator=generator)


def read_back(x, role, method, constants):
    joined = x.transpose(1, 2).flatten(2)[:, None].unflatten(2, (-1, method.recent))
    at = At(role, joined.shape[-1], constants=constants)
    back = method.decode(at, method.encode(at, joined))[0, 0]
    return back.unflatten(-1, (x.shape[1], -1)).transpose(0, 1)[None], method.bits_of(at)


def in_points(z, size, levels):
    """z [T,D] in nearest points of so many bits a direction, and the scale that is off least."""
    scale = np.linalg.norm(z, axis=1, keepdims=True) / np.linalg.norm(size)
    read = np.zeros_like(z)
    for i, bits in enumerate(levels):
        points = np.array([-p for p in POINTS[bits]] + POINTS[bits])
        y = z[:, i] / (size[i] * scale[:, 0])
        read[:, i] = points[np.abs(y[:, None] - points).argmin(1)] * size[i]
    return read * ((z * read).sum(1) / (read * read).sum(1))[:, None]


def test_directions_are_encoded_by_their_size():
    x = alike()
    method, constants = tables_of(x, recent=32)
    found, bits = read_back(x, "k", method, constants)
    assert bits == 2 + 16 / WIDTH
    for head in range(2):
        keys = x[0, head].double().numpy()
        middle = keys.mean(0)
        size, basis = np.linalg.eigh(np.cov(keys.T, bias=True))
        size, basis = np.sqrt(size[::-1]), basis[:, ::-1]
        levels = [4] * 8 + [2] * 8 + [1] * 16
        want = in_points((keys - middle) @ basis, size, levels) @ basis.T + middle
        off = np.linalg.norm(found[0, head].numpy() - want, axis=1)
        assert np.median(off) < 1e-2 and (off < 1e-2).mean() > 0.95, "but for ties"
    values, bits = read_back(x, "v", method, constants)
    turn = sylvester(WIDTH) / WIDTH**0.5
    want = in_points(x[0, 0].double().numpy() @ turn, np.ones(WIDTH), [2] * WIDTH) @ turn
    assert bits == 2 + 16 / WIDTH
    assert np.median(np.abs(values[0, 0].numpy() - want)) < 1e-3


def test_they_lose_less_where_keys_have_few():
    """Than rotatekv in more bits; where no direction is larger they do not: the control."""

    def lost_by(x, use, **options):
        method, constants = tables_of(x, use, **options)
        return float((read_back(x, "k", method, constants)[0] - x).square().mean())

    few = alike()
    assert lost_by(few, "kv-principal", recent=32) < 0.25 * lost_by(few, "rotatekv", group=32)
    even = torch.randn(1, 2, 256, WIDTH, generator=torch.Generator().manual_seed(1))
    assert lost_by(even, "kv-principal", recent=32) > 0.7 * lost_by(even, "rotatekv", group=32)


test_what_makes_no_sense_is_refused = refuses(
    "kv.codec.kv-principal",
    {"recent": 0},
    {"first": -1},
)
