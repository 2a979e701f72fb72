"""How far a draft model's distribution is from its target's: what a draft model learns to make small."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Divergence = Callable[[Tensor, Tensor, float], Tensor]  # of logits p, q [N,V] and beta: [N]


def forward_kl(p: Tensor, q: Tensor, beta: float) -> Tensor:
    """KL(p, q): q covers what p says."""
    return _kl(p.log_softmax(-1), q.log_softmax(-1))


def reverse_kl(p: Tensor, q: Tensor, beta: float) -> Tensor:
    """KL(q, p): q says only what p says, too."""
    return _kl(q.log_softmax(-1), p.log_softmax(-1))


def jsd(p: Tensor, q: Tensor, beta: float) -> Tensor:
    """beta KL(p, m) + (1 - beta) KL(q, m), where m = beta p + (1 - beta) q."""
    p, q = p.log_softmax(-1), q.log_softmax(-1)
    shares = p.new_tensor([beta, 1 - beta]).log()
    m = torch.logaddexp(p + shares[0], q + shares[1])
    return beta * _kl(p, m) + (1 - beta) * _kl(q, m)


def tvd(p: Tensor, q: Tensor, beta: float) -> Tensor:
    """The total variation: the chance that a token drawn from q falls."""
    return (p.softmax(-1) - q.softmax(-1)).abs().sum(-1) / 2


DIVERGENCES: Mapping[str, Divergence] = {
    "forward-kl": forward_kl, "reverse-kl": reverse_kl, "jsd": jsd, "tvd": tvd
}  # fmt: skip


def stands(p: Tensor, q: Tensor) -> Tensor:
    """The chance [N] that a token drawn from the draft model stands, of logits [N,V]: the sum of min(p, q)."""
    return torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Of log-probabilities."""
    return (p.exp() * (p - q)).sum(-1)
