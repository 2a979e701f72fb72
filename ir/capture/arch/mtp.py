"""Next-token layers of a checkpoint (multi-token prediction, arXiv:2412.19437), as transformers has them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from accel.ir.capture.arch.features import StandIns
from accel.ir.draft_head import DraftHead
from accel.ir.taps import FINAL


class Mtp(nn.Module):
    """tokens [B,T], positions [B,T] -> logits and features of the next token [B,T,V+W]: one layer over the embedding of
    a token, which the target has, and what its output head read for the one before.

    layers: `transformers.modeling_layers.MtpModel`, of which the first layer drafts; it has no embedding.
    """

    def __init__(self, layers: Any):
        super().__init__()
        width = layers.config.hidden_size
        self.draft_head = DraftHead("mtp", (FINAL,), width, width, width, fused=False)
        self.stand_ins = StandIns(self.draft_head, width)
        self.layers = layers

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        e, h = self.stand_ins(tokens)
        turns = self.layers.rotary_emb(e, positions)
        y = self.layers.layers[0](e, h, turns, None, positions, None)
        if self.layers.use_shared_post_norm:
            y = self.layers.shared_post_norm(y)
        return torch.cat([self.layers._project_to_logits(y), y], dim=-1)
