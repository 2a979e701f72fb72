"""What heads that walk over a block compute beside it: by the token before, and by numbers that calls give."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel.ir.capture.arch.features import ROWS
from accel.ir.draft_head import DraftHead
from accel.ir.ops.rows import given_rows

STAND_INS = "walk_stand_ins."  # how names of what no folder holds begin


class WalkStandIns(nn.Module):
    """Hidden states [B,T,H], states [B,T,S] and candidates [B,T,K] by a token's id, in place of those that calls give.
    words: how many tokens there are to be candidates.
    """

    no_mask: Tensor
    candidate_rows: Tensor

    def __init__(self, head: DraftHead, words: int = 1):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        hidden = torch.randn(ROWS, max(head.hidden, 1), generator=generator)
        state = torch.randn(ROWS, head.state, generator=generator)
        self.hidden_rows = nn.Embedding.from_pretrained(hidden)
        self.state_rows = nn.Embedding.from_pretrained(state) if head.state else None
        self.register_buffer("no_mask", torch.zeros(1, 1, dtype=torch.bool), persistent=False)
        if head.candidates:
            ids = torch.randint(words, (ROWS, head.candidates), generator=generator)
            self.register_buffer("candidate_rows", ids)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        turn = tokens % ROWS
        h: Tensor = self.hidden_rows(turn)
        return h, h[..., :0] if self.state_rows is None else self.state_rows(turn)

    def candidates(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens % ROWS, self.candidate_rows)

    def laid_by(self, out: Tensor, parts: list[Tensor]) -> Tensor:
        """An output [B,T,W], beside which lie, unseen, parts [B,T,n] of no more numbers together: the pass `Features`
        makes an entry of them.
        """
        wide = out.shape[-1] - sum(part.shape[-1] for part in parts)
        rest = out.new_zeros(1, 1, 1).expand(*out.shape[:2], wide)
        found: Tensor = given_rows.default(out, torch.cat([*parts, rest], dim=-1), self.no_mask)
        return found
