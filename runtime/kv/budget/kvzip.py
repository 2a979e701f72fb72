"""KVzip's budget (arXiv:2505.23416): the heads of all layers share one budget according to their scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from accel.runtime.kv.budget import Base
from accel.runtime.kv.budget._ranks import ranks
from accel.runtime.kv.budget._share import Share


@dataclass(frozen=True)
class KVzip(Share, Base):
    """The highest scores of a row stay, whatever their layer and head. Scores must be comparable across layers, as
    attention is and norms are not.
    """

    small: ClassVar[Mapping[str, Any]] = {"tokens_kept": 17}

    def tokens(self, seen: int, layer: int, layers: int) -> int:
        return self.average(seen)

    def most(self, tokens: int, heads: int) -> int:
        return 1 << 40

    def across(self, scores: list[Any], keep: Any, positions: list[Any]) -> list[Any]:
        """See Base."""
        flat = [s.flatten(1) for s in scores]
        places = ranks(_joined(flat), _joined([p.flatten(1) for p in positions]))
        heads = sum(s.shape[1] for s in scores)
        stays, found, start = places < (keep * heads)[:, None], [], 0
        for score, one in zip(scores, flat, strict=True):
            here = stays.narrow(1, start, one.shape[1])
            found.append(here.unflatten(1, (score.shape[1], score.shape[2])).sum(2))
            start = start + one.shape[1]
        return found


def _joined(rows: list[Any]) -> Any:
    """Side by side."""
    import torch  # only where a graph is built

    return torch.cat(rows, dim=1)
