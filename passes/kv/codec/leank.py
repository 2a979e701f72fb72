"""LeanK (arXiv:2508.02215): of the keys of older tokens only those channels of each head stay that later queries were
found to need.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.ir.axis import option
from accel.ir.tables import Observed, Rows
from accel.passes.kv.codec import At, Base, Layout, Storage
from accel.passes.kv.codec._groups import Groups
from accel.passes.trained import Fitted, Parts

_SPARSE = 0.06  # what a channel costs while it is learnt which are needed
_FIRST = 10 / 11  # of the training: the first of its two stages
_QUERIES = 64  # of a row, which its loss asks


@dataclass(frozen=True)
class LeanK(Fitted, Base):
    """`ratio`: the share of all channels of all heads' keys, after RoPE, that is dropped: those with the least alpha.
    `alignment`: the channels that a head keeps are rounded to a multiple of it. `sinks`, `window`: the first tokens,
    and at least so many of the newest, are exact (the paper: 128 and 768); so many as the latter are moved together.
    `bits`: 32, or 4: what is kept is quantised as in `kivi`, in groups of `group` tokens of a channel of keys, or
    channels of a token's values.

    alpha [G,D] of each layer, from 0 to 1, is learnt on rows of text: logits of later queries with the keys between
    are those of alpha times the keys. In the first stage alphas are drawn to 0; in the second, those that `ratio` and
    `alignment` keep count as 1 and others as 0, and gradients pass as if they were alpha. The paper compares the last
    hidden states of the model; here each layer's attention is compared with what it gives from exact keys, as a share
    of its size, so no gradient goes through the model.

    Every head keeps at least `alignment` channels, with all its values; the paper drops the values of a head that has
    none. Heads of different sizes lie one after another in one row.
    """

    ratio: float = option(0.7, least=0, below=1)
    alignment: int = option(8, least=1, most=1024)
    sinks: int = option(16, least=0, most=4096)
    window: int = option(128, least=1, most=4096, multiple_of="group")
    bits: int = option(32, one_of=(4, 32))
    group: int = option(64, least=1, most=1024)
    key: ClassVar[str] = "leank"
    error = 8.0  # of random weights, whose channels are all needed
    small: ClassVar[Mapping[str, Any]] = {
        "window": 8,
        "group": 4,
        "sinks": 2,
        "alignment": 2,
        "ratio": 0.5,
    }
    others: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"ratio": 0.0, "window": 8, "group": 8},
        {"ratio": 0.5, "alignment": 4, "window": 32, "group": 16, "bits": 4},
    )

    @property
    def storage(self) -> Storage:
        return Storage(block=self.window, sinks=self.sinks, together=True)

    def sizes(self, width: int, heads: int) -> dict[str, tuple[int, ...]]:
        return {"alpha": (heads, -1)}

    def start(self, rows: Rows, inner: int, generator: torch.Generator) -> Parts:
        """All channels count in full."""
        return {
            layer: {"alpha": torch.ones(x.keys.shape[1], x.keys.shape[3])}
            for layer, x in rows.layers.items()
        }

    def loss(self, parts: Parts, rows: Rows, progress: float) -> Tensor:
        """The squared error of what attention gives, as a share of its square, a mean over the layers; in the first
        stage with what the channels cost.
        """
        for part in parts.values():
            part["alpha"].data.clamp_(0, 1)
        alphas = {layer: part["alpha"] for layer, part in parts.items()}
        if progress < _FIRST:
            cost = _SPARSE * torch.cat([a.flatten() for a in alphas.values()]).mean()
            return self._wrong(alphas, rows) + cost
        kept = self.channels_kept(alphas)
        through = {i: kept[i].float() + a - a.detach() for i, a in alphas.items()}
        return self._wrong(through, rows)

    def _wrong(self, weights: Mapping[int, Tensor], rows: Rows) -> Tensor:
        """weights [G,D] of each layer's channels."""
        found = []
        for layer, x in rows.layers.items():
            want, got = (self.attend(x, w) for w in (None, weights[layer]))
            found.append((got - want).square().sum() / want.square().sum())
        return torch.stack(found).mean()

    def attend(self, x: Observed, weights: Tensor | None) -> Tensor:
        """What attention gives late queries [B,H,Q,D], with the channels of keys between sinks and window weighted by
        [G,D]; None: exactly.
        """
        tokens = x.keys.shape[2]
        at = torch.linspace(min(self.sinks + self.window, tokens - 1), tokens - 1, _QUERIES)
        at = at.round().long().unique()
        repeat = x.queries.shape[1] // x.keys.shape[1]
        keys, values = (y.repeat_interleave(repeat, 1) for y in (x.keys, x.values))
        queries, place = x.queries[:, :, at], x.positions
        asked = queries, place[:, at], keys, place[:, None].expand(-1, keys.shape[1], -1)
        scores = x.form.scores(*asked)  # [B,H,1,Q,T]
        if weights is not None:
            few = x.form.scores(queries * weights.repeat_interleave(repeat, 0)[:, None], *asked[1:])
            place = torch.arange(tokens)
            between = (place >= self.sinks) & (place <= at[:, None] - self.window)
            scores = torch.where(between, few, scores)
        found: Tensor = x.form.shares(scores)[:, :, 0] @ values
        return found

    def channels_kept(self, alphas: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Which channels [G,D] each layer keeps; a head's number goes by the ranks of its alphas among all heads'."""
        flat = torch.cat([a.detach().flatten() for a in alphas.values()])
        most = round((1 - self.ratio) * flat.numel())
        among = torch.zeros_like(flat, dtype=torch.bool)
        among[flat.argsort(descending=True, stable=True)[:most]] = True
        found = {}
        for layer, raw in zip(
            alphas, among.split([a.numel() for a in alphas.values()]), strict=True
        ):
            alpha = alphas[layer].detach()
            width = alpha.shape[1]
            many = raw.view_as(alpha).sum(1, keepdim=True)
            step = self.alignment
            some = ((many + step // 2) // step * step).clamp(min(step, width), width)
            rank = alpha.argsort(dim=1, descending=True, stable=True).argsort(1)
            found[layer] = rank < torch.where(many == width, width, some)
        return found

    def constants(self, parts: Parts) -> Parts:
        """`channels` [n] that a layer keeps, of G D, in order; `place` [G D] of each among them, n where it is none."""
        found: Parts = {}
        kept = self.channels_kept({layer: part["alpha"] for layer, part in parts.items()})
        for layer, stays in kept.items():
            stays = stays.flatten()
            channels = stays.nonzero()[:, 0]
            place = torch.where(stays, stays.cumsum(0) - 1, len(channels))
            found[layer] = {"channels": channels, "place": place}
        return found

    def _groups(self, at: At) -> Groups:
        return Groups.by_role(at.role, self.bits, self.group, self.window)

    def _count(self, at: At) -> int:
        """Numbers of a token that are kept."""
        return int(at.constants["channels"].shape[0]) if at.role == "k" else at.width

    def parts(self, at: At) -> Layout:
        if self.bits == 32:
            return {"": ("float32", (self.window * self._count(at),))}
        return self._groups(at).parts(self._count(at))

    def encode(self, at: At, x: Tensor) -> dict[str, Tensor]:
        if at.role == "k":  # what is no number spoils its token, though its channel be dropped
            x = x.index_select(-1, at.constants["channels"]) + (x * 0).sum(-1, keepdim=True)
        return {"": x.flatten(-2)} if self.bits == 32 else self._groups(at).encode(x)

    def decode(self, at: At, parts: Mapping[str, Tensor]) -> Tensor:
        count = self._count(at)
        if self.bits == 32:
            back = parts[""].unflatten(-1, [self.window, count]).flatten(2, 3)
        else:
            back = self._groups(at).decode(parts, count)
        if at.role == "k":
            place = at.constants["place"]
            back = torch.cat((back, back[..., :1] * 0), -1).index_select(-1, place)
        found: Tensor = back
        return found

    def within(self, at: At, x: Tensor, back: Tensor) -> Tensor:
        """What is kept is as it was, or within half a step; what is not is 0. bool, one for each block."""
        none = torch.ones(x.shape[:3], dtype=torch.bool)
        if at.role == "k":
            channels, place = at.constants["channels"], at.constants["place"]
            none = (back[..., place == len(channels)] == 0).flatten(3).all(-1)
            x, back = x[..., channels], back[..., channels]
        same = back == x if self.bits == 32 else self._groups(at).near(x, back)
        found: Tensor = none & same.flatten(3).all(-1)
        return found
