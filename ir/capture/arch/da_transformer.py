"""DA-Transformer (arXiv:2205.07459): an encoder-decoder whose decoder gives a graph of tokens in one call."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class DaTransformerConfig:
    """Sizes of a model, and the names under which capture looks for them. Transitions have `transition_heads` heads of
    `transition_size`; a source of n tokens has n `upsample_scale` vertices.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    encoder_layers: int
    decoder_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    transition_heads: int
    transition_size: int
    upsample_scale: float = 8.0
    decoder_start_token_id: int = 0
    pad_token_id: int = 1
    eos_token_id: int = 2
    mask_token_id: int = 3  # of a vertex between the first and the last
    is_encoder_decoder: bool = True

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads or self.transition_heads < 1:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be a multiple of {self.num_attention_heads} heads, and "
                f"transition_heads {self.transition_heads} 1 or more"
            )


class Attention(nn.Module):
    """Of all tokens to all that are in sight."""

    def __init__(self, config: DaTransformerConfig):
        super().__init__()
        size = config.hidden_size
        self.heads = config.num_attention_heads
        self.q, self.k, self.v, self.out = (nn.Linear(size, size) for _ in "qkvo")

    def forward(self, x: Tensor, read: Tensor, seen: Tensor | None = None) -> Tensor:
        """x [B,T,E] reads [B,X,E], of which those are `seen` [B,1,1,X] (None: all)."""
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in (self.q(x), self.k(read), self.v(read))
        )
        mask = None if seen is None else seen.expand(-1, 1, x.shape[1], -1)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Layer(nn.Module):
    """A post-norm layer, as in fairseq; with `crosses` it also reads the encoder."""

    def __init__(self, config: DaTransformerConfig, crosses: bool):
        super().__init__()
        size = config.hidden_size
        self.attention, self.norm = Attention(config), nn.LayerNorm(size)
        self.cross = nn.ModuleList([Attention(config), nn.LayerNorm(size)] if crosses else [])
        self.up = nn.Linear(size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, size)
        self.last = nn.LayerNorm(size)

    def forward(
        self,
        x: Tensor,
        seen: Tensor | None,
        read: Tensor | None = None,
        theirs: Tensor | None = None,
    ) -> Tensor:
        """x [B,T,E]; which of it is `seen`; the encoder's vectors [B,X,E], and which of these are."""
        x = self.norm(x + self.attention(x, x, seen))
        if read is not None:
            attention, norm = self.cross
            x = norm(x + attention(x, read, theirs))
        out: Tensor = self.last(x + self.down(self.up(x).relu()))
        return out


class Stack(nn.Module):
    """Embeddings with learnt places, and layers."""

    def __init__(
        self, config: DaTransformerConfig, tokens: nn.Embedding, layers: int, crosses: bool
    ):
        super().__init__()
        self.embed_tokens, self.scale = tokens, math.sqrt(config.hidden_size)
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, crosses) for _ in range(layers))

    def forward(
        self,
        ids: Tensor,
        seen: Tensor | None,
        read: Tensor | None = None,
        theirs: Tensor | None = None,
    ) -> Tensor:
        """ids [B,T] -> [B,T,E]."""
        places = torch.arange(ids.shape[1])
        x: Tensor = self.embed_tokens(ids) * self.scale + self.embed_positions(places)
        for layer in self.layers:
            x = layer(x, seen, read, theirs)
        return x


class DaTransformer(nn.Module):
    """Source tokens [B,X] and vertices [B,P] -> [B,P,V + heads (2 size + 1)]: logits of each vertex (head tied), then
    the queries, keys and gates of its transitions, each over the vertex' vector and a learnt one of its place.
    """

    main_input_name = "input_ids"

    def __init__(self, config: DaTransformerConfig):
        super().__init__()
        self.config = config
        size, heads = config.hidden_size, config.transition_heads
        tokens = nn.Embedding(config.vocab_size, size)
        self.encoder = Stack(config, tokens, config.encoder_layers, crosses=False)
        self.decoder = Stack(config, tokens, config.decoder_layers, crosses=True)
        self.link_positions = nn.Embedding(config.max_position_embeddings, size)
        self.query, self.key = (
            nn.Linear(2 * size, heads * config.transition_size) for _ in range(2)
        )
        self.gate = nn.Linear(2 * size, heads)

    def get_encoder(self) -> Stack:
        """The encoder, whose `embed_tokens` says how many token ids it takes."""
        return self.encoder

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        decoder_input_ids: Tensor,
        use_cache: bool = False,
    ) -> Tensor:
        seen = (attention_mask > 0)[:, None, None, :]
        read = self.encoder(input_ids, seen)
        x = self.decoder(decoder_input_ids, None, read, seen)
        places = self.link_positions(torch.arange(x.shape[1])).expand(x.shape[0], -1, -1)
        linked = torch.cat([x, places], dim=-1)
        logits = F.linear(x, self.decoder.embed_tokens.weight)
        return torch.cat([logits, self.query(linked), self.key(linked), self.gate(linked)], dim=-1)
