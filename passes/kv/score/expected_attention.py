"""Expected Attention (arXiv:2510.00636): the attention that queries to come would pay, if they are Gaussian."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from numpy.polynomial.hermite_e import hermegauss
from torch import Tensor

from accel.ir.axis import option
from accel.ir.ops.attention import Form
from accel.passes.kv.score import Base
from accel.passes.kv.score._leverage import finite

_NODES = 16  # of the quadrature


@dataclass(frozen=True)
class ExpectedAttention(Base):
    """softmax over keys of scale k^T mu + scale^2 k^T Sigma k / 2, a mean over the heads of a group, plus `epsilon`,
    times the norm of the value. Where a model caps its scores, the logarithm of the mean of exp(capped score) instead.
    mu, Sigma: of all queries so far without the `sinks`, under the mean rotation over the
    next `future` positions. The first `sinks` tokens are kept.

    The paper sets `epsilon` to 0.02 (0 for needle tests) and splits the budget between heads: see `ada-kv`. While it
    decodes, it takes statistics of the last 128 tokens alone.
    """

    future: int = option(512, least=1, most=1 << 16)
    sinks: int = option(4, least=0)
    epsilon: float = option(0.0, least=0)
    small: ClassVar[Mapping[str, Any]] = {"future": 8, "sinks": 2}

    def __call__(
        self,
        query_mean: Tensor,
        query_covariance: Tensor,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        form: Form,
    ) -> Tensor:
        groups = keys.shape[1]
        real = finite(positions >= self.sinks, keys, values)
        k = keys.float().masked_fill(~real[..., None], 0)[:, :, None]  # [B,G,1,S,D]
        mean = query_mean.unflatten(1, (groups, -1))[..., None]  # [B,G,R,D,1]
        covariance = query_covariance.unflatten(1, (groups, -1))
        logits = expected(form, (k @ mean)[..., 0], ((k @ covariance) * k).sum(-1))
        logits = logits.masked_fill(~real[:, :, None], torch.finfo(torch.float32).min)
        attention = form.shares(logits).mean(2)
        scores: Tensor = (attention + self.epsilon) * values.float().norm(dim=-1)
        scores = scores.masked_fill(positions < self.sinks, 0)
        return scores.masked_fill((positions >= self.sinks) & ~real, float("nan"))


def expected(form: Form, mean: Tensor, variance: Tensor) -> Tensor:
    """log E[exp(score)] of products of queries and keys that are Gaussian, of any shape."""
    if not form.softcap:
        return form.scale * mean + form.scale**2 / 2 * variance
    deviation = variance.clamp(min=0).sqrt()
    nodes, weights = hermegauss(_NODES)
    total = math.log(float(weights.sum()))
    return torch.stack(
        [
            form.logits(mean + float(x) * deviation) + (math.log(float(w)) - total)
            for x, w in zip(nodes, weights, strict=True)
        ]
    ).logsumexp(0)
