"""MiniCache (arXiv:2405.14366): from the middle on, two layers share the directions of their keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.ir.axis import option
from accel.ir.ops.groups import spread
from accel.passes.kv.codec import AcrossLayers, At, Base, Layout, Storage
from accel.passes.kv.codec._groups import Groups

_FLOATS = {16: "float16", 32: "float32"}
_STRAIGHT = 1e-4  # angles up to this, and up to this from a half turn
_TINY = 1e-30


@dataclass(frozen=True)
class Minicache(AcrossLayers, Base):
    """Of layers in pairs from L/2 on, a token's x1 and x2 of a head are |x1| e and |x2| e: one direction e between
    theirs on the sphere, `deeper` of the way to that of the deeper layer, and both lengths. The lower layer stores e.

    `retain`: of a block's tokens this share, whose directions differ most, stay as they are (float16; of 32 `bits`
    float32). The paper retains what lies beyond an angle, here it is so many. A last layer without a pair, and those
    before the middle, are stored alone. `bits`: of directions and of layers alone: 16 or 32 (floats), or 4 or 8 as in
    `kivi`: keys in groups of `group` tokens of a channel, values in groups of channels. `residual`: at least so many
    tokens stay exact.
    """

    bits: int = option(4, one_of=(4, 8, *_FLOATS))
    group: int = option(64, least=1, most=256)
    residual: int = option(64, least=1, most=256, multiple_of="group")
    deeper: float = option(0.6, least=0, most=1)
    retain: float = option(0.05, least=0, most=1)
    key: ClassVar[str] = "minicache"
    error = 8.0  # of random weights, whose layers have nothing in common
    small: ClassVar[Mapping[str, Any]] = {"group": 4, "residual": 8}
    others: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"bits": 32, "residual": 8, "group": 4},
        {"bits": 16, "residual": 8, "group": 4, "retain": 1.0},
        {"bits": 8, "group": 8, "residual": 24, "retain": 0.0},
    )

    @property
    def storage(self) -> Storage:
        return Storage(block=self.residual)

    def place(self, layer: int, layers: int) -> str:
        after = layer - layers // 2
        if after < 0 or (after % 2 == 0 and layer + 1 == layers):
            return "alone"
        return "upper" if after % 2 else "lower"

    def near(self, role: str, place: str, written: bool) -> tuple[str, ...]:
        names = {"lower": ("above", ""), "upper": ("beneath", "read")}.get(place, ("", ""))
        return tuple(filter(None, (names[not written],)))

    @property
    def _most(self) -> int:
        """Tokens of a block that stay as they are."""
        return round(self.retain * self.residual)

    def _groups(self, at: At) -> Groups:
        return Groups.by_role(at.role, self.bits, self.group, self.residual)

    def parts(self, at: At) -> Layout:
        if self.bits in _FLOATS:
            found: Layout = {"": (_FLOATS[self.bits], (self.residual * at.width,))}
        else:
            found = self._groups(at).parts(at.width)
        if at.place == "alone":
            return found
        size = ("float32", (self.residual,))
        found = {**found, "size": size} if at.place == "lower" else {"": size}
        if self._most:
            found["own"] = ("float32" if self.bits == 32 else "float16", (self._most * at.width,))
            found["token"] = ("uint8", (self._most,))
        return found

    def encode(self, at: At, x: Tensor) -> dict[str, Tensor]:
        if at.place == "alone":
            return self._stored(at, x)
        pair = _pair(at, x)
        spoilt = sum((y.half().float() * 0).sum((-2, -1), keepdim=True) for y in pair)
        shared, angle = self._merged(*pair)
        x = x + spoilt  # no number: none of its block
        sizes = _size(x).clamp(min=_TINY).flatten(-2)
        lower = at.place == "lower"
        found = {**self._stored(at, shared), "size": sizes} if lower else {"": sizes}
        if self._most:
            token = self._retained(angle)
            own = x.gather(-2, token[..., None].expand(*token.shape, x.shape[-1]))
            found["own"] = own.to(torch.float32 if self.bits == 32 else torch.float16).flatten(-2)
            found["token"] = token.to(torch.uint8)
        return found

    def decode(self, at: At, parts: Mapping[str, Tensor]) -> Tensor:
        if at.place == "alone":
            return self._read(at, parts)
        if at.place == "lower":
            shared = self._read(at, parts).unflatten(2, [-1, self.residual])
            size = parts["size"]
        else:
            shared, size = at.context["read"], parts[""]
        back = _direction(shared) * size[..., None]
        if self._most:
            token = parts["token"].long()[..., None]
            own = parts["own"].float().unflatten(-1, [self._most, at.width])
            back = back.scatter(-2, token.expand(*token.shape[:-1], at.width), own)
        found: Tensor = back.flatten(2, 3)
        return found

    def _merged(self, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
        """The direction of each token [..,R,D] of both layers, and the angle between theirs [..,R]."""
        one, two = _direction(lower), _direction(upper)
        cosine = (one * two).sum(-1, keepdim=True).clamp(-1, 1)
        angle = cosine.acos()
        t = self.deeper
        sine = angle.sin().clamp(min=_STRAIGHT / 2)
        between = ((1 - t) * angle).sin() / sine * one + (t * angle).sin() / sine * two
        close, turned = angle < _STRAIGHT, angle > torch.pi - 10 * _STRAIGHT
        shared = torch.where(close, (1 - t) * one + t * two, between)
        return _direction(torch.where(turned, two, shared)), angle[..., 0]

    def _retained(self, angle: Tensor) -> Tensor:
        """The tokens [..,n] whose angles [..,R] are largest."""
        found: Tensor = angle.topk(self._most, dim=-1).indices
        return found

    def _stored(self, at: At, x: Tensor) -> dict[str, Tensor]:
        if self.bits in _FLOATS:
            return {"": x.to(getattr(torch, _FLOATS[self.bits])).flatten(-2)}
        return self._groups(at).encode(x)

    def _read(self, at: At, parts: Mapping[str, Tensor]) -> Tensor:
        if self.bits in _FLOATS:
            back: Tensor = parts[""].float().unflatten(-1, [self.residual, at.width]).flatten(2, 3)
            return back
        return self._groups(at).decode(parts, at.width)

    def within(self, at: At, x: Tensor, back: Tensor) -> Tensor:
        """Alone: as near as their bits allow. Of a pair tokens keep their lengths, and are no further off than
        the shared direction and its rounding are; those that are retained are as they were. bool, one for each token.
        """
        half = x.abs() * 2**-10 + 1e-7
        if at.place == "alone":
            return (
                (back - x).abs() <= half if self.bits in _FLOATS else self._groups(at).near(x, back)
            )
        pair = _pair(at, x)
        shared, angle = self._merged(*pair)
        size = _size(x)
        rounding = torch.full_like(size, 2**-10 * x.shape[-1] ** 0.5)
        if self.bits not in _FLOATS:
            scale = self._stored(at, shared)["scale"].float() / 2
            step = spread(scale, self.residual, at.width, self.group, self._groups(at).along)
            rounding = rounding + step.norm(dim=-1, keepdim=True)
        off = (back - x).norm(dim=-1, keepdim=True)
        merged = (
            off
            <= size * ((shared - _direction(x)).norm(dim=-1, keepdim=True) + 2 * rounding) + 1e-6
        )
        long = (_size(back) - size).abs() <= size * 2e-3 + 1e-6
        right = (merged & long)[..., 0]
        stays = torch.zeros_like(angle, dtype=torch.bool)
        if self._most:
            stays = stays.scatter(-1, self._retained(angle), True)
        exact = ((back - x).abs() <= half).all(-1)
        found: Tensor = torch.where(stays, exact, right)
        return found


def _pair(at: At, x: Tensor) -> tuple[Tensor, Tensor]:
    """The lower layer's numbers and the upper one's, of which x are one."""
    return (x, at.context["above"]) if at.place == "lower" else (at.context["beneath"], x)


def _size(x: Tensor) -> Tensor:
    """The length of each token [..,D] -> [..,1], of what is very small or large too."""
    most = x.abs().amax(-1, keepdim=True).clamp(min=_TINY)
    found: Tensor = (x / most).square().sum(-1, keepdim=True).sqrt() * most
    return found


def _direction(x: Tensor) -> Tensor:
    """Tokens of length 1; 0 of a token of zeros."""
    y = x / x.abs().amax(-1, keepdim=True).clamp(min=_TINY)
    return y / y.square().sum(-1, keepdim=True).sqrt().clamp(min=0.5)
