"""PHD-Transformer: attention to the first copies, which are cached, merged with attention to a token's own copies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accel.ir.ops.attention import attention


def _copies(self: Any, q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor) -> Tensor:
    scale, places = q.shape[3] ** -0.5, torch.arange(q.shape[2])[None]
    whole = (q, k, v, places, places, None, scale, 0.0, "causal", 0)
    asked, others = q.shape[1] // self.heads, own_k.shape[2]
    if not others:
        return attention(*whole)  # type: ignore[no-any-return]
    grouped = q.unflatten(1, (k.shape[1], -1, asked)).transpose(3, 4)  # [B,G,R,T,J,D]
    keys, values = (x.transpose(2, 3)[:, :, None] for x in (own_k, own_v))  # [B,G,1,T,K-1,D]
    hidden = torch.ones(asked, others, dtype=torch.bool).triu(1 + others - asked)
    scores = (grouped @ keys.transpose(-1, -2) * scale).masked_fill(
        hidden, torch.finfo(q.dtype).min
    )
    own, lse = scores.softmax(-1) @ values, scores.logsumexp(-1)
    own, lse = (x.transpose(3, 4).flatten(1, 3) for x in (own, lse[..., None]))
    return attention(*whole, beside=own, beside_lse=lse[..., 0])  # type: ignore[no-any-return]


FORMS = {"CopiesAttention": _copies}
