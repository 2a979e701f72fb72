"""DFlash (arXiv:2602.06036): layers that draft a block in one call, over keys of what the target computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel.ir.capture.arch.features import StandIns
from accel.ir.draft_head import DraftHead


@dataclass(frozen=True)
class DFlashConfig:
    """`layers`: the configuration of the head's layers, of transformers' Qwen3. taps: names of the target's outputs,
    each as wide as a layer. block: tokens of a block, the first of which is text; mask: what the others hold.
    """

    layers: Any
    taps: tuple[str, ...]
    block: int
    mask: int

    @property
    def head(self) -> DraftHead:
        """What its sessions take and give: features end with a 1, which rows of a block lack."""
        width = self.layers.hidden_size
        all_taps = width * len(self.taps)
        return DraftHead(
            "dflash", self.taps, width + 1, all_taps, width, block=self.block, mask=self.mask
        )


class DFlash(nn.Module):
    """tokens [B,T], positions [B,T] -> logits [B,T,V] of the token itself, where it is of a block. Keys and values of
    text are those of features, in all layers.
    """

    def __init__(self, config: DFlashConfig):
        super().__init__()
        from transformers import AutoModel

        c, layers = config, config.layers
        self.draft_head = c.head
        width = layers.hidden_size
        inner = AutoModel.from_config(layers)
        self.layers, self.rotary, self.norm = inner.layers, inner.rotary_emb, inner.norm
        self.heads = layers.num_attention_heads, layers.num_key_value_heads
        self.stand_ins = StandIns(self.draft_head, width)
        self.fc = nn.Linear(width * len(c.taps), width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, layers.rms_norm_eps)
        self.lm_head = nn.Linear(width, layers.vocab_size, bias=False, device="meta")

    def fuse(self, taps: Tensor) -> Tensor:
        """The features [B,T,W] of taps [B,T,F]."""
        c = self.hidden_norm(self.fc(taps))
        one = (c[..., :1].abs() >= 0).to(c.dtype)  # of taps: the entry `fuse` has no other input
        return torch.cat([c, one], dim=-1)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x, h = self.stand_ins(tokens, self.fuse)
        text, c = h[..., -1:] > 0.5, h[..., :-1]
        turns = self.rotary(x, positions)
        for layer in self.layers:
            x = x + self._attention(layer, x, torch.where(text, c, layer.input_layernorm(x)), turns)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        out: Tensor = self.lm_head(self.norm(x))
        return out

    def _attention(self, layer: Any, x: Tensor, source: Tensor, turns: Any) -> Tensor:
        """Of queries from x, keys and values from `source` [B,T,H]."""
        from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

        own, (heads, groups) = layer.self_attn, self.heads
        q = own.q_norm(own.q_proj(layer.input_layernorm(x)).unflatten(-1, (heads, -1)))
        k = own.k_norm(own.k_proj(source).unflatten(-1, (groups, -1)))
        v = own.v_proj(source).unflatten(-1, (groups, -1))
        q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), *turns)
        mixed = F.scaled_dot_product_attention(
            q, k, v.transpose(1, 2), is_causal=True, scale=own.scaling, enable_gqa=True
        )
        found: Tensor = own.o_proj(mixed.transpose(1, 2).flatten(2))
        return found
