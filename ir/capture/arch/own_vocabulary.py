"""A head's own vocabulary: the tokens of its target that it drafts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

OUTSIDE = 20.0  # below the least logit: those of tokens that a draft vocabulary lacks


class OwnVocabulary(nn.Module):
    """`size` tokens of the target's `vocab_size`; None: all, as they are."""

    draft_ids: Tensor  # [V], the place of each token of the target in the draft vocabulary
    drafted: Tensor  # [V], whether it has one

    def __init__(self, vocab_size: int, size: int | None):
        super().__init__()
        self.whole = size is None
        self.count = vocab_size if size is None else size
        if not self.whole:
            self.register_buffer("draft_ids", torch.zeros(vocab_size, dtype=torch.int64))
            self.register_buffer("drafted", torch.zeros(vocab_size, dtype=torch.bool))

    def set_ids(self, target_ids: Tensor) -> None:
        """Let draft token i be token `target_ids[i]` of the target."""
        self.draft_ids.zero_()
        self.draft_ids[target_ids] = torch.arange(len(target_ids))
        self.drafted.zero_()
        self.drafted[target_ids] = True

    def forward(self, logits: Tensor) -> Tensor:
        """The target's logits [...,V] of the head's [...,Vd]."""
        if self.whole:
            return logits
        least = logits.amin(-1, keepdim=True) - OUTSIDE
        return torch.where(self.drafted, logits[..., self.draft_ids], least)
