"""AQUA-KV (arXiv:2501.19392): of a layer's keys and values that is stored which those beneath it do not foretell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.ir.axis import option
from accel.ir.tables import Rows, Sizes, Tables
from accel.passes.kv.codec import AcrossLayers, At, Base, Layout, Storage
from accel.passes.kv.codec._groups import Groups

_FIRST = 4  # bits of the first layer, at least
_DAMPING = 1e-3  # of the mean square of an input
_TOKENS = 8192  # that maps are measured on, at most


@dataclass(frozen=True)
class AquaKv(Tables, AcrossLayers, Base):
    """Of all heads as one, keys before RoPE: K of a layer is a linear map of the K beneath, as that is read, and what
    is left, which is quantised in `bits`; V the same of this layer's K as read and the V beneath. The first layer is
    stored by itself, in 4 bits or more.

    `bits`: 2, 4 or 8. `group`: numbers with a common scale and minimum (float16), as in `kivi`: tokens of a channel for
    keys, channels of a token for values. `residual`: at least so many tokens stay exact. `sinks`: the first ones, too.

    The maps are the least squares of a text, layer after layer, with what is read as inputs; ridge, with an intercept.
    The paper's quantiser (HIGGS) is replaced by kivi's.
    """

    bits: int = option(2, one_of=(2, 4, 8))
    group: int = option(64, least=1, most=1024)
    residual: int = option(128, least=1, most=8192, multiple_of="group")
    sinks: int = option(4, least=0, most=4096)
    lacks = "its quantiser HIGGS (kivi's is used)"
    key: ClassVar[str] = "aqua-kv"
    error = 8.0  # of random weights, whose layers have nothing in common
    small: ClassVar[Mapping[str, Any]] = {"group": 4, "residual": 8, "sinks": 2}
    others: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"bits": 4, "group": 32, "sinks": 0},
        {"bits": 8, "group": 8, "residual": 24},
    )

    @property
    def storage(self) -> Storage:
        return Storage(self.residual, self.sinks, together=True, unrotated=True)

    def place(self, layer: int, layers: int) -> str:
        return "later" if layer else "first"

    def near(self, role: str, place: str, written: bool) -> tuple[str, ...]:
        if place == "first":
            return ()
        return ("read",) if role == "k" else ("keys", "read")

    # The maps

    def sizes(self, width: int, heads: int) -> Sizes:
        """The last row of a map is added."""
        wide = heads * width
        return {"key_map": (wide + 1, wide), "value_map": (2 * wide + 1, wide)}

    def measure(self, rows: Iterable[Rows]) -> dict[int, dict[str, Tensor]]:
        """Layer after layer of the first tokens of a text; a map of zeros for the first."""
        held = _joined(rows, self.residual)
        found: dict[int, dict[str, Tensor]] = {}
        read: dict[str, Tensor] = {}
        for layer in sorted(held):
            wide = int(held[layer]["k"].shape[-1])
            maps = {
                "key_map": held[layer]["k"].new_zeros(wide + 1, wide),
                "value_map": held[layer]["k"].new_zeros(2 * wide + 1, wide),
            }
            place, now = ("later", dict[str, Tensor]()) if read else ("first", {})
            for role, name in (("k", "key_map"), ("v", "value_map")):
                x, near = held[layer][role], dict[str, Tensor]()
                if read:
                    near = {"read": read[role], **({"keys": now["k"]} if role == "v" else {})}
                    maps[name] = _fitted(_inputs(near).flatten(0, -2), x.flatten(0, -2))
                at = At(role, wide, place, maps, near)
                now[role] = self.decode(at, self.encode(at, x)).unflatten(2, (-1, self.residual))
            found[layer], read = maps, now
        return found

    # What is stored

    def _groups(self, at: At) -> Groups:
        bits = self.bits if at.place == "later" else max(_FIRST, self.bits)
        return Groups.by_role(at.role, bits, self.group, self.residual)

    def parts(self, at: At) -> Layout:
        return self._groups(at).parts(at.width)

    def encode(self, at: At, x: Tensor) -> dict[str, Tensor]:
        return self._groups(at).encode(x - _foretold(at) if at.context else x)

    def decode(self, at: At, parts: Mapping[str, Tensor]) -> Tensor:
        left = self._groups(at).decode(parts, at.width)
        return left + _foretold(at).flatten(2, 3) if at.context else left

    def within(self, at: At, x: Tensor, back: Tensor) -> Tensor:
        """What is left of a number is off by no more than half a step of its group."""
        if at.context:
            told = _foretold(at)
            off = 1e-5 * (x.abs() + told.abs()).amax((-2, -1), keepdim=True)
            want, got = x - told, back - told
            x, back = want, got + (want - got).clamp(-off, off)
        return self._groups(at).near(x, back)


def _inputs(near: Mapping[str, Tensor]) -> Tensor:
    """What a map takes [..,R,d or 2 d]."""
    read = near["read"]
    return torch.cat((near["keys"], read), dim=-1) if "keys" in near else read


def _foretold(at: At) -> Tensor:
    """What a map [n+1,d] makes of what is read."""
    linear = at.constants["key_map" if at.role == "k" else "value_map"]
    found: Tensor = _inputs(at.context) @ linear[:-1] + linear[-1]
    return found


def _fitted(x: Tensor, y: Tensor) -> Tensor:
    """The map [n+1,d] of x [T,n] to y [T,d] that is off least."""
    x, y = x.double(), y.double()
    middle, aim = x.mean(0), y.mean(0)
    x, y = x - middle, y - aim
    square = x.mT @ x
    square.diagonal().add_(_DAMPING * float(square.diagonal().mean()) + 1e-30)
    linear = torch.linalg.solve(square, x.mT @ y)
    return torch.cat((linear, (aim - middle @ linear)[None])).float()


def _joined(rows: Iterable[Rows], block: int) -> dict[int, dict[str, Tensor]]:
    """Layer -> role -> blocks [1,1,P,R,d] of a text's first tokens; shorter rows are filled up with their last."""
    seen: dict[int, dict[str, list[Tensor]]] = {}
    for row in rows:
        for layer, one in row.layers.items():
            held = seen.setdefault(layer, {"k": [], "v": []})
            keys = one.keys if one.unrotated is None else one.unrotated
            for role, x in (("k", keys), ("v", one.values)):
                if sum(map(len, held[role])) * block >= _TOKENS:
                    continue
                flat = x.transpose(1, 2).flatten(2)  # [B,T,d]
                short = -flat.shape[1] % block
                whole = torch.cat((flat, flat[:, -1:].expand(-1, short, -1)), dim=1)
                held[role].append(whole.unflatten(1, (-1, block)).flatten(0, 1).float())
    return {
        layer: {role: torch.cat(of)[None, None] for role, of in held.items()}
        for layer, held in seen.items()
    }
