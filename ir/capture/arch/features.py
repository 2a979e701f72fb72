"""What calls give to a trained head beside tokens, while it is captured: numbers that stand in for them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from accel.ir.draft_head import DraftHead
from accel.ir.ops.rows import given_rows

ROWS = 61  # of a table of stand-ins; tokens take them in turn


class StandIns(nn.Module):
    """Rows of numbers by a token's id, in place of the target's embedding and of features, so that a head is a module
    of tokens alone, which captures and checks run like any other.
    """

    no_mask: Tensor

    def __init__(self, head: DraftHead, embedding: int):
        super().__init__()
        self.embedding, width = embedding, embedding + head.width
        generator = torch.Generator().manual_seed(0)
        rows, taps = torch.randn(ROWS, width, generator=generator), None
        taps = torch.randn(ROWS, head.tap_width, generator=generator)
        self.rows = nn.Embedding.from_pretrained(rows)
        self.tap_rows = nn.Embedding.from_pretrained(taps)
        self.register_buffer("no_mask", torch.zeros(1, 1, dtype=torch.bool), persistent=False)

    def forward(
        self, tokens: Tensor, fuse: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Tokens [B,T] -> embeddings [B,T,E] and features [B,T,W]; without `fuse`, taps are features."""
        turn = tokens % ROWS
        rows = self.rows(turn)
        fused = self.tap_rows(turn) if fuse is None else fuse(self.tap_rows(turn))
        if self.embedding:
            fused = torch.cat([rows[..., : self.embedding], fused], dim=-1)
        mixed = given_rows.default(rows, fused, self.no_mask)
        return mixed[..., : self.embedding], mixed[..., self.embedding :]
