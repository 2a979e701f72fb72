"""What a layer keeps of its slots, as a function of tensors: scores, protected tokens, counts, the choice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from accel.ir.errors import PassError
from accel.ir.ops import ragged
from accel.ir.ops.attention import Form
from accel.passes.kv import absorbed, moves
from accel.passes.kv._shared import low
from accel.passes.kv.inputs import call
from accel.passes.kv.inputs.attends import attention_over
from accel.passes.kv.keep import Base as Keep
from accel.passes.kv.methods import Methods
from accel.passes.kv.refine import Base as Refine
from accel.passes.kv.score import Base as Score

_FAR = 1 << 40  # after every position
TABLE = "table."  # of an operand that is a constant
_LARGE = 1e30  # of scores that a refine gets
_NOTHING = -torch.finfo(torch.float32).max  # the score of a slot that holds nothing
CHOSEN, STAYS = "choice.slots", "choice.positions"  # operands that are a layer's before


def scorer(step: Methods, names: list[str], form: Form) -> Callable[..., dict[str, Tensor]]:
    """A function of tensors, by these names: the `scores` [B,G,S] of a layer's slots, protected tokens first, and
    their `positions`.
    """

    def rank(*operands: Tensor) -> dict[str, Tensor]:
        named = _named(step, _spread(dict(zip(names, operands, strict=True))), form)
        scores = _scores(step.score, named)
        where = named["positions"]
        return {
            "scores": _protected(step.score, scores, where, named["seen"]),
            "positions": where,
        }

    return rank


def _scores(method: Score | Refine, named: Mapping[str, Any]) -> Tensor:
    """What it says of each slot. Raises PassError where these are not scores [B,G,S]."""
    scores: Tensor = call(method, named).float()
    if scores.dim() != 3:
        raise PassError(
            f"{type(method).__name__} gives scores of shape {list(scores.shape)}; give one for each KV head and slot, "
            "[B,G,S]"
        )
    return scores


def _carried(names: Iterable[str]) -> list[str]:
    """Values per token beside keys and values."""
    there = set(names)
    plain = (name.removeprefix("kept_") for name in names)
    return [name for name in plain if f"kept_{name}.recent" in there]


def _spread(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """A layer's operands, what was kept as [B,G,P,…] also where it is stored otherwise."""
    if "kept_counts" not in x:
        return x
    where, real = ragged.places(x["kept_counts"], x["held"])
    names = ["k", *(["v"] if "kept_v" in x else []), *_carried(x)]
    out = {f"kept_{name}": ragged.spread(x[f"kept_{name}"], where) for name in names}
    out["kept_pos"] = ragged.spread(x["kept_pos"], where).masked_fill(~real, -1)
    return x | out


def _named(step: Methods, x: dict[str, Tensor], form: Form) -> dict[str, Any]:
    """What methods may name, of a layer's operands `x`."""
    groups = x["kept_k"].shape[1]
    recent = x["recent_pos"][:, None].expand(-1, groups, -1)
    where = torch.cat((x["kept_pos"], recent), dim=2)  # [B,G,S]
    after = x["seen"][:, None, None]
    held = where.masked_fill(where >= after, -1)
    where = held.masked_fill(~form.visible(after, held), -1)
    named: dict[str, Any] = {
        "keys": torch.cat((x["kept_k"], x["recent_k"]), dim=2),
        "positions": where,
        "seen": x["seen"],
        "keep": x["keep"],
    }
    named |= attention_over(form, x, named["keys"], held)
    shared = "kept_v" not in x  # a latent, which keys and values share
    named["values"] = named["keys"] if shared else torch.cat((x["kept_v"], x["recent_v"]), dim=2)
    for one in step.inputs:
        named |= one.read(x)
    named |= {
        name: torch.cat((x[f"kept_{name}"], x[f"kept_{name}.recent"]), dim=2)
        for name in _carried(list(x))
    }
    return named | {n.removeprefix(TABLE): value for n, value in x.items() if n.startswith(TABLE)}


def chooser(
    step: Methods, names: list[str], form: Form, interleaved: bool = False
) -> Callable[..., dict[str, Tensor]]:
    """A function of tensors, by these names: what a layer keeps of the slots that it has, beyond those
    that no later query of its mask sees. `interleaved`: how its keys are rotated.
    """
    carried = _carried(names)

    def cut(*operands: Tensor) -> dict[str, Tensor]:
        x = _spread(dict(zip(names, operands, strict=True)))
        named = _named(step, x, form)
        named["ranks"] = x["ranks"]
        shared = "kept_v" not in x
        if CHOSEN in x:
            chosen, stays = x[CHOSEN], x[STAYS]
        else:
            chosen, stays = _chosen(step, x, named)
        named |= {"chosen": chosen, "real": stays >= 0}
        if "room" in x:
            out = _one_after_another(step.keep, named, stays, x["room"], not shared, carried)
            return out | absorbed.written(step.keep, named, x) | {CHOSEN: chosen, STAYS: stays}
        index = chosen[..., None].expand(-1, -1, -1, named["keys"].shape[3])
        out = {"k": named["keys"].gather(2, index), "pos": stays}
        if step.keep.moves:
            now = x["ranks"].expand_as(stays).masked_fill(stays < 0, -1)
            tables = x[moves.COS], x[moves.SIN], interleaved
            out["k"] = moves.turn(out["k"], now - stays, *tables)
            out["pos"] = now
        if step.keep.makes:
            out |= _made(step.keep, named, out, tables)
        elif not shared:
            out["v"] = call(step.keep, named)
        out |= {name: named[name].gather(2, chosen) for name in carried}
        out |= absorbed.written(step.keep, named, x)
        if step.keep.demotes:
            out |= low.demoted(step.keep, named, x, form)
        return out | {CHOSEN: chosen, STAYS: stays}

    return cut


def _made(
    keep: Keep, named: Mapping[str, Any], taken: Mapping[str, Tensor], turn: tuple[Any, ...]
) -> dict[str, Tensor]:
    """Keys and values of the places that are `taken`, which the method makes; where nothing goes, those of before."""
    where = named["positions"]
    plain = moves.unturned(named["keys"], where, *turn)
    keys, values = call(keep, {**named, "keys": plain})
    keys = moves.turn(keys, taken["pos"].clamp(min=0), *turn)
    goes = ((where >= 0).sum(2) > named["real"].sum(2))[..., None, None]
    index = named["chosen"][..., None].expand(-1, -1, -1, values.shape[3])
    before = named["values"].gather(2, index)
    return {"k": torch.where(goes, keys, taken["k"]), "v": torch.where(goes, values, before)}


def _one_after_another(
    keep: Keep,
    named: Mapping[str, Any],
    stays: Tensor,
    room: Tensor,
    values: bool,
    carried: Iterable[str],
) -> dict[str, Tensor]:
    """What stays of all heads in one list of as many slots as `room` [M]: rows of keys and values are taken from
    where they lie.
    """
    counts = (stays >= 0).sum(2)  # [B,G]
    owner, rank, real = ragged.ranked(counts, room)  # [B,M]
    rank = rank.clamp(max=stays.shape[2] - 1)
    at = owner * stays.shape[2] + rank

    def taken(
        x: Tensor, index: Tensor
    ) -> Tensor:  # x [B,G,S,…], index [B,M] into its slots -> [B,1,M,…]
        index = index[:, None]
        if x.dim() == 4:
            index = index[..., None].expand(-1, -1, -1, x.shape[3])
        return x.flatten(1, 2)[:, None].gather(2, index)

    slots = owner * named["keys"].shape[2] + taken(named["chosen"], at)[:, 0]
    pos = taken(stays, at).masked_fill(~real[:, None], -1)
    out = {"k": taken(named["keys"], slots), "pos": pos, "counts": counts}
    if values:
        changed = keep.merges  # else those of the chosen slots
        out["v"] = taken(call(keep, named), at) if changed else taken(named["values"], slots)
    return out | {name: taken(named[name], slots) for name in carried}


def _chosen(step: Methods, x: Mapping[str, Tensor], named: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The slots that stay [B,G,N], in the order of their positions, and these (-1: there are fewer). The scores are
    `named` then.
    """
    where = named["positions"]
    scores = _scores(step.score, named)
    named["scores"] = _protected(step.score, scores, where, x["seen"])
    counts = x["counts"] if "counts" in x else call(step.budget.heads, named)  # [B,G]
    if step.refines:
        named |= {"counts": counts, "scores": scores}
        named["scores"] = _refined(step, named)
        where = where.masked_fill(named["scores"] <= _NOTHING, -1)  # what goes all the same
    # [B,G,N], best first, of equal ones the newest
    chosen = named["scores"].flip(2).topk(x["ranks"].shape[0], dim=2).indices
    chosen = where.shape[2] - 1 - chosen
    stays = where.gather(2, chosen)
    stays = stays.masked_fill(x["ranks"] >= counts[..., None], -1)
    order = stays.masked_fill(stays < 0, _FAR).sort(dim=2).indices
    return chosen.gather(2, order), stays.gather(2, order)


def _refined(step: Methods, named: Mapping[str, Any]) -> Tensor:
    """The scores after the chain: each method gets finite ones. What had no finite score before a method has none
    after it. The score of a token that goes even where there is room is that of an empty slot.
    """
    where, scores = named["positions"], named["scores"]
    age = named["seen"][:, None, None] - 1 - where
    stays = (where >= 0) & ((where < step.score.sinks) | (age < step.score.recent))
    real, lost = where >= 0, torch.zeros_like(stays)
    for one in step.refines:
        real = real & (scores > -_LARGE)  # NaN: False
        least = scores.masked_fill(~real, _LARGE).amin(2, keepdim=True)
        least = least.masked_fill(~real.any(2, keepdim=True), 0)
        finite = torch.where(real, scores, least).clamp(max=_LARGE)
        scores = _scores(one, {**named, "scores": finite, "protected": stays})
        lost = lost | (real & (scores == -torch.inf))
    scores = scores.masked_fill(~real, float("nan"))
    scores = _protected(step.score, scores, where, named["seen"])
    for one in reversed(step.refines):
        if one.first is not None:
            place = call(one.first, {**named, "protected": stays}).float()
            lost = lost & (place <= 0)
            scores = torch.where(place > 0, -_NOTHING * (0.75 + place / 4), scores / 2)
    return scores.masked_fill((where < 0) | (lost & ~stays), _NOTHING)


def _protected(score: Score, scores: Tensor, where: Tensor, seen: Tensor) -> Tensor:
    """What stays whatever its score gets the highest, empty slots the lowest, and no number the lowest
    of a real one. Where not even the former have room: the first tokens, then the newest.
    """
    far = torch.finfo(torch.float32).max
    scores = torch.nan_to_num(scores, nan=-far / 2).clamp(-far / 2, far / 2)
    age = seen[:, None, None] - 1 - where  # 0: the newest
    late = torch.where(where < score.sinks, where - score.sinks, age)  # the order of what stays
    most = score.sinks + 1 + seen.clamp(max=score.recent)[:, None, None]
    share = (late + score.sinks).to(scores.dtype) / most
    first = far * (1 - share / 4)
    scores = torch.where((where < score.sinks) | (age < score.recent), first, scores)
    return scores.masked_fill(where < 0, -far)
