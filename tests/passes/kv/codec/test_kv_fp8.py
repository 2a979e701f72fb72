"""kv-fp8: torch's own E4M3 bytes, by operators that every target has."""

import models
import pytest
import torch

import accel
from accel.ir.axis import find_axes
from accel.lowering.onnx import verify
from accel.passes.kv.codec import At

AXIS = find_axes()["kv.codec"]
AT = At("k", 4)


def numbers():
    """Of all sizes, every number of E4M3 but NaN, what lies midway between two, zeros, and what float16 ends with."""
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    up = every[:127]
    generator = torch.Generator().manual_seed(0)
    size = 10.0 ** torch.randint(-5, 5, (5000,), generator=generator)
    apart = torch.randn(5000, generator=generator) * size
    ends = torch.tensor([65504.0, -65504.0, 448.0, 464.0, 0.0])
    return torch.cat((apart, every[~every.isnan()], (up[1:] + up[:-1]) / 2, ends))


def test_the_bytes_are_torchs_and_no_other_rounding_gives_them():
    x = numbers()
    codes = AXIS.build("kv-fp8", scaled=False).encode(AT, x)[""]
    want = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    same = codes == want
    assert same[x != 0].all() and (codes[x == 0] % 128 == 0).all()  # -0 is 0
    cut = (x.abs() * (1 - 2**-6)).copysign(x).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert (codes == cut.view(torch.uint8)).float().mean() < 0.95  # the control


def test_every_byte_is_read_as_torch_reads_it():
    codes = torch.arange(256, dtype=torch.uint8)
    back = AXIS.build("kv-fp8", scaled=False).decode(AT, {"": codes})
    torch.testing.assert_close(
        back, codes.view(torch.float8_e4m3fn).float(), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("scaled", [True, False])
def test_no_number_of_float16_becomes_none(scaled):
    """What is no number stays none, the control."""
    method = AXIS.build("kv-fp8", scaled=scaled)
    x = torch.tensor([[1e-7, -3.0, 460.0, 65504.0], [-65504.0, 0.0, 2.0, 1.0]])[None, None]
    back = method.decode(AT, method.encode(AT, x))
    assert back.isfinite().all()
    assert back.abs().max() == pytest.approx(65504.0 if scaled else 448.0)
    x[..., 1, 3] = torch.inf
    assert not method.decode(AT, method.encode(AT, x))[..., 1, 3].isfinite().any()


def test_powers_of_two_change_the_scale_alone():
    """And a factor that is none changes bytes, where there is no scale."""
    scaled, plain = (AXIS.build("kv-fp8", scaled=s) for s in (True, False))
    x = torch.randn(1, 2, 9, 33, generator=torch.Generator().manual_seed(0))
    one = scaled.encode(AT, x)
    for power in (-9, 1, 10):
        other = scaled.encode(AT, x * 2.0**power)
        assert torch.equal(one[""], other[""])
        assert torch.equal(one["scale"] * 2.0**power, other["scale"])
        assert not torch.equal(plain.encode(AT, x)[""], plain.encode(AT, x * 2.0**power)[""])


def test_small_numbers_keep_their_precision_beside_large_ones():
    """Section "Fp8": steps go with the number, where kv-int8's go with the row."""
    x = torch.tensor([1000.0, 1.0, -0.7, 3.3]).expand(1, 1, 1, 4)
    off = {}
    for name in ("kv-fp8", "kv-int8"):
        method = AXIS.build(name)
        back = method.decode(AT, method.encode(AT, x))
        off[name] = float(((back - x) / x).abs().max())
    assert off["kv-fp8"] <= 2**-4 < 0.9 < off["kv-int8"]


@pytest.mark.long
def test_evicted_tokens_are_checked_though_some_bytes_are_no_number():
    """The example of the written graph's check holds every byte; a NaN on one side alone is an error."""
    recipe = {"kv.codec": {"use": "kv-fp8"}, "kv.score": {"use": "snapkv"}}
    recipe["kv.budget"] = {"use": "uniform", "tokens_kept": 12}
    accel.optimize(models.tiny(), recipe, max_context=64).close()
    none, one = torch.tensor([float("nan")]), torch.ones(1)
    assert verify._rows(none, none).max() == 0
    assert not verify._rows(none, one).max() <= 1
    assert not verify._rows(one, none).max() <= 1
