"""DFlash (arXiv:2602.06036): layers that draft a block in one call, over keys of what the target computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel.ir.capture.arch.features import StandIns
from accel.ir.capture.arch.own_vocabulary import OwnVocabulary
from accel.ir.draft_head import DraftHead

Inner = Callable[[Tensor], Tensor]  # what a layer has within its norms
TEXT = 0.5  # what the last feature of a token of the text is above, and that of a block's below


@dataclass(frozen=True)
class Scales:
    """What embeddings and logits are multiplied by, and the number that logits stay below; 0: none."""

    embedding: float = 1.0
    logits: float = 1.0
    softcap: float = 0.0


@dataclass(frozen=True)
class DFlashConfig:
    """`layers`: the configuration of the head's layers, of transformers' Qwen3. taps: names of the target's outputs,
    each as wide as a layer. block: tokens of a block, the first of which is text; mask: what the others hold. causal:
    the layers where a token of a block sees none behind it. anchored: each token of a block says the next one.
    own_head: it has an output head, of `draft_vocabulary` tokens (None: all), else it is given the target's.
    own_embedding: it has an embedding, else calls give the target's.
    """

    layers: Any
    taps: tuple[str, ...]
    block: int
    mask: int
    causal: tuple[int, ...] = ()
    anchored: bool = False
    own_head: bool = False
    draft_vocabulary: int | None = None
    scales: Scales = Scales()
    own_embedding: bool = False

    @property
    def head(self) -> DraftHead:
        """What its sessions take and give: features end with a 1, and those of a block's tokens with 0 or less."""
        width = self.layers.hidden_size
        return DraftHead(
            "dflash",
            self.taps,
            width + 1,
            width * len(self.taps),
            0 if self.own_embedding else width,
            block=self.block,
            mask=self.mask,
            causal=self.causal,
            anchored=self.anchored,
        )


class DFlash(nn.Module):
    """tokens [B,T], positions [B,T] -> logits [B,T,V] of the token itself, where it is of a block, or of the next
    (`anchored`). Keys and values of text are those of features, in all layers.
    """

    def __init__(self, config: DFlashConfig):
        super().__init__()
        from transformers import AutoModel

        c, layers = config, config.layers
        self.draft_head, self.scales = c.head, c.scales
        width = layers.hidden_size
        inner = AutoModel.from_config(layers)
        self.layers, self.rotary, self.norm = inner.layers, inner.rotary_emb, inner.norm
        self.heads = layers.num_attention_heads, layers.num_key_value_heads
        sliding = [kind == "sliding_attention" for kind in layers.layer_types]
        self.windows = [layers.sliding_window if one else 0 for one in sliding]
        self.embed_tokens = nn.Embedding(layers.vocab_size, width) if c.own_embedding else None
        self.stand_ins = StandIns(self.draft_head, self.draft_head.embedding)
        self.fc = nn.Linear(width * len(c.taps), width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, layers.rms_norm_eps)
        self.words = OwnVocabulary(layers.vocab_size, c.draft_vocabulary)
        device = None if c.own_head else "meta"
        self.lm_head = nn.Linear(width, self.words.count, bias=False, device=device)

    def fuse(self, taps: Tensor) -> Tensor:
        """The features [B,T,W] of taps [B,T,F]."""
        c = self.hidden_norm(self.fc(taps))
        one = (c[..., :1].abs() >= 0).to(c.dtype)  # of taps: the entry `fuse` has no other input
        return torch.cat([c, one], dim=-1)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.said(self.last(tokens, positions))

    def last(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The hidden states [B,T,H] that the output head reads."""
        x, h = self.stand_ins(tokens, self.fuse)
        if self.embed_tokens is not None:
            x = self.embed_tokens(tokens)
        text, c = h[..., -1:] > TEXT, h[..., :-1]
        if self.scales.embedding != 1:
            x = x * self.scales.embedding
        turns, near = self.rotary(x, positions), self.near(h[..., -1:])
        for layer, window in zip(self.layers, self.windows, strict=True):
            mixes = partial(self._attention, layer, c, text, turns, window)
            x = x + self.around("attention", layer, layer.input_layernorm(x), mixes, near)
            x = x + self.around("mlp", layer, layer.post_attention_layernorm(x), layer.mlp, near)
        out: Tensor = self.norm(x)
        return out

    def near(self, last: Tensor) -> Tensor | None:
        """What `around` reads of the last features [B,T,1]."""
        return None

    def around(self, name: str, layer: Any, z: Tensor, inner: Inner, near: Tensor | None) -> Tensor:
        """What a layer's attention or feed-forward network, `name`, makes of its normed input [B,T,H]."""
        return inner(z)

    def said(self, x: Tensor) -> Tensor:
        """The logits [B,T,V] of the last hidden states."""
        logits: Tensor = self.lm_head(x)
        if self.scales.logits != 1:
            logits = logits * self.scales.logits
        if cap := self.scales.softcap:
            logits = torch.tanh(logits / cap) * cap
        out: Tensor = self.words(logits)
        return out

    def _attention(
        self, layer: Any, c: Tensor, text: Tensor, turns: Any, window: int, z: Tensor
    ) -> Tensor:
        """Of queries from z [B,T,H], keys and values from it, too, or of text from c; of the newest `window` tokens, 0:
        of all.
        """
        from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

        own, (heads, groups) = layer.self_attn, self.heads
        source = torch.where(text, c, z)
        q = own.q_norm(own.q_proj(z).unflatten(-1, (heads, -1)))
        k = own.k_norm(own.k_proj(source).unflatten(-1, (groups, -1)))
        v = own.v_proj(source).unflatten(-1, (groups, -1))
        q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), *turns)
        seen = None
        if window:
            place = torch.arange(z.shape[1])
            back = place[:, None] - place
            seen = (back >= 0) & (back < window)
        mixed = F.scaled_dot_product_attention(
            q,
            k,
            v.transpose(1, 2),
            attn_mask=seen,
            is_causal=seen is None,
            scale=own.scaling,
            enable_gqa=True,
        )
        found: Tensor = own.o_proj(mixed.transpose(1, 2).flatten(2))
        return found
