"""DFlash2, a later form of DFlash (arXiv:2602.06036): its layers with convolutions over the block, and a selector that
walks over it: of the likeliest tokens of a place, the token before changes which is taken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel.ir.capture.arch.dflash import TEXT, DFlash, DFlashConfig, Inner
from accel.ir.capture.arch.walk import WalkStandIns
from accel.ir.draft_head import DraftHead


@dataclass(frozen=True)
class DFlash2Config(DFlashConfig):
    """kernel: tokens that a convolution reads, of which the last is the token's own. group: neighbouring numbers of a
    state, whose part of a kernel that goes by the input is the same. rank: of the product that the selector adds to
    logits. candidates: how many tokens of a place it chooses from.
    """

    kernel: int = 2
    group: int = 1
    rank: int = 1
    candidates: int = 1

    @property
    def head(self) -> DraftHead:
        """See DFlashConfig."""
        return replace(
            super().head,
            drafter="dflash2",
            markov=True,
            hidden=self.rank,
            candidates=self.candidates,
        )


class Convolution(nn.Module):
    """Two of them, of each number of states by itself: before and behind a part of a layer. Both have a kernel that
    lies in the weights, and another that goes by the part's normed input, for each group of numbers one.
    """

    def __init__(self, width: int, kernel: int, group: int):
        super().__init__()
        self.sizes = 2, kernel, width // group
        self.group = group
        self.base_kernel = nn.Parameter(torch.empty(2, kernel, width))
        self.kernel_projection = nn.Linear(width, 2 * kernel * (width // group), bias=False)

    def kernels(self, z: Tensor) -> Tensor:
        """Both kernels [B,T,2,kernel,H], of the input [B,T,H]."""
        by_input: Tensor = self.kernel_projection(z).unflatten(-1, self.sizes)
        return self.base_kernel + by_input.repeat_interleave(self.group, dim=-1)


class Selector(nn.Module):
    """What the token before adds to the logits of candidates."""

    def __init__(self, width: int, words: int, rank: int):
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(words, rank))
        self.successor_codebook = nn.Parameter(torch.empty(words, rank))
        self.hidden_projection = nn.Linear(width, rank, bias=False)

    def forward(self, tokens: Tensor, hidden: Tensor, candidates: Tensor) -> Tensor:
        """Tokens before [B,T], projected hidden states [B,T,R], candidates [B,T,K] -> [B,T,K]."""
        wanted = F.embedding(tokens, self.predecessor_codebook) * hidden
        found = F.embedding(candidates, self.successor_codebook)
        return (found * wanted.unsqueeze(-2)).sum(dim=-1)


class DFlash2(DFlash):
    """tokens [B,T], positions [B,T] -> logits [B,T,V] of the token itself, where it is of a block, and behind them the
    hidden state as the selector reads it [B,T,R]. What the selector adds is laid beside, see `WalkStandIns.laid_by`.

    A convolution reads tokens of one block alone: which one is the next in it is told by the last features.
    """

    def __init__(self, config: DFlash2Config):
        super().__init__(config)
        c, width, words = config, config.layers.hidden_size, config.layers.vocab_size
        for layer in self.layers:
            layer.attention_conv = Convolution(width, c.kernel, c.group)
            layer.mlp_conv = Convolution(width, c.kernel, c.group)
        self.candidate_selector = Selector(width, words, c.rank)
        self.walk_stand_ins = WalkStandIns(self.draft_head, words)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.last(tokens, positions)
        out = torch.cat([self.said(x), self.candidate_selector.hidden_projection(x)], dim=-1)
        hidden, _ = self.walk_stand_ins(tokens)
        candidates = self.walk_stand_ins.candidates(tokens)
        added = self.candidate_selector(tokens, hidden, candidates)
        return self.walk_stand_ins.laid_by(out, [added])

    def near(self, last: Tensor) -> Tensor:
        """Whether the token before each is the one before in its block [B,T,1]."""
        before = _before(last, 2 * TEXT)
        return (before < TEXT) & (before - last == 1)

    def around(self, name: str, layer: Any, z: Tensor, inner: Inner, near: Tensor | None) -> Tensor:
        """Between two convolutions."""
        kernels = getattr(layer, f"{name}_conv").kernels(z)
        within = _mixed(z, kernels[:, :, 0], near)
        return _mixed(inner(within), kernels[:, :, 1], near)


def _before(x: Tensor, first: float = 0.0) -> Tensor:
    """Of each token [B,T,W] the one before in the call; of the first a number."""
    return F.pad(x, (0, 0, 1, 0), value=first)[:, :-1]


def _mixed(x: Tensor, kernel: Tensor, near: Tensor | None) -> Tensor:
    """States [B,T,H] times a kernel [B,T,kernel,H], of each token and those before it; 0 before its block."""
    assert near is not None
    out = x * kernel[:, :, 0]
    for back in range(1, kernel.shape[2]):
        x = _before(x) * near.to(x.dtype)
        out = out + x * kernel[:, :, back]
    return out
