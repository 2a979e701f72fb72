"""A causal model that learns to fill blocks of masks behind a text, too (Set Block Decoding, arXiv:2509.04185), and to
go on as it did: the loops `sbd`, `nbdiff` and `sdlm` decode with it.

In one call stand a text and, behind it, its blocks with a share of their tokens masked: a block sees the text before it
and itself, both ways. The loss is that of next tokens of the text, and of masked tokens of blocks. The logits of a
token say what follows it, so a block's first token is one of the text's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from accel.compiler.train.masks import MaskedRun, Masking, cross_entropy, share_right
from accel.compiler.train.windows import Shown

LEAST = 2  # tokens of a block


@dataclass(frozen=True)
class SetBlock(Masking):
    """block: at most, of one step; a step draws 2 to so many."""

    key: ClassVar[str] = "set-block"


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of a row's tokens [B,M], all of one size, and which of them are `hidden` [B,M]."""

    shown: Shown
    hidden: Tensor

    @property
    def asked(self) -> Tensor:
        """Which tokens [B,M] stand before a hidden one of their block."""
        behind = torch.zeros_like(self.hidden)
        same = self.shown.begins[:, 1:] == self.shown.begins[:, :-1]
        behind[:, :-1] = self.hidden[:, 1:] & same
        return behind


def drawn(text: Tensor, most: int, mask: int, generator: torch.Generator) -> Blocks:
    """Whole blocks of a text [B,T], of 2 to `most` tokens, from one of its first tokens on; of each row another share
    is masked.
    """

    def within(least: int, last: int) -> int:
        return int(torch.randint(least, last + 1, (), generator=generator))

    batch, length = text.shape
    size = within(LEAST, min(most, length - 1))
    start = within(1, min(size, length - size))
    places = start + torch.arange((length - start) // size * size)
    begins = places - (places - start) % size
    share = torch.rand(batch, 1, generator=generator)
    hidden = torch.rand(batch, len(places), generator=generator) < share
    tokens = text[:, places].masked_fill(hidden, mask)
    sees = begins == begins[:, None]
    wide = places.expand(batch, -1), begins.expand(batch, -1)
    return Blocks(Shown(tokens, *wide, sees), hidden)


class SetBlockRun(MaskedRun):
    """See above."""

    tunes = SetBlock

    def learn(self, ids: Tensor, known: Tensor) -> dict[str, float]:
        """One step on rows [B,T+1]."""
        self.check_text(ids)
        method, text = self.soft.method, ids[:, :-1]
        generator = torch.Generator().manual_seed(self.options.seed + self.step)
        blocks = drawn(text, method.block, method.mask, generator)
        said, filled = self.soft.logits(text, blocks.shown, self.parts[0])
        places = blocks.shown.places
        tokens, weight = ids[:, 1:].gather(1, places), known.gather(1, places) * blocks.asked
        following = cross_entropy(said, ids[:, 1:], known)
        masked = cross_entropy(filled, tokens, weight)
        self.descend(following + masked)
        return {
            "next": following.item(),
            "masked": masked.item(),
            "right": share_right(filled, tokens, weight),
        }
