"""LeanK (arXiv:2508.02215): of the keys of older tokens only those channels of each head stay that later queries were
found to need.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.ir.axis import option
from accel.ir.tables import Example, Observed, Rows
from accel.passes.kv._shared.asked import asked
from accel.passes.kv.codec import At, Base, Layout, Storage
from accel.passes.kv.codec._groups import Groups
from accel.passes.trained import Fitted, Parts

_SPARSE = 0.06  # what a channel costs while it is learnt which are needed
_FIRST = 10 / 11  # of the training: the first of its two stages


@dataclass(frozen=True)
class LeanK(Fitted, Base):
    """`ratio`: the share of all channels of all heads' keys, after RoPE, that is dropped: those with the least alpha.
    `alignment`: the channels that a head keeps are rounded to a multiple of it. `sinks`, `window`: the first tokens,
    and at least so many of the newest, are exact (the paper: 128 and 768); so many as the latter are moved together.
    `bits`: 32, or 4: what is kept is quantised as in `kivi`, in groups of `group` tokens of a channel of keys, or
    channels of a token's values.

    alpha [G,D] of each layer, from 0 to 1, is learnt in the model: logits of queries with the keys between are those of
    alpha times the keys, and the last hidden states of the tokens of answers (of all tokens, of a text) should be those
    of the model, the squared error as a share of their square. In the first stage alphas are drawn to 0; in the second,
    those that `ratio` and `alignment` keep count as 1 and others as 0, and gradients pass as if they were alpha.

    A head that keeps no channel reads sinks and window alone, and its values between are dropped too; one head of each
    layer keeps `alignment` channels at least. Heads of different sizes lie one after another in one row.
    """

    ratio: float = option(0.7, least=0, below=1)
    alignment: int = option(8, least=1, most=1024)
    sinks: int = option(16, least=0, most=4096)
    window: int = option(128, least=1, most=4096, multiple_of="group")
    bits: int = option(32, one_of=(4, 32))
    group: int = option(64, least=1, most=1024)
    key: ClassVar[str] = "leank"
    inside: ClassVar[bool] = True
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

    def examples(self, seed: int) -> Iterator[Example]:
        """See Fitted."""
        return asked(seed)

    def loss(self, parts: Parts, rows: Rows, progress: float) -> Tensor:
        """The squared error of the last hidden states of what answers (`known`), as a share of their square, a mean; in
        the first stage with what the channels cost.
        """
        for part in parts.values():
            part["alpha"].data.clamp_(0, 1)
        alphas = {layer: part["alpha"] for layer, part in parts.items()}
        if progress < _FIRST:
            cost = _SPARSE * torch.cat([a.flatten() for a in alphas.values()]).mean()
            return self._wrong(alphas, {}, rows) + cost
        kept = self.channels_kept(alphas)
        through = {i: kept[i].float() + a - a.detach() for i, a in alphas.items()}
        return self._wrong(through, kept, rows)

    def _wrong(
        self, weights: Mapping[int, Tensor], channels: Mapping[int, Tensor], rows: Rows
    ) -> Tensor:
        """weights [G,D] of each layer's channels; channels: of those that are kept,
        by which heads without any are dropped; empty: none is."""

        def instead(layer: int, x: Observed) -> Tensor:
            some = channels[layer].any(1) if layer in channels else None
            return self.attend(x, weights[layer], some)

        with torch.no_grad():
            want = rows.last()
        asked = rows.known > 0
        want, got = want[asked], rows.last(instead)[asked]
        lost: Tensor = ((got - want).square().sum(-1) / want.square().sum(-1)).mean()
        return lost

    def attend(self, x: Observed, weights: Tensor, some: Tensor | None = None) -> Tensor:
        """What attention gives [B,H,T,D], with the channels of keys between sinks and window weighted by [G,D]; heads
        that are not among `some` (bool [G]) read none of these.
        """
        groups, tokens = x.keys.shape[1:3]
        repeat, place = x.queries.shape[1] // groups, x.positions
        asked = place, x.keys, place[:, None].expand(-1, groups, -1)
        wide = weights.repeat_interleave(repeat, 0)[:, None]
        exact = x.form.scores(x.queries, *asked)  # [B,G,R,T,T]
        few = x.form.scores(x.queries * wide, *asked)
        number = torch.arange(tokens)
        between = (number >= self.sinks) & (number <= number[:, None] - self.window)
        if some is not None:
            few = few.masked_fill(~some[:, None, None, None], torch.finfo(few.dtype).min)
        shares = x.form.shares(torch.where(between, few, exact))
        found: Tensor = (shares @ x.values[:, :, None]).flatten(1, 2)
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
            some = ((many + step // 2) // step * step).clamp(max=width)
            if not some.any():
                some[alpha.amax(1).argmax()] = min(step, width)
            rank = alpha.argsort(dim=1, descending=True, stable=True).argsort(1)
            found[layer] = rank < torch.where(many == width, width, some)
        return found

    def constants(self, parts: Parts) -> Parts:
        """`channels`, `value_channels` [n] that a layer keeps, of G D, in order; `place`, `value_place` [G D] of each
        among them, n where it is none; `unread` [G], which heads keep none.
        """
        found: Parts = {}
        kept = self.channels_kept({layer: part["alpha"] for layer, part in parts.items()})
        for layer, keys in kept.items():
            read = keys.any(1, keepdim=True)
            found[layer] = {"unread": ~read[:, 0]}
            for name, stays in (("", keys.flatten()), ("value_", read.expand_as(keys).flatten())):
                channels = stays.nonzero()[:, 0]
                found[layer][f"{name}channels"] = channels
                found[layer][f"{name}place"] = torch.where(
                    stays, stays.cumsum(0) - 1, len(channels)
                )
        return found

    def unread(self, at: At) -> Tensor | None:
        """See Codec."""
        return at.constants["unread"]

    def _groups(self, at: At) -> Groups:
        return Groups.by_role(at.role, self.bits, self.group, self.window)

    def _kept(self, at: At) -> tuple[Tensor, Tensor]:
        """The numbers of a token that are kept, and the place of each among them."""
        name = "" if at.role == "k" else "value_"
        return at.constants[f"{name}channels"], at.constants[f"{name}place"]

    def _count(self, at: At) -> int:
        """Numbers of a token that are kept."""
        return int(self._kept(at)[0].shape[0])

    def parts(self, at: At) -> Layout:
        if self.bits == 32:
            return {"": ("float32", (self.window * self._count(at),))}
        return self._groups(at).parts(self._count(at))

    def encode(self, at: At, x: Tensor) -> dict[str, Tensor]:
        if self._count(at) < at.width:  # what is no number spoils its token, though it be dropped
            x = x.index_select(-1, self._kept(at)[0]) + (x * 0).sum(-1, keepdim=True)
        return {"": x.flatten(-2)} if self.bits == 32 else self._groups(at).encode(x)

    def decode(self, at: At, parts: Mapping[str, Tensor]) -> Tensor:
        count = self._count(at)
        if self.bits == 32:
            back = parts[""].unflatten(-1, [self.window, count]).flatten(2, 3)
        else:
            back = self._groups(at).decode(parts, count)
        if count < at.width:
            back = torch.cat((back, back[..., :1] * 0), -1).index_select(-1, self._kept(at)[1])
        found: Tensor = back
        return found

    def within(self, at: At, x: Tensor, back: Tensor) -> Tensor:
        """What is kept is as it was, or within half a step; what is not is 0. bool, one for each block."""
        channels, place = self._kept(at)
        none = (back[..., place == len(channels)] == 0).flatten(3).all(-1)
        x, back = x[..., channels], back[..., channels]
        same = back == x if self.bits == 32 else self._groups(at).near(x, back)
        found: Tensor = none & same.flatten(3).all(-1)
        return found
