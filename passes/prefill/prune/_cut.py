"""The joint: parts of the step as entries of their own, up to a layer whose scores select a prompt's tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from accel.ir.errors import PassError
from accel.ir.ops.attention import operands_of
from accel.ir.ops.mass import attention_weights
from accel.ir.program import Editor, Program, ancestors
from accel.ir.region import Entry, Region
from accel.ir.state import output_of
from accel.ir.trace import trace
from accel.passes.kv.inputs import call as call_named
from accel.passes.kv.inputs import parameters
from accel.passes.prefill._entry import added, copied, finished, observed, result, states
from accel.passes.prefill.prune._heads import (
    HEAD_SCORES,
    add_scores,
    attends,
    choose_heads,
    mask_name,
    mask_of,
)

_SCORED = 29  # example number of tokens that were scored before
_BY_QUERY = ("tree", "first", "pages")  # what attention reads of the call's own tokens
_OF_QUERY = ("q", "beside", "beside_lse")


class Scoring(Protocol):
    """What gives scores of tokens: see `passes.prefill.prune.Base`."""

    @property
    def every(self) -> bool:
        """Whether all layers score."""

    @property
    def observe(self) -> int:
        """Whether `rows` says which queries it reads; 0: all."""

    @property
    def score(self) -> Callable[..., Tensor]:
        """The scores."""


def scoring(
    program: Program,
    first: int,
    last: int,
    method: Scoring,
    *,
    whole: bool,
    stage: int = 0,
    heads: int = 0,
) -> Entry:
    """The step's layers `first` .. `last` as an entry, which gives `scores [B,C]`: of the token in each slot, by the
    queries of `rows [B,N]` (-1: none) at the last layer, or at each.

    It takes the state of its layers, `stream [B,T,E]`, what leaves the layer before, where there is one, and where the
    score names it `before [B,A]`. `whole`: the last layer runs to its end and gives `stream_out`; else no more
    of it is computed than the scores need. `heads`: how many query heads the layers behind it read, as stage `stage`
    says; 0: all.
    """
    entry, calls = copied(program, first, last)
    written, call = states(program, entry, calls), calls[-1]
    if attends(call) is None:
        raise PassError(
            f"{program.facts.name}: the attention of layer {last}, which scores a prompt's tokens, lies under a "
            "condition of its own; prune prompts with a depth method of whole layers, such as by-call, or with none"
        )
    scored = [c for c in calls if attends(c) is not None] if method.every else [call]
    before: fx.Node | None = None
    stored: set[int] = set()
    if "before" in parameters(method.score):
        before = _before(program, entry, scored[0])
    for one in scored:
        before, stored = _scores(program, entry, one, method, before)
    assert before is not None
    found = {"scores": before, **({"stream_out": result(call, 0)} if whole else {})}
    if heads:
        sums = add_scores(program, entry, scored, entry.input(HEAD_SCORES))
        found[output_of(HEAD_SCORES)] = sums
        found[output_of(mask_name(stage))] = choose_heads(program, entry, sums, stage, heads)
    if whole:
        found |= {**observed(entry, first, last), **dict(written)}
    kept = {s.output for s in program.state if s.positions}
    for name, node in () if whole else written:
        of = node.args[0] if node.args else None
        if name in kept or (of in calls and (of is not call or node.args[1] in stored)):
            found[name] = node
    return finished(entry, calls, found)


def beginning(program: Program, last: int) -> Entry:
    """The step's layers up to `last` as an entry that gives `stream_out [B,T,E]`, what leaves it, and their state."""
    entry, calls = copied(program, 0, last)
    found = {"stream_out": result(calls[-1], 0), **dict(states(program, entry, calls))}
    return finished(entry, calls, found)


def ending(program: Program, first: int) -> Entry:
    """The step's layers from `first` on, and its head, as an entry that takes `stream [B,T,E]`."""
    entry, calls = copied(program, first, len(program.facts.layers) - 1)
    before = entry.output_nodes()
    found = {"logits": before["logits"], **dict(states(program, entry, calls))}
    found |= observed(entry, first, len(program.facts.layers) - 1)
    return finished(entry, calls, found)


def _before(program: Program, entry: Entry, call: fx.Node) -> fx.Node:
    """The scores so far, for each slot of a layer: the input `before [B,A]`, then 0."""
    node, region = attends(call), call.target
    assert node is not None and isinstance(region, Region)
    holders = list(region.graph.find_nodes(op="placeholder"))
    held = call.args[holders.index(operands_of(node).k_pos)]
    assert isinstance(held, fx.Node)
    editor = Editor(program, entry.graph)
    sizes = (held.meta["val"].shape[0], editor.symbol("A", _SCORED))
    holder = editor.placeholder("before", sizes, torch.float32)

    def wide(scores: Tensor, positions: Tensor) -> Tensor:
        place = torch.arange(positions.shape[1], device=scores.device)
        index = place.clamp(max=scores.shape[1] - 1)[None].expand(scores.shape[0], -1)
        return scores.gather(1, index).masked_fill(place >= scores.shape[1], 0)

    with entry.graph.inserting_before(call):
        made: fx.Node = trace(editor, "before", wide, holder, held)
    return made


def _scores(
    program: Program, entry: Entry, call: fx.Node, method: Scoring, before: fx.Node | None
) -> tuple[fx.Node, set[int]]:
    """Let a layer give its scores too: these, and which of its results its keys are stored in."""
    region, node = call.target, attends(call)
    assert isinstance(region, Region) and node is not None
    editor, names = Editor(program, region.graph), parameters(method.score)
    form = vars(operands_of(node))
    read = {name: n for name, n in form.items() if isinstance(n, fx.Node) and name not in _BY_QUERY}
    rest = {n: v for n, v in form.items() if not isinstance(v, fx.Node)}
    rest |= dict.fromkeys(("tree", "first", "pages"))
    extra = {"rows": entry.input("rows")}
    if before is not None and "before" in names:
        extra["before"] = before
    for name, outer in extra.items():
        with region.graph.inserting_after(region.graph.find_nodes(op="placeholder")[-1]):
            holder = region.graph.placeholder(name)
        holder.meta["val"] = outer.meta["val"]
        call.args = (*call.args, outer)
        read[name] = holder
    mask = mask_of(call)
    if mask is not None:
        read["heads"] = mask

    def worth(*values: Tensor) -> Tensor:
        x: dict[str, Any] = {**rest, **dict(zip(read, values, strict=True))}
        rows, so_far, kept = (x.pop(name, None) for name in ("rows", "before", "heads"))
        if method.observe:
            real = rows.clamp(min=0)
            for name in [n for n in _OF_QUERY if x.get(n) is not None]:
                size = x[name].shape  # [B,H,T,..]
                index = real[:, None, :, *[None] * (len(size) - 3)]
                x[name] = x[name].gather(2, index.expand(-1, size[1], -1, *size[3:]))
            x["q_pos"] = x["q_pos"].gather(1, real).masked_fill(rows < 0, -1)
        named = {
            "queries": x["q"],
            "query_positions": x["q_pos"],
            "keys": x["k"],
            "positions": x["k_pos"],
            "before": so_far,
        }
        if "weights" in names:
            drawn = attention_weights(**x)  # kept slots come first
            drawn = drawn if kept is None else drawn * kept[:, :, None, None]
            named["weights"] = drawn[..., drawn.shape[3] - x["k"].shape[2] :]
        scores: Tensor = call_named(method.score, named).float()
        return scores

    key = "prune", method, *rest.items(), *read
    with region.graph.inserting_before(region.graph.find_nodes(op="output")[0]):
        made: fx.Node = trace(
            editor, f"{region.name}.prune", worth, *read.values(), like=node, key=key
        )
    (out,) = region.graph.find_nodes(op="output")
    results, needed = out.args[0], ancestors([operands_of(node).k], set())
    assert isinstance(results, tuple)
    stored = {place for place, value in enumerate(results) if value in needed and place}
    return added(call, made), stored
