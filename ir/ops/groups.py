"""Blocks of rows in a few bits a number, each group of numbers in steps of its own between its ends."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from accel.ir.ops.op import Op

LEAST = 2.0**-24  # the smallest step: of float16 the smallest number
WIDER = 1 + 2.0**-10  # a step in float16 is none too small


def _grouped(x: Tensor, group: int, along: str) -> tuple[Tensor, int]:
    """x [..,R,D] with the groups' axis apart, and which one that is: [..,R/group,group,D], or
    [..,R,n,group], where the last number stands in for those that the last group lacks.
    """
    if along == "rows":
        return x.unflatten(-2, (-1, group)), -2
    short = -x.shape[-1] % group
    wide = torch.cat((x, x[..., -1:].expand(*x.shape[:-1], short)), dim=-1) if short else x
    return wide.unflatten(-1, (-1, group)), -1


def packed(codes: Tensor, bits: int) -> Tensor:
    """Whole numbers [..,D] below 2^bits -> uint8 [..,ceil(D bits / 8)], as `group_quantize` lays out those of a row."""
    per = 8 // bits
    place = 2 ** (bits * torch.arange(per, device=codes.device))
    apart = pad(codes, (0, -int(codes.shape[-1]) % per)).unflatten(-1, (per, -1))
    found: Tensor = (apart * place[:, None]).sum(-2).to(torch.uint8)
    return found


def _group_quantize(x: Tensor, bits: int, group: int, along: str) -> tuple[Tensor, Tensor, Tensor]:
    most, (rows, width) = 2**bits - 1, x.shape[-2:]
    cut, axis = _grouped(x, group, along)
    low, high = cut.amin(axis, keepdim=True), cut.amax(axis, keepdim=True)
    broken = (cut * 0).sum(axis, keepdim=True)  # NaN, where a number is none
    least = torch.where(broken.isnan(), 0, low).half().float()
    step = torch.maximum(
        (high - least) / most, (least - low) * 2
    )  # so that no number is further off than half of it
    scale = (step * WIDER + LEAST + broken).half()
    steps = ((cut - least) / scale.float()).round().clamp(0, most)
    whole = (
        torch.where(steps.isnan(), 0, steps).reshape(*x.shape[:-2], rows, -1)[..., :width].long()
    )
    return packed(whole, bits).flatten(-2), scale.flatten(-3), least.half().flatten(-3)


def midpoint_quantize(
    x: Tensor, bits: int, group: int, along: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The same as `group_quantize`, `group_dequantize` of it included, but with levels in the middle of 2^bits equal
    parts between the ends of a group, not at these: so one bit has two, and no number is further off than half a part.
    """
    width = x.shape[-1]
    cut, axis = _grouped(x, group, along)
    low, high = cut.amin(axis, keepdim=True), cut.amax(axis, keepdim=True)
    part = (high - low) / 2**bits
    broken = (cut * 0).sum(axis, keepdim=True)  # NaN, where a number is none
    scale, least = (part + LEAST + broken).half(), (low + part / 2).half()
    steps = ((cut - least.float()) / scale.float()).round().clamp(0, 2**bits - 1)
    flat = steps.flatten(-3, -2) if axis == -2 else steps.flatten(-2)
    whole = torch.where(flat.isnan(), 0, flat)[..., :width].long()
    least = torch.where(least.isnan(), 0, least)
    return packed(whole, bits).flatten(-2), scale.flatten(-3), least.flatten(-3)


def near(x: Tensor, back: Tensor, bits: int, group: int, along: str) -> Tensor:
    """Whether each number of blocks `back` [..,R,D] is within half a step of x: of its group, 2^bits - 1 steps between
    its ends; these are rounded to float16.
    """
    return near_by(x, back, 0.5 / (2**bits - 1), group, along)


def near_by(x: Tensor, back: Tensor, share: float, group: int, along: str) -> Tensor:
    """The same, where a number may be off by a share of what lies between the ends of its group."""
    cut, axis = _grouped(x, group, along)
    span = cut.amax(axis, keepdim=True) - cut.amin(axis, keepdim=True)
    ends = cut.abs().amax(axis, keepdim=True) * 2**-10 + 1e-7
    off = (_grouped(back, group, along)[0] - cut).abs()
    found: Tensor = off <= span * share * 1.01 + ends
    return found


def spread(of: Tensor, rows: int, width: int, group: int, along: str) -> Tensor:
    """One number of each group of a block, [..,n] -> [..,R,D]."""
    if along == "rows":
        cut = of.unflatten(-1, [-1, 1, width])
        wide = cut.expand(*cut.shape[:-2], group, width)
        rows_of: Tensor = wide.flatten(-3, -2)
        return rows_of
    cut = of.unflatten(-1, [rows, -1, 1])
    found: Tensor = cut.expand(*cut.shape[:-1], group).flatten(-2)[..., :width]
    return found


def block_sizes(rows: int, width: int, bits: int, group: int, along: str) -> tuple[int, int]:
    """Bytes of a block's codes, and its groups."""
    codes = rows * -(-width * bits // 8)
    return codes, rows // group * width if along == "rows" else rows * -(-width // group)


def _quantized_shape(x: Tensor, bits: int, group: int, along: str) -> tuple[Tensor, Tensor, Tensor]:
    codes, groups = block_sizes(int(x.shape[-2]), int(x.shape[-1]), bits, group, along)
    half = x.new_empty((*x.shape[:-2], groups), dtype=torch.float16)
    return x.new_empty((*x.shape[:-2], codes), dtype=torch.uint8), half, half.clone()


# x [..,R,D] -> codes uint8 [..,R ceil(D bits / 8)], scale and least float16, one of each group: `group` rows
# of a channel (along "rows"; R is a multiple), or `group` channels of a row ("channels"; the last group
# may have fewer). A row's n bytes hold its first n codes in their lowest bits, the next n above them, and so
# on: a byte that is widened once gives a number of each. No
# number is further off than half a step; of a group that holds NaN or an infinity, or numbers beyond
# float16, none comes back finite.
group_quantize = Op(
    "group_quantize",
    "(Tensor x, int bits, int group, str along) -> (Tensor, Tensor, Tensor)",
    reference=_group_quantize,
    shape=_quantized_shape,
)


def _steps(codes: Tensor, bits: int, rows: int, width: int) -> Tensor:
    """The codes of blocks [..,n] apart, float32 [..,R,D]."""
    per = 8 // bits
    shifts = torch.tensor([[bits * i] for i in range(per)], dtype=torch.uint8, device=codes.device)
    each = codes.unflatten(-1, (rows, 1, -1)) >> shifts & (2**bits - 1)
    found: Tensor = each.flatten(-2)[..., :width].float()
    return found


def _group_dequantize(
    codes: Tensor,
    scale: Tensor,
    least: Tensor,
    bits: int,
    group: int,
    along: str,
    rows: int,
    width: int,
    finer: Tensor | None = None,
) -> Tensor:
    steps = _steps(codes, bits, rows, width)
    if finer is not None:
        steps = steps + (_steps(finer, bits, rows, width) - 2 ** (bits - 1)) / 2**bits
    if along == "rows":
        of = [x.unflatten(-1, (rows // group, 1, width)) for x in (scale.float(), least.float())]
        x = (steps.unflatten(-2, (-1, group)) * of[0] + of[1]).flatten(-3, -2)
    else:
        of = [
            x.unflatten(-1, (rows, -1)).repeat_interleave(group, -1)[..., :width]
            for x in (scale.float(), least.float())
        ]
        x = steps * of[0] + of[1]
    out: Tensor = x.flatten(-3, -2)
    return out


# What group_quantize made of blocks [..,P,R,D], codes and groups [..,P,n] -> their rows one after another,
# float32 [..,P R,D]. finer: further codes, laid out alike: what a number is off, in parts of 2^bits to a step, of which
# half lie below 0.
group_dequantize = Op(
    "group_dequantize",
    "(Tensor codes, Tensor scale, Tensor least, int bits, int group, str along, int rows, int width, "
    "Tensor? finer=None) -> Tensor",
    reference=_group_dequantize,
    shape=lambda codes, scale, least, bits, group, along, rows, width, finer=None: scale.new_empty(
        (*codes.shape[:-2], codes.shape[-2] * rows, width), dtype=torch.float32
    ),
)
