"""PHD-Transformer (arXiv:2504.14992): every token is read several times, and the first copy's keys and values alone
are cached.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel.ir.capture.arch.cla import Cla, ClaConfig, ClaLayer, turned


class CopiesAttention(nn.Module):
    """What copy j of token n attends to: the first copies of tokens up to n, and its own token's copies up to j."""

    def __init__(self, heads: int):
        super().__init__()
        self.heads = heads

    def forward(self, q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor) -> Tensor:
        """q [B,G R J,T,D] of the last J copies, copies innermost; k, v [B,G,T,D] of the first copies, own_k, own_v
        [B,G,K-1,T,D] of the others -> [B,G R J,T,D].
        """
        asked, copies, size = q.shape[1] // self.heads, own_k.shape[2] + 1, q.shape[2]
        grouped = q.unflatten(1, (k.shape[1], -1, asked))
        keys, values = torch.cat((k[:, :, None], own_k), 2), torch.cat((v[:, :, None], own_v), 2)
        scores = torch.einsum("bgrjnd,bgimd->bgrjnim", grouped, keys) * q.shape[3] ** -0.5
        copy, place = torch.arange(copies), torch.arange(size)
        j, n, i, m = copy[-asked:, None, None, None], place[:, None, None], copy[:, None], place
        hidden = ~((i == 0) & (m <= n) | (m == n) & (i <= j))
        shares = scores.masked_fill(hidden, -torch.inf).flatten(5).softmax(-1)
        mixed = torch.einsum("bgrjnx,bgxd->bgrjnd", shares, values.flatten(2, 3))
        return mixed.flatten(1, 3)


class Phd(nn.Module):
    """tokens [B,T] -> logits [B,T,V] of the last copies. Each token goes `copies` times through `plain`, all at its
    position; with one copy it is `plain`.

    All copies go through a layer together, so a call reads the weights once. `apart`: the first copies go through all
    layers, then the others. So a prompt, of which nobody reads the others but those of its last token, may take the
    first copies alone (`prefill.prune = yoco` with `layers` = 0); a call reads the weights twice.
    """

    def __init__(self, config: ClaConfig, copies: int, apart: bool = False):
        super().__init__()
        if copies < 1 or config.factor != 1:
            raise ValueError(
                f"copies {copies} must be 1 or more, and factor {config.factor} 1: each layer has its own keys and "
                "values"
            )
        self.copies, self.apart = copies, apart and copies > 1
        self.plain, self.attention = Cla(config), CopiesAttention(config.num_attention_heads)

    def forward(self, tokens: Tensor) -> Tensor:
        plain = self.plain
        first = plain.embed(tokens)
        angles = torch.arange(tokens.shape[1])[:, None] * plain.speed
        layers = list(cast("Iterable[ClaLayer]", plain.layers))
        known: list[tuple[Tensor, Tensor] | None] = [None] * len(layers)
        x = first[:, :, None].expand(-1, -1, self.copies - self.apart, -1)
        if self.apart:
            for index, layer in enumerate(layers):
                first, known[index] = layer(first, angles, None)
        for layer, shared in zip(layers, known, strict=True):
            x = self._layer(layer, x, angles, shared)
        return F.linear(plain.norm(x[:, :, -1]), plain.embed.weight)

    def _layer(
        self, layer: ClaLayer, x: Tensor, angles: Tensor, shared: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """x [B,T,J,E] of the last J copies, angles [T,D/2], keys and values [B,G,T,D] of the first copies where these
        are not among them -> x.
        """
        h, groups = layer.before(x), layer.groups
        q = layer.q(h).unflatten(-1, (groups, -1, layer.size))  # [B,T,J,G,R,D]
        q = turned(q.permute(0, 3, 4, 2, 1, 5).flatten(1, 3), angles)
        k, v = (
            project(h).unflatten(-1, (groups, -1)).permute(0, 3, 2, 1, 4) for project in layer.kv
        )  # [B,G,J,T,D]
        if shared is None:
            shared = turned(k[:, :, 0], angles), v[:, :, 0]
            k, v = k[:, :, 1:], v[:, :, 1:]
        own = turned(k.flatten(1, 2), angles).unflatten(1, (groups, -1))
        mixed = self.attention(q, *shared, own, v)
        mixed = mixed.unflatten(1, (-1, x.shape[2])).permute(0, 3, 2, 1, 4).flatten(3)
        x = x + layer.out(mixed)
        h = layer.between(x)
        after: Tensor = x + layer.down(F.silu(layer.gate(h)) * layer.up(h))
        return after
