"""Laws of the kv.codec axis: what is read back is as near as its bits allow, row by row or block by block, in the
bytes declared.
"""

import math

import pytest
import torch

from accel.compiler.assemble import GRADES
from accel.ir.axis import find_axes
from accel.ir.program import DTYPES

NAMES = find_axes()["kv.codec"].names()
WIDTHS = (1, 7, 10, 64, 129)


def codec(name):
    return find_axes()["kv.codec"].build(name)


EACH = [(name, role) for name in NAMES for role in "kv" if not codec(name).block]
BLOCKS = [(name, role) for name in NAMES for role in "kv" if codec(name).block]


def rows(width, count=11, seed=0):
    """[2,3,count,width]: rows of very different sizes, one with an outlier, one constant, one zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, count, width, generator=generator)
    x *= 10.0 ** torch.randint(-4, 4, (2, 3, count, 1), generator=generator)
    x[0, 0, 0, 0], x[0, 0, 1], x[1, 2, 2], x[1, 2, 3] = 1e5, 3.25, 0, -1e-7
    return x


def code_bits(method, role, width):
    """Bits of a number's code, what it shares with others left out."""
    dtype, sizes = method.parts(role, width)[""]
    return 8 * DTYPES[dtype].itemsize * math.prod(sizes) / width


def beyond(method, role, x):
    """How many numbers come back further off than half a step of their row, were it cut evenly."""
    back = method.decode(role, method.encode(role, x), x.shape[3])
    steps = 2.0 ** code_bits(method, role, x.shape[3]) - 2
    half = x.abs().amax(-1, keepdim=True) / steps
    assert back.shape == x.shape and back.dtype == torch.float32
    return int(((back - x).abs() > half * (1 + 1e-4)).sum())


@pytest.mark.parametrize(("name", "role"), EACH)
def test_no_number_is_off_by_more_than_half_a_step(name, role):
    method = codec(name)
    for width in WIDTHS:
        assert beyond(method, role, rows(width)) == 0


@pytest.mark.parametrize(("name", "role"), EACH)
def test_a_codec_that_cuts_down_is_caught(name, role):
    method = codec(name)

    class Broken(type(method)):
        def encode(self, role, x):
            return super().encode(role, x * 0.99)

    assert beyond(Broken(), role, rows(64)) > 0


@pytest.mark.parametrize(("name", "role"), [*EACH, *BLOCKS])
def test_the_parts_are_as_declared_and_take_the_bits_declared(name, role):
    method = codec(name)
    assert method.grade in GRADES
    for width in WIDTHS:
        x = blocks(method, width) if method.block else rows(width)
        parts, declared = method.encode(role, x), method.parts(role, width)
        assert next(iter(declared)) == "" and list(parts) == list(declared)
        for part, (dtype, sizes) in declared.items():
            assert parts[part].dtype == DTYPES[dtype]
            assert parts[part].shape == (*x.shape[:3], *sizes)
        taken = sum(8 * p.nbytes for p in parts.values()) / x.numel()
        assert taken == pytest.approx(method.bits_of(role, width))


@pytest.mark.parametrize(("name", "role"), EACH)
def test_a_constant_row_comes_back(name, role):
    method = codec(name)
    for value in (0.0, 1.0, -7.5, 1e-38, 1e30):
        x = torch.full((1, 2, 3, 10), value)
        back = method.decode(role, method.encode(role, x), 10)
        torch.testing.assert_close(back, x, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize(("name", "role"), EACH)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_spoils_its_row_only(name, role, value):
    method, x = codec(name), rows(10)
    x[1, 0, 4, 3] = value
    back = method.decode(role, method.encode(role, x), 10)
    spoilt = (~back.isfinite()).all(-1)
    assert spoilt.nonzero().tolist() == [[1, 0, 4]]
    assert int((~back.isfinite()).sum()) == 10


@pytest.mark.parametrize(("name", "role"), EACH)
def test_a_row_does_not_depend_on_others(name, role):
    method, x = codec(name), rows(24)
    whole, again = method.encode(role, x), method.encode(role, x)
    for slot in range(x.shape[2]):
        alone = method.encode(role, x[:, :, slot : slot + 1])
        for part in whole:
            assert torch.equal(whole[part], again[part])
            assert torch.equal(alone[part][:, :, 0], whole[part][:, :, slot])


# Codecs of blocks


def blocks(method, width, seed=0):
    """[2,2,3,R,width]: channels and tokens of different sizes, an outlier, a constant channel and token, zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 2, 3, method.block, width, generator=generator)
    x *= 10.0 ** torch.randint(-2, 3, (2, 2, 3, 1, width), generator=generator)
    x += 4 * torch.randn(2, 2, 3, 1, width, generator=generator)
    x[0, 0, 0, 0, 0], x[0, 0, 1, :, 0], x[1, 1, 2], x[1, 0, 2, 3] = 3e4, 3.25, 0, -0.1
    return x


def read(method, role, x):
    """What comes back of blocks, as blocks."""
    back = method.decode(role, method.encode(role, x), x.shape[-1])
    assert back.dtype == torch.float32
    assert back.shape == (*x.shape[:2], x.shape[2] * method.block, x.shape[-1])
    return back.unflatten(2, (-1, method.block))


def outside(method, role, x):
    """How many numbers come back beyond what spans their block, or further off than that allows in so many steps."""
    dtype, sizes = method.parts(role, x.shape[-1])[""]
    bits = 8 * DTYPES[dtype].itemsize * math.prod(sizes) // (method.block * x.shape[-1])
    axis = 3 if role == "k" else 4
    span = x.amax(axis, keepdim=True) - x.amin(axis, keepdim=True)
    loss = x.abs().amax(axis, keepdim=True) * 2**-10 + 1e-7  # of ends in float16
    return int(((read(method, role, x) - x).abs() > span / (2**bits - 1) / 2 * 1.01 + loss).sum())


@pytest.mark.parametrize(("name", "role"), BLOCKS)
def test_no_number_of_a_block_is_off_by_more_than_half_a_step(name, role):
    method = codec(name)
    for width in (16, 64):
        assert outside(method, role, blocks(method, width)) == 0

    class Broken(type(method)):
        def encode(self, role, x):
            return super().encode(role, x * 0.9)

    assert outside(Broken(), role, blocks(method, 64)) > 0


@pytest.mark.parametrize(("name", "role"), BLOCKS)
def test_a_constant_block_comes_back(name, role):
    method = codec(name)
    for value in (0.0, 1.0, -7.3, 1e-9, 6e4):
        x = torch.full((1, 2, 1, method.block, 10), value)
        torch.testing.assert_close(read(method, role, x), x, rtol=2**-10, atol=1e-7)


@pytest.mark.parametrize(("name", "role"), BLOCKS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
def test_what_is_no_number_spoils_its_block_only(name, role, value):
    """It is read, if at all, by queries that see this token too: they lose nothing that they had."""
    method, x = codec(name), blocks(codec(name), 10)
    want = read(method, role, x)
    x[1, 0, 1, 5, 3] = value
    back = read(method, role, x)
    assert not back[1, 0, 1, 5, 3].isfinite()
    spoilt = ~back.isfinite()
    assert spoilt.any(3).any(3).nonzero().tolist() == [[1, 0, 1]]
    torch.testing.assert_close(back[~spoilt], want[~spoilt], rtol=0, atol=0)


@pytest.mark.parametrize(("name", "role"), BLOCKS)
def test_a_block_does_not_depend_on_others(name, role):
    method, x = codec(name), blocks(codec(name), 24)
    whole = method.encode(role, x)
    for block in range(x.shape[2]):
        alone = method.encode(role, x[:, :, block : block + 1])
        for part in whole:
            assert torch.equal(alone[part][:, :, 0], whole[part][:, :, block])
