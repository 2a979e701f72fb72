"""How much attention each slot draws from each query: what scores of eviction accumulate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from accel.ir.ops import ragged
from accel.ir.ops.attention import Operands, attention, logits, padded, weights
from accel.ir.ops.noise import gumbel
from accel.ir.ops.op import Op


def _attention_weights(*operands: Any, **more: Any) -> Tensor:
    x = Operands[Tensor](*operands, **more)
    probs = weights(x)[0]  # [B,H,T,S]
    if x.kept_counts is not None and x.kept_pos is not None:
        probs = _in_slots(probs, x.kept_counts, x.kept_pos.shape[2], x.k.shape[2])
    return probs * (x.q_pos >= 0)[:, None, :, None]


def _in_slots(probs: Tensor, counts: Tensor, kept_slots: int, recent: int) -> Tensor:
    """probs [B,H,T,P+S] of the kept slots of each head -> of all heads' [B,H,T,M+S], 0 for those of others."""
    slots = torch.arange(kept_slots, device=probs.device)
    mine = ragged.owned(counts, slots)  # [B,G,M]
    at = slots - (counts.cumsum(1) - counts)[..., None]
    repeat = probs.shape[1] // counts.shape[1]
    at, mine = (
        x.repeat_interleave(repeat, 1)[:, :, None].expand(-1, -1, probs.shape[2], -1)
        for x in (at.masked_fill(~mine, 0), mine)
    )
    old = probs[..., : probs.shape[3] - recent].gather(3, at).masked_fill(~mine, 0)
    return torch.cat((old, probs[..., probs.shape[3] - recent :]), dim=3)


def _shape(*operands: Any, **more: Any) -> Tensor:
    x = Operands[Tensor](*operands, **more)
    slots = x.k.shape[2] + (0 if x.kept_k is None else x.kept_k.shape[2])
    return x.k.new_empty((*x.q.shape[:3], slots))


# The operands of `attention`. -> [B,H,T,P+S]: the weight of each slot for each query; padding gives 0. Of kept
# slots of unequal numbers [B,H,T,M+S]: those of other heads give 0.
attention_weights = Op(
    "attention_weights",
    attention.schema,
    reference=_attention_weights,
    shape=_shape,
)


T = TypeVar("T")


@dataclass(frozen=True)
class Drawn(Operands[T]):
    """What `drawn_attention` is given, in the order of its schema."""

    share: T | None = None
    temperature: T | None = None
    layer: T | None = None
    noise: float = 0.0
    seed: int = 0


def _drawn_attention(*operands: Any, **more: Any) -> Tensor:
    x = Drawn[Tensor](*operands, **more)
    assert x.share is not None
    drawn = weights(x)[0] if x.temperature is None else _noisy(_padded(x), x.temperature)
    if x.kept_counts is not None and x.kept_pos is not None:
        drawn = _in_slots(drawn, x.kept_counts, x.kept_pos.shape[2], x.k.shape[2])
    share = x.share * (x.q_pos >= 0)
    by_group: Tensor = (drawn * share[:, None, :, None]).unflatten(1, (x.k.shape[1], -1))
    return by_group.sum((2, 3))


def _padded(x: Drawn[Tensor]) -> Drawn[Tensor]:
    found = padded(x)
    assert isinstance(found, Drawn)
    return found


def _noisy(x: Drawn[Tensor], temperature: Tensor) -> Tensor:
    """softmax((scores + noise g) / temperature) [B,H,T,S]."""
    scores = logits(x)
    heads, repeat = x.q.shape[1], x.q.shape[1] // x.k.shape[1]
    hidden = scores <= torch.finfo(scores.dtype).min / 2
    if x.noise:
        assert x.layer is not None
        where = x.k_pos[:, None].expand(-1, x.k.shape[1], -1)
        if x.kept_pos is not None:
            where = torch.cat((x.kept_pos, where), dim=2)
        where = where.repeat_interleave(repeat, dim=1)[:, :, None]
        numbers = x.q_pos.new_ones(heads).cumsum(0)[:, None, None]
        scores = scores + x.noise * gumbel(
            x.seed, x.layer, numbers, x.q_pos[:, None, :, None], where
        )
    scores = (scores / temperature[:, None, None, None]).masked_fill(hidden, -1e30)
    found: Tensor = scores.softmax(-1) * ~hidden
    return found


# The operands of `attention`, share [B,T]. -> [B,G,P+S]: the weights that slots draw, of all heads of a group and of
# all queries, each share times; padding gives 0. Of kept slots of unequal numbers [B,G,M+S]: those of other heads give
# 0. With a temperature [B] it is a softmax over the slots alone, of
# (scores + noise g) / temperature, g: Gumbel noise, a hash (`ir/ops/noise.py`) of `seed`, the number layer [], the head
# from 1 on, the query's position and the slot's.
drawn_attention = Op(
    "drawn_attention",
    attention.schema.replace(
        ") -> Tensor",
        ", Tensor? share=None, Tensor? temperature=None, Tensor? layer=None, float noise=0.0, int seed=0) -> Tensor",
    ),
    reference=_drawn_attention,
    shape=lambda *operands, **more: _drawn_shape(Drawn[Tensor](*operands, **more)),
)


def _drawn_shape(x: Drawn[Tensor]) -> Tensor:
    slots = x.k.shape[2] + (0 if x.kept_k is None else x.kept_k.shape[2])
    return x.k.new_empty((*x.k.shape[:2], slots))
