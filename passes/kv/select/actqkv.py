"""ActQKV (arXiv:2502.13542): blocks are chosen for all heads of a layer at once, by a probe query that weights unusual
queries more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, fx

from accel.ir.axis import option
from accel.ir.errors import RecipeError
from accel.ir.tables import Rows, Tables
from accel.ir.tables import Sizes as TableSizes
from accel.passes.kv.select._build import Build
from accel.passes.kv.select._tokens import Memory
from accel.passes.kv.select._units import Units, consecutive, own_slots
from accel.passes.trained import Parts

_STRIDE = 8  # every so many tokens of a text one is looked at, for the density of a layer


@dataclass(frozen=True)
class Actqkv(Tables, Units):
    """Units are blocks of `size` tokens. A block's vector is the mean of its `best` keys in each KV head, and it is
    worth the cosine of its vector with the probe query, over all heads together: a layer has one list.

    The probe query of a token is the mean of the queries of its chunk so far, the `chunk` generated tokens that it is
    among, weighted by how unusual each is: the mean over all numbers of (x - mean)² / (variance + mean variance / 100).
    With `chunk = 1` it is the token's own query, as where the paper decodes. Prompts read everything;
    `prefill.sparse = actqkv-prompt` chooses for chunks of them.

    Layers share L (`tokens_read` - `sinks`) tokens by their density: the mean entropy of softmax(cosines), as a share
    of the largest. A layer gets `floor` to 2 (`tokens_read` - `sinks`) tokens of these, in whole blocks. The release's
    floor is above the mean, so that shares are equal.

    The table has the mean and the variance of queries and the density of each layer, which the paper takes of the
    tokens before. The `best` keys are those with the largest product with the mean query; the paper takes those that
    draw most attention of the tokens behind them, and keeps keys without positions. On SmolLM2 blocks by either, and by
    a mean of the tokens before, have as much of the attention, and more than by the table's numbers in another order;
    without positions they have less (`tools/bench/block_vectors.py`).

    In the bundled model the density is nearly 1 in each layer (0.995 to 1.000): cosines lie within -1..1, so their
    softmax is flat, and layers share evenly.
    """

    size: int = 32
    every: int = 64
    sinks: int = 64
    best: int = option(4, least=1, most=1024)
    chunk: int = option(1, least=1, most=1 << 20)
    floor: int = option(512, least=0)

    lacks = "statistics of the tokens before (a table has a text's)"
    key: ClassVar[str] = "actqkv"
    small: ClassVar[Mapping[str, Any]] = {
        "tokens_read": 10, "size": 4, "every": 8, "sinks": 2, "best": 2, "chunk": 3, "floor": 4, "dense_layers": 0,
    }  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size > self.tokens_read - self.sinks:
            raise RecipeError(
                f"{self.full_name}: size is {self.size}, but a layer reads tokens_read - sinks = "
                f"{self.tokens_read - self.sinks} tokens of blocks; give smaller blocks, or more tokens"
            )
        if self.floor > 2 * (self.tokens_read - self.sinks):
            raise RecipeError(
                f"{self.full_name}: floor is {self.floor}; give at most {2 * (self.tokens_read - self.sinks)} tokens"
            )

    @property
    def count(self) -> int:
        """See Tokens: in the layer that reads most."""
        return 2 * self.tokens_read - self.sinks + self.plan.tail

    def sizes(self, width: int, heads: int) -> TableSizes:
        """`query_mean`, `query_variance` [H,D]; `density`: 0 to 1."""
        return {"query_mean": (-1, width), "query_variance": (-1, width), "density": (1,)}

    def listed(self, build: Build, node: fx.Node) -> fx.Node:
        method = self.in_layer(node.meta["layer"], build.layers, build.tables)
        return super(Actqkv, method).listed(build, node)

    def in_layer(self, layer: int, layers: tuple[int, ...], tables: Parts) -> Self:
        """The method with the tokens that one of the `layers` that choose reads, by the constants of each."""
        shares = self.blocks([float(tables[i]["density"]) for i in layers])
        read = self.size * shares[layers.index(layer)]
        return replace(self, tokens_read=self.sinks + read, floor=0)

    def blocks(self, density: list[float]) -> list[int]:
        """Of layers of these densities, how many blocks each reads, one or more: its share of what is left."""
        mean, least = (
            (self.tokens_read - self.sinks) // self.size,
            max(1, -(-self.floor // self.size)),
        )
        left, found = mean * len(density), []
        for i, one in enumerate(density):
            rest = sum(density[i:])
            share = round(left * one / rest) if rest > 0 else left // (len(density) - i)
            found.append(min(max(least, share), 2 * mean))
            left = max(0, left - found[-1])
        return found

    def group(
        self, keys: Tensor, real: Tensor, units: Tensor, query_mean: Tensor
    ) -> tuple[Tensor, Tensor]:
        labels = consecutive(real, units)[:, None].expand(-1, keys.shape[1], -1)
        return labels, likeliest(keys, real, labels, units, query_mean, self.best)

    def score(self, queries: Tensor, means: Tensor) -> Tensor:
        """The part of a head in the cosine with all heads, [B,G,M,U]; of queries whose norm over all heads is 1."""
        norm = means.square().sum((1, 3)).sqrt().clamp(min=1e-12)  # [B,U]
        products: Tensor = queries.float() @ means.transpose(-1, -2)
        return products / norm[:, None, None]

    def vote(self, scores: Tensor, seen: Tensor) -> Tensor:
        """Scores of a group's heads [B,G,R,T,U] -> what units are worth to all groups [B,G,T,U]."""
        return scores.sum((1, 2))[:, None].expand(-1, scores.shape[1], -1, -1)

    def memory(self, heads: int, width: int, groups: int) -> Memory:
        """The weighted sum of the queries of a token's chunk so far, and the sum of the weights."""
        entries = {"sum": ("float32", (heads, width)), "weight": ("float32", ())}
        return Memory({} if self.chunk == 1 else entries)

    def search(
        self, x: Mapping[str, Tensor], before: Mapping[str, Tensor], known: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """See Units: the probe query of each token, of norm 1."""
        own, queries = own_slots(x), x["queries"].float()
        if self.chunk == 1:
            return _unit(queries), own, {}
        weights = unusual(queries, x["query_mean"], x["query_variance"])
        which = (own - x["origin"][:, None]).div(self.chunk, rounding_mode="floor")
        total, weight = self.gathered(queries, weights, which, x["origin"], own, before, known)
        probe = total / weight.clamp(min=1e-12)[..., None, None]
        return _unit(probe), own, {"sum": total, "weight": weight}

    def gathered(
        self,
        queries: Tensor,
        weights: Tensor,
        which: Tensor,
        origin: Tensor,
        slots: Tensor,
        before: Mapping[str, Tensor],
        known: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The weighted sum [B,T,H,D] of the queries [B,T,H,D] of each token's chunk so far, and the sum of the
        `weights` [B,T]. which [B,T]: the number of each token's chunk. before, known: see `search`.
        """
        number = torch.arange(slots.shape[1], device=slots.device)
        same = (which[..., None] == which[:, None]) & (number <= number[:, None])  # [B,T,T]
        weighted = (weights[..., None, None] * queries).nan_to_num()
        goes = (slots - number - 1 >= origin[:, None]) & known[
            :, None
        ]  # the token before is generated, too
        last = (slots - number - 1 - origin[:, None]).div(self.chunk, rounding_mode="floor")
        first = (goes & (last == which)).to(queries.dtype)
        share = same.to(queries.dtype)
        total = (share @ weighted.flatten(2)).view_as(queries)
        total = total + first[..., None, None] * before["sum"][:, None]
        heavy = (share @ weights.nan_to_num()[..., None])[..., 0]
        return total, heavy + first * before["weight"][:, None]

    def measure(self, rows: Iterable[Rows]) -> dict[int, dict[str, Tensor]]:
        """Over all rows; a layer's density by the mean query of each row, of every eighth token."""
        sums: dict[int, list[Tensor]] = {}
        for row in rows:
            for layer, x in row.layers.items():
                flat = x.queries.double().transpose(1, 2).flatten(0, 1)  # [N,H,D]
                dense = self.densities(x.queries.float(), x.keys.float())
                new = [flat.sum(0), flat.square().sum(0), torch.tensor(float(len(flat)))]
                new += [dense.double().sum(), torch.tensor(float(dense.numel()))]
                held = sums.get(layer)
                sums[layer] = [a + b for a, b in zip(held, new, strict=True)] if held else new
        found = {}
        for layer, (total, squares, tokens, dense, many) in sums.items():
            mean = total / tokens
            variance = (squares / tokens - mean.square()).clamp(min=0)
            density = (dense / many if many > 0 else torch.ones(())).reshape(1)
            named = {"query_mean": mean, "query_variance": variance, "density": density}
            found[layer] = {n: t.float() for n, t in named.items()}
        return found

    def densities(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Of queries [B,H,T,D] over the whole blocks of keys [B,G,T,D] before each: the entropy of softmax(cosines), as
        a share of the largest; of tokens with two blocks or more.
        """
        blocks = keys.shape[2] // self.size
        if keys.shape[2] <= 2 * self.size:
            return queries.new_zeros(0)
        tokens = torch.arange(2 * self.size, keys.shape[2], _STRIDE)
        end = blocks * self.size
        real = torch.ones(len(keys), end, dtype=torch.bool)
        units = torch.ones(len(keys), blocks, dtype=torch.bool)
        labels = torch.arange(end).div(self.size, rounding_mode="floor").expand(*keys.shape[:2], -1)
        mean = queries.mean((0, 2))
        vectors = likeliest(keys[:, :, :end], real, labels, units, mean, self.best)  # [B,G,U,D]
        repeat = queries.shape[1] // keys.shape[1]
        wide = vectors.repeat_interleave(repeat, 1).transpose(1, 2).flatten(2)  # [B,U,HD]
        asked = queries[:, :, tokens].transpose(1, 2).flatten(2)
        like = torch.cosine_similarity(asked[:, :, None], wide[:, None], dim=3)  # [B,M,U]
        past = (torch.arange(blocks) + 1) * self.size <= tokens[:, None]
        shares = like.masked_fill(~past, -torch.inf).softmax(-1)
        entropy = -(shares * shares.clamp(min=1e-30).log()).sum(-1)
        return entropy / past.sum(1).float().log()


def unusual(queries: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """How far each of queries [B,T,H,D] is from the mean [H,D], by the variance [H,D]: [B,T]."""
    far = (queries - mean).square() / (variance + variance.mean() / 100).clamp(min=1e-12)
    return far.mean((2, 3))


def likeliest(
    keys: Tensor, real: Tensor, labels: Tensor, units: Tensor, mean: Tensor, best: int
) -> Tensor:
    """Of each unit (bool [B,U]) the mean of its `best` keys [B,G,U,D], those with the largest product with the mean
    query of their group's heads, mean [H,D]; of real ones among keys [B,G,N,D] with labels [B,G,N].
    """
    groups, none = keys.shape[1], units.shape[1]
    asked = mean.unflatten(0, (groups, mean.shape[0] // groups)).mean(1)  # [G,D]
    like = (keys * asked[:, None]).sum(3)
    like = torch.where(like.isnan(), torch.inf, like)  # no number: attention shall see it
    order = like.sort(dim=2, descending=True, stable=True).indices
    own = labels.masked_fill(~real[:, None], none)
    sorted_units = own.gather(2, order).sort(dim=2, stable=True)
    order = order.gather(2, sorted_units.indices)  # unit after unit, the best first
    ones = torch.ones_like(like)
    size = like.new_zeros((*like.shape[:2], none + 1)).scatter_add(2, own, ones)  # [B,G,U+1]
    start = (size.cumsum(2) - size).gather(2, sorted_units.values)
    rank = torch.arange(like.shape[2], device=keys.device) - start
    chosen = rank < best
    taken = keys.gather(2, order[..., None].expand_as(keys)).masked_fill(~chosen[..., None], 0.0)
    index = sorted_units.values[..., None].expand_as(taken)
    blank = taken.new_zeros((*like.shape[:2], none + 1, keys.shape[3]))
    total = blank.scatter_add(2, index, taken)
    return total[:, :, :-1] / size[:, :, :-1, None].clamp(min=1, max=best)


def _unit(queries: Tensor) -> Tensor:
    """Queries [B,T,H,D] of norm 1 over all heads."""
    norm = queries.square().sum((2, 3), keepdim=True).sqrt()
    return queries / norm.clamp(min=1e-12)
