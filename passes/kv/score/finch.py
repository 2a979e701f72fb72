"""FINCH (arXiv:2408.00167): keep what the question attends to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from accel.ir.axis import option
from accel.passes.kv._shared.slots import places, ranks_of
from accel.passes.kv.inputs.attends import Attends
from accel.passes.kv.score import Base


@dataclass(frozen=True)
class Finch(Base):
    """Attention of the question's tokens, each times the number of keys that it sees, a mean over them and the heads of
    the group. The question stays. `Session.mark` says where it begins; where it does not, it is the last `window`
    tokens. Of a longer question the last `window` tokens vote.

    `chunk` (0: the whole prompt): of every so many tokens the same share stays, with the question in its own, as in
    kvpress. A budget then counts tokens before they are dropped, once, at the end of a prompt.

    With `kv.when = chunk` a long prompt is compressed chunk by chunk, as in the paper: later chunks read what is left
    of earlier ones. The session runs a marked question behind each chunk that it does not end, so what stays of the
    chunk is what would stay of the chunk and the question alone. A question that is marked in a later call is not
    known yet: then the last `window` tokens of the chunk vote.

    kvpress' number of keys is one lower.
    """

    window: int = option(64, least=1, most=1024)
    chunk: int = option(0, least=0, most=1 << 20)
    small: ClassVar[Mapping[str, Any]] = {"window": 4}
    others: ClassVar[tuple[Mapping[str, Any], ...]] = ({"chunk": 5},)

    @property
    def observe(self) -> int:  # type: ignore[override]
        return self.window

    def __call__(
        self,
        queries: Tensor,
        query_positions: Tensor,
        positions: Tensor,
        seen: Tensor,
        question: Tensor,
        ahead: Tensor,
        attends: Attends,
    ) -> Tensor:
        asked = (query_positions >= seen[:, None]).any(1)  # the question ran behind
        there = (question >= 0) & ((question < seen) | asked)
        first = torch.where(there, torch.minimum(question, seen), (seen - self.window).clamp(min=0))
        voting = query_positions.masked_fill(query_positions < first[:, None], -1)
        every = torch.maximum(positions, ahead)
        probs = attends(queries, voting, ahead)  # [B,G,R,W,S]
        seen_by = (every[:, :, None] >= 0) & (every[:, :, None] <= voting[..., None, :, None])
        weighted = probs * self.normalizer(seen_by.sum(3))[:, :, None, :, None]
        number = (voting >= 0).sum(1).clamp(min=1)[:, None, None]
        worth = weighted.sum(3).mean(2) / number
        late = positions >= first[:, None, None]
        first_of_all = seen[:, None, None] + 1.0  # a mean is at most `seen`
        worth = torch.where(late, first_of_all, worth)
        if self.chunk:
            worth = torch.where(late, first_of_all, self.shares(worth, positions))
        return worth

    def shares(self, scores: Tensor, positions: Tensor) -> Tensor:
        """Scores [B,G,S] -> minus the share of its chunk that stays with each token, where the best ones do."""
        size, place = self.chunk, places(positions)
        chunks = (positions.shape[2] + size - 1) // size + 1  # more than one, however few the slots
        blank = torch.full_like(
            pad(scores, (0, chunks * size + 1))[..., scores.shape[2] :], -torch.inf
        )
        laid = blank.scatter(2, place.clamp(max=chunks * size), scores)[..., :-1]
        rank = ranks_of(laid.unflatten(2, (chunks, size))) + 1
        tokens = (laid > -torch.inf).unflatten(2, (chunks, size)).sum(3, keepdim=True)
        share = (rank / tokens.clamp(min=1)).flatten(2)
        found = -pad(share, (0, 1)).gather(2, place.clamp(max=chunks * size))
        return found.masked_fill(scores.isnan(), float("nan"))

    def normalizer(self, keys: Tensor) -> Tensor:
        """What the attention of a query that sees so many keys is multiplied by."""
        return keys
