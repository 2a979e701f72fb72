"""Functions that transformers' files of recurrent models call, and may take from a library of kernels: a short
convolution, the delta rule and Mamba-2, each over the tokens of one call. A file that has one under its name is
captured with these, whatever the model.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from accel.ir.ops.recurrence import causal_conv, linear_attention


def _conv(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """x [B,E,T], weight [E,K] -> [B,E,T]."""
    from transformers.activations import ACT2FN

    y: Tensor = causal_conv(hidden_states.transpose(1, 2), weight, bias, None, None)[0]
    y = y.transpose(1, 2)
    return y if activation is None else ACT2FN[activation](y)


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *_: Any,
    use_qk_l2norm_in_kernel: bool = False,
    **__: Any,
) -> tuple[Tensor, None]:
    """The gated delta rule (arXiv:2412.06464): q, k [B,T,G,K], v [B,T,H,V], g and beta [B,T,H] -> [B,T,H,V]. g may
    be [B,T,H,K], a decay for each channel of the keys (arXiv:2510.26692).
    """
    if use_qk_l2norm_in_kernel:
        query, key = unit(query), unit(key)
    query = query * query.shape[-1] ** -0.5
    return linear_attention(query, key, value, g, beta, None, None)[0], None


def unit(x: Tensor) -> Tensor:
    """Vectors of length 1."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def _ssd(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *_: Any,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **__: Any,
) -> Tensor:
    """Mamba-2 (arXiv:2405.21060): x [B,T,H,D], dt [B,T,H], A [H], B and C [B,T,G,N] -> [B,T,H,D]."""
    dt = dt if dt_bias is None else dt + dt_bias
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(dt_limit[0], dt_limit[1])
    y: Tensor = linear_attention(C, B, hidden_states * dt.unsqueeze(-1), A * dt, None, None, None)[
        0
    ]
    return y if D is None else y + hidden_states * D.unsqueeze(-1)


FUNCTIONS = {
    "chunk_kimi_delta_attention": _delta_rule,
    "causal_conv1d_fn": _conv,
    "mamba2_chunk_scan": _ssd,
    "torch_chunk_gated_delta_rule": _delta_rule,
}
