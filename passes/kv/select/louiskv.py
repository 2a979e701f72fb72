"""LouisKV (arXiv:2510.11292): units are searched at boundaries only, where a token's query is unlike the one before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.ir.axis import option
from accel.ir.ops.attention import Form
from accel.passes.kv.select._tokens import Memory
from accel.passes.kv.select._units import Units, k_means, marked, means_of, own_slots


@dataclass(frozen=True)
class Louiskv(Units):
    """A token whose query has a mean cosine over the heads below `boundary` with that of the token before it searches;
    the others choose by the query of the last search.

    A unit is worth the mean over a group's query heads of softmax(q · mean) over the units. Units of a prompt
    are clusters of keys (k-means by cosine, `rounds` of it), those of generated text end at boundaries: each token
    that searches begins one. The `every` tokens of a segment, the paper's local buffer, become at most `every` / `size`
    units, neighbouring ones together where there are more. Tokens that read everything, since there were no more than
    `tokens_read`, searched nothing: they are in runs of `size`. `boundary` is 0.7 in the paper, for Qwen3-8B. New units
    compete by the query of the last search, so a budget of all tokens reads all of them.

    Which tokens searched is kept of each token, for as long as it is there, so the segments of generated text are
    cut otherwise in each layer.
    """

    tokens_read: int = 1024
    size: int = 16
    every: int = 64
    boundary: float = option(0.7, least=-2, most=2)
    rounds: int = option(10, least=0, most=100)

    small: ClassVar[Mapping[str, Any]] = {
        "tokens_read": 10, "size": 4, "every": 8, "sinks": 2, "rounds": 2, "dense_layers": 0,
    }  # fmt: skip

    def memory(self, heads: int, width: int, groups: int) -> Memory:
        """A token's own query, and that of the last search; and whether a token searched."""
        query = ("float32", (heads, width))
        entries = {} if self.boundary > 1 else {"last": query, "query": query}
        return Memory(entries, lasting=("begins",))

    def group(
        self, keys: Tensor, real: Tensor, units: Tensor, generated: Tensor, begins: Tensor
    ) -> tuple[Tensor, Tensor]:
        clusters, means = k_means(keys, real, units, self.rounds)
        own = marked(self.segments(begins), real, units)
        labels = torch.where(generated[:, None], own[:, None], clusters)
        runs = means_of(keys, real, labels, units)
        return labels, torch.where(generated[..., None, None], runs, means)

    def segments(self, begins: Tensor) -> Tensor:
        """Numbers from 0 on of the segments of tokens in a row [B,N], of which `begins` [B,N] says where one begins
        (-1: nobody knows).
        """
        unknown, numbers = begins < 0, torch.arange(begins.shape[1], device=begins.device)
        before = torch.cat((unknown[:, :1], unknown[:, :-1]), dim=1)
        runs = unknown & ((numbers % self.size == 0) | ~before)
        found = ((begins > 0) | runs).long().cumsum(1)
        return found - found[:, :1]

    def score(self, queries: Tensor, means: Tensor, form: Form) -> Tensor:  # type: ignore[override]
        return form.logits(super().score(queries, means))

    def vote(self, scores: Tensor, seen: Tensor) -> Tensor:
        """Scores of a group's heads [B,G,R,T,U] -> the logarithm of the sum of their shares [B,G,T,U], which does not
        vanish where a head is sure; NaN of what is no number.
        """
        lowest = torch.finfo(scores.dtype).min / 2
        clean = torch.nan_to_num(scores).clamp(lowest, -lowest).masked_fill(~seen, lowest)
        shares = clean.log_softmax(-1).logsumexp(2)
        return torch.where(scores.isnan().any(2), torch.nan, shares)

    def search(
        self, x: Mapping[str, Tensor], before: Mapping[str, Tensor], known: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        queries = x["queries"].float()
        own = own_slots(x)
        if self.boundary > 1:
            return queries, own, {"begins": own >= 0}
        which = self.searched(queries, before["last"], known)
        both = torch.cat((before["query"][:, None], queries), dim=1)
        index = which[..., None, None].expand(queries.shape)
        chosen = both.gather(1, index)
        begins = which == torch.arange(queries.shape[1], device=which.device) + 1
        return chosen, own, {"last": queries, "query": chosen, "begins": begins}

    def searched(self, queries: Tensor, last: Tensor, known: Tensor) -> Tensor:
        """Which query each token of a call [B,T,H,D] chooses by [B,T]: i + 1, the i-th of the call; 0, that of the
        last search before it. `last` [B,H,D] is the query of the token before the call, where `known` (bool [B]).
        """
        both = torch.cat((last[:, None], queries), dim=1)
        norms = both.square().sum(-1).sqrt().clamp(min=1e-12)
        product = (both[:, 1:] * both[:, :-1]).sum(-1)
        like = (product / (norms[:, 1:] * norms[:, :-1])).mean(2)  # [B,T]
        numbers = torch.arange(queries.shape[1], device=queries.device) + 1
        new = ~(like >= self.boundary) | (~known[:, None] & (numbers == 1))
        own = torch.where(new, numbers, 0)
        behind = numbers[:, None] >= numbers  # [T,T]
        newest: Tensor = (own[:, None] * behind).amax(2)
        return newest
