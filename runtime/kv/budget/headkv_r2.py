"""HeadKV-R2 (arXiv:2410.19258): heads that find what an answer needs keep more tokens than the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from accel.ir.axis import option
from accel.ir.tables import Example, Rows, Sizes, Tables
from accel.runtime.kv.budget import Base
from accel.runtime.kv.budget._needles import needles
from accel.runtime.kv.budget._observed import right_places
from accel.runtime.kv.budget._share import Share

_FAR = 1e30  # after every slot
_FIRST = 1e6  # before every slot beyond the window
_LEAST = 1e-6  # weight of a head that gets nothing of the pool


@dataclass(frozen=True)
class HeadKVR2(Tables, Share, Base):
    """A head keeps `window` tokens, as in the score. Of the rest, every head gives the fraction 1 / `beta` to a pool,
    which the heads of all layers share according to their importance. What has no room goes to the other heads.

    The importance of a head is how much of the attention to the right places is among its highest weights, in examples
    that the model answers right: a text hides two facts, from which together the answer follows, among others of the
    kind (`_needles.py`). The right places are the facts, while the answer comes. A text of one's own marks none, and a
    model may answer no example: then they are the earlier copies of the next token that follow a copy of the current
    one. The heads of a group are averaged. The paper raises importances to a power, as an option; here they stay as
    they are.
    """

    key: ClassVar[str] = "headkv-r2"
    beta: float = option(1.2, least=1)
    window: int = option(32, least=0)
    even: ClassVar[bool] = False
    level: ClassVar[bool] = False
    small: ClassVar[Mapping[str, Any]] = {"tokens_kept": 17, "window": 4}

    def sizes(self, width: int, heads: int) -> Sizes:
        """`share`: importance of the layer's heads; `shares`: mean importance of every layer. 1 is the mean of all."""
        return {"share": (heads,), "shares": (-1,)}

    def tokens(
        self, seen: int, layer: int, layers: int, share: Any = None, shares: Any = None
    ) -> int:
        """See Base."""
        mean = self.mean(seen)
        if shares is None or mean >= seen or mean <= self.window:
            return self.average(seen)
        weights = np.asarray(self._weights(np.asarray(shares, np.float64)))
        room, left = seen - self.window, (mean - self.window) * len(weights)
        open_ = np.ones(len(weights), bool)
        while (full := open_ & (weights * left >= room * weights[open_].sum())).any():
            left -= room * full.sum()
            open_ &= ~full
            if not open_.any():
                break
        wanted = self.window + left * weights / max(weights[open_].sum(), _LEAST)
        return adding_up(np.where(open_, wanted, seen), seen, round(mean * len(weights)))[layer]

    def most(self, tokens: int, heads: int, share: Any = None, shares: Any = None) -> int:
        """See Base."""
        if share is None or tokens <= self.window:
            return tokens
        weights = self._weights(np.asarray(share, np.float64))
        return self.window + int(
            np.ceil((tokens - self.window) * weights.max() / weights.mean() - 1e-6)
        )

    def room(
        self, tokens: int, heads: int, slots: int, share: Any = None, shares: Any = None
    ) -> int:
        """See Base."""
        return heads * min(tokens, slots)

    def heads(  # type: ignore[override]
        self, keep: Any, positions: Any, ranks: Any, share: Any
    ) -> Any:
        """See Base. A head's slots are counted, the window first; of all heads' slots, the smallest count by the
        head's weight is next.
        """
        count = (positions == positions).long().cumsum(2) - 1  # [B,G,S]
        there = (positions >= 0).sum(2, keepdim=True)
        after = (count - self.window + 0.5) / self._weights(share)[:, None]
        after = after.where(count >= self.window, count - _FIRST)
        can = (count < there) & (count < ranks.shape[0])
        order = after.masked_fill(~can, _FAR).flatten(1).sort(stable=True, dim=-1).indices
        among = order.sort(-1).indices  # [B,G S]
        stays = (among < (keep * positions.shape[1])[:, None]).unflatten(1, positions.shape[1:])
        return (stays & can).sum(2)

    def measure(self, rows: Iterable[Rows]) -> dict[int, dict[str, Any]]:
        """Over the queries whose next token follows from the row, and that have such places."""
        found: dict[int, Any] = {}
        for row in rows:
            for one in range(len(row.tokens)):
                places = (row.known[one] < 0).expand(row.known.shape[1], -1)
                if not places.any():
                    places = right_places(row.tokens[one])
                asked = ((row.known[one] > 0) & places.any(1)).nonzero()[:, 0]
                span = places[asked]  # [N,T]
                weight = row.known[one][asked]
                for layer, x in row.layers.items():
                    probs = x.weights()[one][:, :, asked]  # [G,R,N,T]
                    rank = probs.sort(dim=-1, descending=True).indices.sort(-1).indices
                    size = span.sum(1)
                    hit = probs.masked_fill(~(span & (rank < size[:, None])), 0).sum(3)
                    total = (hit * weight / size.clamp(min=1)).sum(2).mean(1)
                    found[layer] = found.get(layer, 0) + total
        mean = sum(float(x.mean()) for x in found.values()) / max(1, len(found))
        share = {i: x / mean if mean > 0 else x * 0 + 1 for i, x in found.items()}
        each = [float(share[i].mean()) for i in sorted(share)]
        return {i: {"share": x, "shares": x.new_tensor(each)} for i, x in share.items()}

    def examples(self, seed: int) -> Iterator[Example]:
        """See Tables."""
        return needles(seed)

    def _weights(self, share: Any) -> Any:
        """What each gets of the tokens beyond the window, 1 on average."""
        return (1 - 1 / self.beta + share / self.beta).clip(min=_LEAST)


def adding_up(shares: Any, most: int, total: int) -> list[int]:
    """Whole numbers near those that are wanted, from 1 to `most`, which add up to `total` where they can: those whose
    rounding down loses most are rounded up.
    """
    found = np.clip(np.floor(shares), 1, most).astype(int)
    while (lacks := total - int(found.sum())) != 0:
        step = 1 if lacks > 0 else -1
        can = (found < most) if step > 0 else (found > 1)
        if not can.any():
            break
        found[int(np.where(can, step * (shares - found), -np.inf).argmax())] += step
    return [int(n) for n in found]
