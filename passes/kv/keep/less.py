"""LESS (arXiv:2402.09398): evicted tokens enter a low-rank state, which trained maps of keys and queries write and
read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from accel.ir.axis import option
from accel.passes.kv.keep import Absorbed, Base
from accel.passes.trained import Trained

_LEAST = torch.finfo(torch.float32).min
_FLOOR = 1e-6  # of the sum of weights


@dataclass(frozen=True)
class Less(Trained, Base):
    """`rank`: numbers that a key and a query are mapped to, R. The state is the sums over evicted tokens of psi(key)
    [R] and of psi(key) value [R,D]; a query weighs them by phi(query), in one softmax with the tokens that stay. So a
    head has R (D + 1) numbers, however many tokens went.

    The maps are trained per layer; those of keys per KV head, those of queries per query head.

    In training a row is cut and each head keeps some of its tokens; the maps learn to take away the error that
    dropping the others leaves behind the output projection.
    """

    rank: int = option(8, least=1, most=256)

    key: ClassVar[str] = "less"
    merges: ClassVar[bool] = False
    absorbs: ClassVar[bool] = True

    def __call__(self, values: Tensor, chosen: Tensor) -> Tensor:
        return values.gather(2, chosen[..., None].expand(-1, -1, -1, values.shape[3]))

    def absorbed(self, width: int, value_width: int) -> Absorbed:
        return {"sums": (self.rank, value_width + 1)}

    def sizes(self, width: int, heads: int) -> dict[str, tuple[int, ...]]:
        return {
            "q1": (-1, -1, -1),
            "q2": (-1, -1, self.rank),
            "k1": (heads, -1, -1),
            "k2": (heads, -1, self.rank),
            "k3": (heads, self.rank, self.rank),
            "s1": (heads, self.rank),
            "s2": (heads, self.rank),
        }

    def absorb(
        self,
        sums: Tensor,
        keys: Tensor,
        values: Tensor,
        gone: Tensor,
        k1: Tensor,
        k2: Tensor,
        k3: Tensor,
        s1: Tensor,
        s2: Tensor,
    ) -> dict[str, Tensor]:
        """A token with a number that is not finite leaves nothing."""
        weights = psi(keys.float(), k1, k2, k3, s1, s2)  # [B,G,S,R]
        rows = torch.cat((values.float(), torch.ones_like(values[..., :1])), dim=3)
        fine = gone & weights.sum(3).isfinite() & rows.sum(3).isfinite()
        weights = torch.where(fine[..., None], weights, 0.0)
        rows = torch.where(fine[..., None], rows, 0.0)
        return {"sums": sums + weights.transpose(2, 3) @ rows}

    def read(self, queries: Tensor, sums: Tensor, q1: Tensor, q2: Tensor) -> tuple[Tensor, Tensor]:
        weights = phi(queries.float(), q1, q2)  # [B,H,T,R]
        repeat = queries.shape[1] // sums.shape[1]
        found = weights @ sums.repeat_interleave(repeat, dim=1)  # [B,H,T,D+1]
        total = found[..., -1].clamp(min=_FLOOR)
        some = (sums[..., -1].sum(2) > 0).repeat_interleave(repeat, dim=1)  # [B,H]
        lse = torch.where(some[..., None], total.log(), _LEAST)
        return found[..., :-1] / total[..., None], lse

    # Training (api/compiler/train): each layer by itself

    def start(
        self, shape: Mapping[str, int], inner: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Maps that weigh all tokens alike, little. shape: `heads` of queries, `groups` of keys, `width` of both."""
        heads, groups, width = (shape[n] for n in ("heads", "groups", "width"))

        def randn(*size: int) -> Tensor:
            return torch.randn(size, generator=generator) / math.sqrt(size[-2])

        return {
            "q1": randn(heads, width, inner),
            "q2": randn(heads, inner, self.rank),
            "k1": randn(groups, width, inner),
            "k2": randn(groups, inner, self.rank),
            "k3": randn(groups, self.rank, self.rank),
            "s1": torch.full((groups, self.rank), 1e-2),
            "s2": torch.full((groups, self.rank), 1e-2),
        }


def phi(queries: Tensor, q1: Tensor, q2: Tensor) -> Tensor:
    """[B,H,T,D] -> weights [B,H,T,R], 0 at least."""
    return torch.abs(F.gelu(F.gelu(queries @ q1) @ q2))


def psi(keys: Tensor, k1: Tensor, k2: Tensor, k3: Tensor, s1: Tensor, s2: Tensor) -> Tensor:
    """[B,G,S,D] -> weights [B,G,S,R], 0 at least."""
    first = s1.abs()[:, None] * F.gelu(F.gelu(keys @ k1) @ k2)
    return torch.abs(first + (first @ k3) * s2[:, None])
