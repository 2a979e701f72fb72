"""A model that learns to say lexical units at once (Lexical Unit Decoding, arXiv:2405.15208), for the loop `lud`:
tokens of a text that the model, as it was, foretells in a row with a probability of `sure` or more.

In one call stand a text and, behind it, masks at places where units begin: each sees the text up to the token before
the unit, and the masks before it. The loss is that of next tokens of the text, and of the units' tokens behind their
first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from accel.compiler.train.masks import MaskedRun, Masking, cross_entropy, share_right
from accel.compiler.train.windows import Shown
from accel.ir.axis import option

PLACES = 16  # of a row at which units are tried in one step


@dataclass(frozen=True)
class Lud(Masking):
    """sure: the probability from which a token is of a unit."""

    block: int = option(4, least=2, most=256)
    sure: float = option(0.5, least=0, most=1)

    key: ClassVar[str] = "lud"


def units(sure: Tensor, block: int) -> Tensor:
    """[B,P,K] of which tokens [B,T] are sure: whether token P + i is of a unit that has all from P on, of K in all."""
    wide = sure.unfold(1, block, 1)
    return wide.cumprod(-1).bool()


class LudRun(MaskedRun):
    """See above."""

    tunes = Lud

    def learn(self, ids: Tensor, known: Tensor) -> dict[str, float]:
        """One step on rows [B,T+1]."""
        self.check_text(ids)
        method, text, coming = self.soft.method, ids[:, :-1], ids[:, 1:]
        generator = torch.Generator().manual_seed(self.options.seed + self.step)
        with torch.no_grad():
            odds = self.soft.model.logits(text, {}).softmax(-1)
            sure = odds.gather(2, coming[..., None])[..., 0] >= method.sure
        found = units(sure & (known > 0), method.block)  # of what follows each token
        first = torch.multinomial(found[..., 1] + 1e-6, PLACES, True, generator=generator)
        rows = torch.arange(len(ids))[:, None, None]
        behind = torch.arange(1, method.block)
        places = first[..., None] + behind
        weight = found[rows, first[..., None], behind].float().flatten(1)
        said, spoken = self.soft.logits(text, self._masks(first, places), self.parts[0])
        tokens = coming[rows, places].flatten(1)
        following = cross_entropy(said, coming, known)
        unit = cross_entropy(spoken, tokens, weight)
        self.descend(following + unit)
        return {
            "next": following.item(),
            "unit": unit.item(),
            "right": share_right(spoken, tokens, weight),
        }

    def _masks(self, first: Tensor, places: Tensor) -> Shown:
        """At places [B,P,K-1] behind the tokens `first` [B,P]."""
        count, size = places.shape[1:]
        places = places.flatten(1)
        window = torch.arange(count).repeat_interleave(size)
        order = torch.arange(count * size)
        sees = (window == window[:, None]) & (order <= order[:, None])
        begins = (first + 1).repeat_interleave(size, 1)
        return Shown(torch.full_like(places, self.soft.method.mask), places, begins, sees)
