"""CSKV (arXiv:2409.10593): keys and values of older tokens in fewer channels, of all heads together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.ir.axis import option
from accel.ir.tables import Rows, Sizes, Tables
from accel.passes.kv.codec import At, Base, Layout, Storage
from accel.passes.kv.codec._groups import Groups

_ROLES = {"k": "key", "v": "value"}
_TRAINED = 2048  # tokens that maps learn from, at most
_STEPS, _RATE = 200, 2e-3


@dataclass(frozen=True)
class Cskv(Tables, Base):
    """`density`: of the G D numbers of a token's keys, before RoPE, and of its values, this share of features stays.
    `bits`: 32, or 4: then the features of keys are quantised in windows of `window` tokens of a feature, those of
    values per token. `window`: at least so many tokens stay exact, and so many are encoded together.

    The two maps, to features and back, are those with the least squared error of keys and values of each layer on a
    text, an error of keys weighted by how large queries are in its channel. The paper trains to a squared error from an
    SVD of the weights on; no training ends below the least, which is known in closed form. With 4 bits both maps are
    then trained with the rounding in the loop, gradients passing it as if it were not there.
    """

    density: float = option(0.2, above=0, most=1)
    bits: int = option(32, one_of=(4, 32))
    window: int = option(32, least=1, most=1024)
    key: ClassVar[str] = "cskv"
    error = 8.0  # of random weights, whose channels have no common directions
    small: ClassVar[Mapping[str, Any]] = {"window": 8, "density": 0.5}
    others: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"density": 1.0, "window": 8},
        {"density": 0.5, "bits": 4},
    )

    @property
    def storage(self) -> Storage:
        return Storage(block=self.window, together=True, unrotated=True)

    def sizes(self, width: int, heads: int) -> Sizes:
        """`<keys or values>_down` [G D,features], `_up` [features,G D]; the most telling features first."""
        wide = heads * width
        return {f"{role}_{way}": (wide, wide) for role in _ROLES.values() for way in ("down", "up")}

    def measure(self, rows: Iterable[Rows]) -> dict[int, dict[str, Tensor]]:
        """The maps, of all tokens' keys, and of their values."""
        squares: dict[int, dict[str, Tensor]] = {}
        some: dict[int, dict[str, list[Tensor]]] = {}
        for row in rows:
            for layer, x in row.layers.items():
                sums, held = squares.setdefault(layer, {}), some.setdefault(layer, {})
                keys = x.keys if x.unrotated is None else x.unrotated
                asked = x.queries.double().unflatten(1, (keys.shape[1], -1)).square().sum((0, 2, 3))
                sums["asked"] = sums.get("asked", 0) + asked.flatten()
                for role, one in (("k", keys), ("v", x.values)):
                    flat = one.transpose(1, 2).flatten(2)
                    joined = flat.double().flatten(0, 1)
                    sums[role] = sums.get(role, 0) + joined.mT @ joined
                    many = held.setdefault(role, [])
                    if self.bits < 32 and sum(map(len, many)) * self.window < _TRAINED:
                        whole = flat.shape[1] // self.window * self.window
                        many.append(flat[:, :whole].unflatten(1, (-1, self.window)).flatten(0, 1))
        found: dict[int, dict[str, Tensor]] = {}
        for layer, sums in squares.items():
            for role, name in _ROLES.items():
                weight = _weight(sums["asked"]) if role == "k" else torch.ones(len(sums["v"]))
                maps = _least(sums[role], weight)
                if some[layer].get(role):
                    maps = self.trained(role, *maps, torch.cat(some[layer][role]), weight)
                told = zip(("down", "up"), maps, strict=True)
                found.setdefault(layer, {}).update({f"{name}_{way}": t for way, t in told})
        return found

    def trained(
        self, role: str, down: Tensor, up: Tensor, x: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Maps that learnt with features rounded, on blocks x [P,R,G D] of windows of tokens; those that were, where
        these lose less of a quarter of the windows, which they do not learn from.
        """
        count, held = self._features(x.shape[-1]), max(1, len(x) // 4)
        before = down[:, :count], up[:count]
        few = [t.clone().requires_grad_() for t in before]
        optimiser = torch.optim.Adam(few, lr=_RATE)
        blocks = x[held:].float()[None, None]
        for step in range(_STEPS):
            for group in optimiser.param_groups:
                group["lr"] = _RATE * (1 - step / _STEPS)
            loss = self._loss(role, few[0], few[1], blocks, weight)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        with torch.no_grad():
            rest = x[:held].float()[None, None]
            new, old = (self._loss(role, a, b, rest, weight) for a, b in (few, before))
            best = few if new < old else before
            return torch.cat((best[0], down[:, count:]), 1), torch.cat((best[1], up[count:]))

    def _loss(self, role: str, down: Tensor, up: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """The share that is lost of blocks [1,1,P,R,G D], channels weighted by [G D]; gradients pass the rounding."""
        at = self._at(role, down, up)
        exact = self._into(at, x)
        with torch.no_grad():
            rounded = self._out(at, self._coded(at, exact)).view_as(exact)
        back = self._back(at, exact + (rounded - exact).detach())
        return ((back - x) * weight).square().sum() / (x * weight).square().sum()

    def _features(self, width: int) -> int:
        return max(1, round(self.density * width))

    def _groups(self, at: At) -> Groups:
        """Features with one scale: of a feature those of a window's tokens, or all of a token."""
        if at.role == "k":
            return Groups(self.bits, self.window, "rows", self.window)
        return Groups(self.bits, self._features(at.width), "channels", self.window)

    def parts(self, at: At) -> Layout:
        count = self._features(at.width)
        if self.bits == 32:
            return {"": ("float32", (self.window * count,))}
        return self._groups(at).parts(count)

    def encode(self, at: At, x: Tensor) -> dict[str, Tensor]:
        return self._coded(at, self._into(at, x))

    def decode(self, at: At, parts: Mapping[str, Tensor]) -> Tensor:
        return self._back(at, self._out(at, parts))

    def _at(self, role: str, down: Tensor, up: Tensor) -> At:
        name = _ROLES[role]
        return At(role, up.shape[1], constants={f"{name}_down": down, f"{name}_up": up})

    def _maps(self, at: At) -> tuple[Tensor, Tensor]:
        """[G D,f], [f,G D]."""
        count, name = self._features(at.width), _ROLES[at.role]
        return at.constants[f"{name}_down"][:, :count], at.constants[f"{name}_up"][:count]

    def _into(self, at: At, x: Tensor) -> Tensor:
        """Features [...,f] of x [...,G D], no larger than x, for float16."""
        features: Tensor = x @ self._maps(at)[0] / at.width**0.5
        return features

    def _back(self, at: At, features: Tensor) -> Tensor:
        """[...,G D]."""
        back: Tensor = features @ (self._maps(at)[1] * at.width**0.5)
        return back

    def _coded(self, at: At, features: Tensor) -> dict[str, Tensor]:
        """The parts of blocks of features [...,R,f]."""
        if self.bits == 32:
            return {"": features.flatten(-2)}
        return self._groups(at).encode(features)

    def _out(self, at: At, parts: Mapping[str, Tensor]) -> Tensor:
        """The features [...,P R,f] of parts."""
        count = self._features(at.width)
        if self.bits == 32:
            found: Tensor = parts[""].unflatten(-1, [self.window, count]).flatten(2, 3)
            return found
        return self._groups(at).decode(parts, count)

    def within(self, at: At, x: Tensor, back: Tensor) -> Tensor:
        """What is read is made of features, which are those of x, or within half a step."""
        want, up = self._into(at, x), self._maps(at)[1] * at.width**0.5
        got = back @ torch.linalg.pinv(up)
        off = 1e-4 * x.norm(dim=-1, keepdim=True).amax(-2, keepdim=True) + 1e-30
        right = (back - got @ up).norm(dim=-1, keepdim=True) <= off
        if self.bits == 32:
            same: Tensor = right & ((want - got).abs() <= off)
            return same
        got = got + (want - got).clamp(-off, off)
        steps = self._groups(at).near(want, got)
        found: Tensor = right.flatten(3).all(-1) & steps.flatten(3).all(-1)  # [B,1,P]
        return found


def _weight(asked: Tensor) -> Tensor:
    """What an error of each channel of keys counts, by the squares of the queries that meet it: 1 at most."""
    return (asked / asked.max().clamp(min=1e-30)).sqrt().clamp(min=1e-3).float()


def _least(squares: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Maps down [n,n] and up [n,n], of which the first f features lose least of numbers whose products are `squares`
    [n,n], channels weighted by [n]: the principal directions of weighted numbers.
    """
    scale = weight.double()
    found = torch.linalg.eigh(scale[:, None] * squares * scale).eigenvectors.flip(-1)
    return (scale[:, None] * found).float(), (found.mT / scale).float()
