"""ShadowKV (arXiv:2410.21465): chunks are chosen by the mean of their keys, which are rebuilt of a few numbers, and
values fetched from outside memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.ir.axis import option
from accel.ir.ops.attention import Form
from accel.passes.kv.select import Sizes
from accel.passes.kv.select._low_rank import LowRank
from accel.passes.kv.select._pages import Where

_LOCAL, _OUTLIER = 2.0, 1.0  # what such a chunk is worth: more than any logarithm of a share


@dataclass(frozen=True)
class Shadowkv(LowRank):
    """A chunk of 8 tokens (`page`) has a landmark, the mean of its keys after RoPE. A token reads its own chunk and
    `local` before it; of those before these the `outliers` whose landmark is least like one of its keys, by their
    cosine; and of the rest the `tokens_read / page` that get the largest share of a softmax over landmarks from any
    query head. Of the latter those of the prompt have keys of `low_rank` numbers a token, in the directions of an
    SVD of the prompt's keys before RoPE, rotated to their positions; all others, and tokens behind the prompt, their
    exact keys.

    The paper chooses outliers and landmarks once, at a prompt's end, and reads all generated tokens; here chunks of
    generated tokens are as others, and outliers are those of what a token sees.

    Values lie in a file; those of chunks that a token chooses are fetched while their keys are rebuilt. Exact keys do,
    too, and at the end of a prompt they are dropped from memory: a token reads those of outliers and local chunks, and
    a later prompt, whose end makes directions of all keys anew, reads all.

    In memory are the landmarks and a number of each chunk, 1/8 of the keys, beside the keys of few numbers.
    """

    tokens_read: int = 2048
    page: int = 8
    outliers: int = option(48, least=0, most=4096)
    local: int = option(4, least=0, most=4096)
    small: ClassVar[Mapping[str, Any]] = {
        "tokens_read": 12, "page": 4, "outliers": 1, "local": 1, "dense_layers": 0, "low_rank": 6,
    }  # fmt: skip

    @property
    def count(self) -> int:
        """Its own, the local ones, outliers, and those that it chooses."""
        return max(1, self.tokens_read // self.page) + self.exact

    @property
    def exact(self) -> int:
        """Its own, the local ones and outliers: they are worth most, so what is chosen comes behind them."""
        return 1 + self.local + self.outliers

    def parts(self, width: int) -> dict[str, tuple[str, Sizes]]:
        return {"landmark": ("float32", (width,)), "likeness": ("float32", ())}

    def summary(self, keys: Tensor) -> dict[str, Tensor]:
        keys = keys.float()
        landmark = keys.mean(3)
        products = (keys * landmark.unsqueeze(3)).sum(-1)
        norms = (keys.square().sum(-1) * landmark.square().sum(-1, keepdim=True)).sqrt()
        return {"landmark": landmark, "likeness": (products / norms.clamp(min=1e-12)).amin(3)}

    def score(self, queries: Tensor, parts: dict[str, Tensor], form: Form) -> Tensor:
        return form.logits(queries.float() @ parts["landmark"].transpose(-1, -2))

    def choice(self, x: Mapping[str, Any], where: Where, heads: int) -> Tensor:
        likeness, tokens = x["parts"]["likeness"], where.tokens
        batch, groups, pages = likeness.shape
        numbers = torch.arange(pages, device=likeness.device)
        ahead = torch.arange(tokens, device=likeness.device)
        own = ((where.slots[:, None] + ahead) // self.page)[:, None, :, None]
        far = numbers < own - self.local  # [B,1,T,N]
        odd = torch.where(far, -likeness.unsqueeze(2), -torch.inf)  # [B,G,T,N]
        listed = where.best(odd, self.outliers + 1, self.page)[..., 1:]
        listed = torch.where(listed < 0, pages, listed)
        blank = odd.new_zeros(()).expand(batch, groups, tokens, pages + 1)
        outlier = (
            blank.scatter(3, listed, torch.ones_like(listed, dtype=odd.dtype))[..., :pages] > 0
        )
        rest = far & ~outlier & where.seen(pages, self.page)
        scores = self.score(x["queries"], x["parts"], x["form"]).unflatten(2, (heads, tokens))
        lowest = torch.finfo(torch.float32).min / 2
        shares = torch.where(scores.isnan(), lowest, scores)
        shares = shares.masked_fill(~rest.unsqueeze(2), lowest).log_softmax(-1)
        worth = self.vote(shares, rest.unsqueeze(2))
        worth = torch.where(outlier, _OUTLIER, torch.where(far, worth, _LOCAL))
        none = likeness.isnan().unsqueeze(2)  # what is no number, attention shall see
        return where.best(worth.masked_fill(none, torch.nan), self.count, self.page)
