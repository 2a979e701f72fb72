"""SubGen (arXiv:2402.06082), its experiments: keep the keys that are the centres of a greedy k-centre choice, and the
newest tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from accel.ir.axis import option
from accel.ir.ops.centres import farthest_first
from accel.passes.kv.score import Base


@dataclass(frozen=True)
class KCentre(Base):
    """The first key is a centre; the next one is, each time, the key that is farthest from its nearest centre. The
    score is the order in which keys are taken. `recent`: newest tokens that are kept.

    It takes one pass over the keys of a head per token that stays: O(S keep D).
    """

    recent: int = option(32, least=0, most=1 << 20)

    small = {"recent": 2}

    def __call__(self, keys: Tensor, positions: Tensor, keep: Tensor) -> Tensor:
        nearest = torch.full_like(keys[..., 0], torch.inf)
        found: Tensor = farthest_first(keys.float(), positions >= 0, nearest, keep.amax())
        return found
