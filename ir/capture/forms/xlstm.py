"""xLSTM (arXiv:2405.04517): a matrix memory with exponential gates, kept in range by a running peak."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.ir.ops.recurrence import linear_attention, running_peak


def _mlstm(
    self: Any, query: Tensor, key: Tensor, value: Tensor, igate: Tensor, fgate: Tensor, **_: Any
) -> tuple[Tensor, tuple[()]]:
    """q, k, v [B,H,T,D] and gates [B,H,T] -> [B,H,T,D]: the memory read out, over its own weight."""
    q, k, v, opened = (z.transpose(1, 2) for z in (query, key, value, igate))
    kept = F.logsigmoid(fgate.transpose(1, 2))
    peak, before, _after = running_peak(opened, kept, None, None)  # [B,T,H]
    k = k * torch.exp(opened - peak).unsqueeze(-1)
    v = torch.cat((v, torch.ones_like(v[..., :1])), dim=-1)  # the last column sums the weights
    q = q * q.shape[-1] ** -0.5
    y = linear_attention(q, k, v, kept + before - peak, None, None, None)[0]
    weight = torch.maximum(y[..., -1:].abs(), torch.exp(-peak).unsqueeze(-1))
    return (y[..., :-1] / (weight + self.config.eps)).transpose(1, 2), ()


def _model(self: Any, input_ids: Tensor, *_: Any, **__: Any) -> tuple[Tensor]:
    """All tokens in one go: the session cuts long calls."""
    hidden = self.embeddings(input_ids)
    for block in self.blocks:
        hidden, _state = block(hidden, None)
    return (self.out_norm(hidden),)


def _logits(self: Any, input_ids: Tensor, *_: Any, **__: Any) -> tuple[Tensor]:
    logits = self.lm_head(_model(self.backbone, input_ids)[0])
    cap = self.config.output_logit_soft_cap
    return (logits if cap is None else cap * torch.tanh(logits / cap),)


FORMS = {"xLSTMBackend": _mlstm, "xLSTMForCausalLM": _logits}
