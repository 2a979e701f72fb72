"""LeoAM (arXiv:2506.20187): a context on the disk, of which chunks are chosen by the range of their keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from accel.ir.axis import option
from accel.passes.kv.select import MAPPED, PAGES
from accel.passes.kv.select._build import Build
from accel.passes.kv.select._pages import Where, stored
from accel.passes.kv.select.quest import Quest


@dataclass(frozen=True)
class Leoam(Quest):
    """Keys and values lie in mapped files. In memory are abstracts, the range of each channel of the keys, of chunks of
    `chunk` tokens and of their parts, the pages. A token takes the chunks with the highest bound on q · k until they
    hold `spread` times the tokens that it reads, and the pages with the highest bound of these chunks, of which alone
    the abstracts are read. Only the pages' keys and values are read from the files.

    The paper splits what it takes until nothing changes, which ends at the pages with the highest bounds of all
    (`quest`), for a bound of a chunk is none below that of its parts; here it is split once, into pages, so that the
    graph has one form. Chunks and pages have one size in all layers: larger ones in layers whose attention is flat
    would save abstracts alone, and pages of 32 in place of 16 lose attention in nearly every layer.

    On the disk lies what the cache holds: in codes with `kv.codec = kv-int8`, of which pages of 64 tokens fill the 4
    KiB that the system reads at least. Pages are fetched side by side once they are chosen, and none before: of those
    that a layer reads the next one reads half. What was read stays in memory as long as the system has room, which is
    the paper's middle tier.

    In memory are 5/64 of what keys and values take, with chunks of 64 tokens and pages of 16; of N pages a token
    looks at N/4 + 132 ranges. With enough chunks, or chunks of one page, the choice is `quest`'s.
    """

    chunk: int = option(64, one_of=PAGES, multiple_of="page")
    spread: int = option(2, least=1, most=1024)
    layout = MAPPED
    small: ClassVar[Mapping[str, Any]] = {
        "tokens_read": 12,
        "page": 4,
        "chunk": 8,
        "dense_layers": 0,
    }

    def stored(self, build: Build, node: fx.Node) -> dict[str, fx.Node]:
        """The parts of pages, and of chunks, of which pages are chosen: `<part>.<chunk>`."""
        pages = super().stored(build, node)
        if self.chunk == self.page:
            return pages
        return pages | stored(replace(self, page=self.chunk), build, node, f".{self.chunk}")

    @property
    def taken(self) -> int:
        """Chunks whose pages a token may choose, its own among them."""
        return math.ceil(self.spread * self.count * self.page / self.chunk) + 1

    def choice(self, x: Mapping[str, Any], where: Where, heads: int) -> Tensor:
        if self.chunk == self.page:
            return super().choice(x, where, heads)
        queries, parts = x["queries"], x["parts"]
        each = self.chunk // self.page
        bounds = self.score(queries, {n: parts[f"{n}.{self.chunk}"] for n in ("high", "low")})
        bounds = bounds.unflatten(2, (heads, where.tokens))
        worth = self.vote(bounds, where.seen(bounds.shape[4], self.chunk)[:, :, None])
        chunks = where.best(worth, self.taken, self.chunk)  # [B,G,T,K]
        (batch, groups, tokens, most), pages = chunks.shape, parts["high"].shape[2]
        within = torch.arange(each, device=chunks.device)
        listed = (chunks.unsqueeze(4) * each + within).reshape(batch, groups, tokens, most * each)
        there = (listed >= 0) & (listed < pages)
        width = queries.shape[3]

        def by_token(values: Tensor, each_has: int) -> Tensor:  # -> [B T,G,each_has,D]
            apart = values.reshape(batch, groups, tokens, each_has, width).transpose(1, 2)
            return apart.reshape(batch * tokens, groups, each_has, width)

        index = torch.where(there, listed, 0).reshape(batch, groups, tokens * most * each, 1)
        index = index.expand(batch, groups, tokens * most * each, width)
        read = {n: by_token(parts[n].gather(2, index), most * each) for n in ("high", "low")}
        own = queries.reshape(batch, groups, heads, tokens, width).transpose(2, 3)
        bounds = self.score(by_token(own, heads), read)
        bounds = bounds.reshape(batch, tokens, groups, heads, most * each).permute(0, 2, 3, 1, 4)
        fine = self.vote(bounds, there[:, :, None]).masked_fill(~there, -math.inf)
        blank = fine.new_full((), -math.inf).expand(batch, groups, tokens, pages + 1)
        worth = blank.scatter(3, torch.where(there, listed, pages), fine)[..., :pages]
        return where.best(worth, self.count, self.page)
