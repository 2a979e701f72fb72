"""LAQ (arXiv:2505.20334, Lookahead Q-Cache): the queries of guessed tokens say which tokens of a prompt are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.ir.axis import option
from accel.ir.errors import RecipeError
from accel.passes.kv.inputs.attends import Attends
from accel.passes.kv.score import Base
from accel.passes.kv.score._window import pooled


@dataclass(frozen=True)
class LAQ(Base):
    """A copy of the session keeps what the last `window` queries attend to (SnapKV), and decodes `lookahead` tokens.
    Their queries and those of the last `recent` tokens of the prompt then vote. `kernel`: width of the max pooling
    over neighbouring tokens, odd. `recent` of 0 is the paper's LAQ, 8 its LAQ++.

    Guessed tokens see the whole prompt; the release hides its last tokens from the first of them.
    """

    window: int = option(32, least=1, most=1024)
    lookahead: int = option(8, least=0, most=256)
    recent: int = option(8, least=0, most=1024)
    kernel: int = option(7, least=1, most=63, odd=True)
    small: ClassVar[Mapping[str, Any]] = {"window": 4, "recent": 2, "lookahead": 3, "kernel": 3}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recent > self.window:
            raise RecipeError(
                f"{self.full_name}: recent is {self.recent}, more than window = {self.window}; give at most that many"
            )

    @property
    def observe(self) -> int:  # type: ignore[override]
        return self.window

    def __call__(
        self,
        queries: Tensor,
        query_positions: Tensor,
        positions: Tensor,
        seen: Tensor,
        attends: Attends,
    ) -> Tensor:
        guessed = query_positions >= seen[:, None]
        late = torch.where(guessed.any(1), self.recent, self.window)
        first = seen - late  # of the prompt's tokens whose queries vote
        voting = query_positions.masked_fill(query_positions < first[:, None], -1)
        probs = attends(queries, voting)  # [B,G,R,W,S]
        prefix = positions < first[:, None, None]
        number = (voting >= 0).sum(1).clamp(min=1)[:, None, None, None]
        scores = probs.sum(3) / number * prefix[:, :, None]
        near = pooled(scores, positions, self.kernel, "max").mean(2)
        return torch.where(
            prefix | (positions < 0), near, near + 2
        )  # a mean of weights is at most 1
