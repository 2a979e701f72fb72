"""CapKV (arXiv:2604.25975): the leverage of a value among all, weighted by how its key suits the queries to come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from accel.ir.axis import option
from accel.passes.kv.score import Base
from accel.passes.kv.score._leverage import finite, leverage

_LEAST = 1e-6  # of a weight in the matrix


@dataclass(frozen=True)
class CapKV(Base):
    """w_i v_i^T A^-1 v_i, A = I + sum_i w_i v_i v_i^T, a mean over the heads of a group. w_i = exp(`tau` c_i), divided
    by the largest of the head; c_i: cosine of key i and the mean of the queries so far without the `sinks`, under the
    mean rotation over the next `future` positions. The first `sinks` tokens are kept.

    This is the release (in kvpress): the paper has a plain product in place of the cosine, and no mean rotation.
    """

    tau: float = option(5.0, least=0, most=10000)
    future: int = option(512, least=1, most=1 << 16)
    sinks: int = option(4, least=0)
    small: ClassVar[Mapping[str, Any]] = {"future": 8, "sinks": 2}

    def __call__(
        self, query_mean: Tensor, keys: Tensor, values: Tensor, positions: Tensor
    ) -> Tensor:
        groups = keys.shape[1]
        real = finite(positions >= self.sinks, keys, values)
        k, v = (x.float().masked_fill(~real[..., None], 0)[:, :, None] for x in (keys, values))
        anchor = normalize(query_mean, dim=-1).unflatten(1, (groups, -1))[..., None]
        logits = self.tau * (normalize(k, dim=-1) @ anchor)[..., 0]  # [B,G,R,S]
        logits = logits.masked_fill(~real[:, :, None], torch.finfo(torch.float32).min)
        weights = (logits - logits.amax(-1, keepdim=True)).exp()
        added = weights + _LEAST
        found = leverage(v * added.sqrt()[..., None], 1.0)
        scores: Tensor = (found * weights / added).mean(2)
        scores = scores.masked_fill(positions < self.sinks, 0)
        return scores.masked_fill((positions >= self.sinks) & ~real, float("nan"))
