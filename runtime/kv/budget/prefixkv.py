"""PrefixKV (arXiv:2412.03409): each layer keeps as many tokens as it needs for the same part of its attention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from accel.ir.axis import option
from accel.ir.tables import Rows, Sizes, Tables
from accel.runtime.kv.budget import Base
from accel.runtime.kv.budget._share import Share

_POINTS = 101  # shares of the tokens: 0, 0.01, … 1
_HALVINGS = 40


@dataclass(frozen=True)
class PrefixKV(Tables, Share, Base):
    """The tokens of a layer, sorted by the attention that they get, form a curve of cumulated attention. One height p
    holds for all layers: a layer keeps the shortest prefix whose curve reaches p, and p is such that all layers
    together keep the budget. `protected`: tokens that every layer keeps in addition, 4 sinks and the newest.

    The table holds what a layer keeps at every percent of the budget, a mean over rows. The release drops one token at
    a fixed place while it decodes; here `kv.when` says when the score chooses again.
    """

    key: ClassVar[str] = "prefixkv"
    protected: int = option(5, least=0)
    small: ClassVar[Mapping[str, Any]] = {"tokens_kept": 17}

    def sizes(self, width: int, heads: int) -> Sizes:
        """`kept`: the share of its tokens that the layer keeps where all layers keep 0, 0.01, … 1 of theirs."""
        return {"kept": (_POINTS,)}

    def tokens(self, seen: int, layer: int, layers: int, **table: Any) -> int:
        """See Base."""
        mean, kept = self.mean(seen), table.get("kept")
        if kept is None or mean >= seen or mean <= self.protected:
            return self.average(seen)
        room = seen - self.protected
        share = np.interp((mean - self.protected) / room, np.linspace(0, 1, _POINTS), kept)
        return min(seen, max(1, self.protected + round(float(share) * room)))

    def most(self, tokens: int, heads: int, **table: Any) -> int:
        """See Base."""
        return tokens

    def measure(self, rows: Iterable[Rows]) -> dict[int, dict[str, Any]]:
        """Of the whole rows."""
        found: Any = 0
        count, layers = 0, list[int]()
        for row in rows:
            layers = sorted(row.layers)
            for one in range(len(row.layers[layers[0]].keys)):
                curves = [curve(row.layers[i].weights()[one]) for i in layers]
                found, count = found + prefixes(curves), count + 1  # [L,N]
        return {i: {"kept": found[n] / count} for n, i in enumerate(layers)} if count else {}


def curve(probs: Any) -> Any:
    """The cumulated attention [T] of a row's tokens, those that get most first; of probabilities [G,R,T,T]."""
    total = probs.mean((0, 1)).sum(0)
    return (total / total.sum()).sort(descending=True).values.cumsum(0)


def prefixes(curves: list[Any]) -> Any:
    """The share of its tokens that each layer keeps [L,N], where the layers keep 0, 0.01, … 1 on average."""
    count = curves[0].shape[0]
    wanted = (curves[0].new_ones(_POINTS).cumsum(0) - 1) / (_POINTS - 1)
    low, high = wanted * 0, wanted * 0 + 1.001

    def lengths(height: Any) -> list[Any]:
        return [(c < height[:, None]).sum(1) / count for c in curves]

    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        over = sum(lengths(middle)) / len(curves) > wanted
        low, high = low.where(over, middle), middle.where(over, high)
    below, above = lengths(low), lengths(high)
    less, more = (sum(x) / len(curves) for x in (below, above))
    part = ((wanted - less) / (more - less).clamp(min=1e-9)).clamp(0, 1)
    both = [b + (a - b) * part for b, a in zip(below, above, strict=True)]
    return both[0].new_tensor([b.tolist() for b in both])
