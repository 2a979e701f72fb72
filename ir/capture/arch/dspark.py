"""DSpark (arXiv:2607.05147): DFlash's layers, and a small head that walks over the block: the token before changes
what a place says, and says how sure that is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from accel.ir.capture.arch.dflash import DFlash, DFlashConfig
from accel.ir.capture.arch.walk import WalkStandIns
from accel.ir.draft_head import DraftHead

KINDS = ("vanilla", "gated", "rnn")  # of Markov heads


@dataclass(frozen=True)
class DSparkConfig(DFlashConfig):
    """rank: of the product that the Markov head adds to logits. kind: one of `KINDS`: what it makes of the token before
    alone, or of that and the hidden state of the place, or also of a state that goes from place to place. confident:
    there is a confidence head, which reads the hidden state and, `with_markov`, the token before.
    """

    rank: int = 1
    kind: str = KINDS[0]
    confident: bool = False
    with_markov: bool = False

    @property
    def head(self) -> DraftHead:
        """See DFlashConfig."""
        reads = self.confident or self.kind != KINDS[0]
        return replace(
            super().head,
            drafter="dspark",
            markov=True,
            hidden=self.layers.hidden_size if reads else 0,
            state=self.rank if self.kind == "rnn" else 0,
            confident=self.confident,
        )


class Markov(nn.Module):
    """What the token before adds to the logits of a place."""

    def __init__(self, config: DSparkConfig, words: int):
        super().__init__()
        c, rank, width = config, config.rank, config.layers.hidden_size
        self.markov_w1 = nn.Embedding(c.layers.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, words, bias=False)
        self.gate_proj = nn.Linear(width + rank, rank) if c.kind == "gated" else None
        self.joint_proj = nn.Linear(2 * rank + width, 3 * rank) if c.kind == "rnn" else None

    def forward(self, e: Tensor, h: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings of tokens before [B,T,R], hidden states [B,T,H], states [B,T,S] -> [B,T,Vd], the next states."""
        if self.gate_proj is not None:
            e = e * torch.sigmoid(self.gate_proj(torch.cat([h, e], dim=-1)))
        if self.joint_proj is not None:
            gate, new, out = self.joint_proj(torch.cat([state, e, h], dim=-1)).chunk(3, dim=-1)
            gate, e = torch.sigmoid(gate), torch.tanh(out)
            state = gate * state + (1 - gate) * torch.tanh(new)
        return self.markov_w2(e), state


class Confidence(nn.Module):
    """How sure a place is, before the sigmoid, of [B,T,W]."""

    def __init__(self, width: int):
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.proj(x)
        return out


class DSpark(DFlash):
    """tokens [B,T], positions [B,T] -> logits [B,T,V] of the next token, where a token is of a block, and behind them
    hidden states [B,T,H], where the Markov head reads them. What the token before changes is not in it: the pass
    `Features` makes an entry of that, which is computed here of stand-ins and left out.
    """

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        c, width = config, config.layers.hidden_size
        self.markov_head = Markov(c, self.words.count)
        read = width + c.rank * c.with_markov
        self.confidence_head = Confidence(read) if c.confident else None
        self.with_markov = c.with_markov
        self.walk_stand_ins = WalkStandIns(self.draft_head)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.last(tokens, positions)
        out = self.said(x)
        if self.draft_head.hidden:
            out = torch.cat([out, x], dim=-1)
        return self.walk_stand_ins.laid_by(out, self.markov(tokens, *self.walk_stand_ins(tokens)))

    def markov(self, tokens: Tensor, h: Tensor, state: Tensor) -> list[Tensor]:
        """What is added to logits [B,T,V], how sure that is [B,T,1], and the next states [B,T,S], by the tokens before
        [B,T]; the last two where there are any.
        """
        e = self.markov_head.markov_w1(tokens)
        bias, state = self.markov_head(e, h, state)
        parts = [self.words(bias)]
        if self.confidence_head is not None:
            parts.append(self.confidence_head(torch.cat([h, e], dim=-1) if self.with_markov else h))
        return [*parts, state] if self.draft_head.state else parts
