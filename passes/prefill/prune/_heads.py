"""Query heads that are pruned with a prompt's tokens: a mask per stage, which later layers and later steps read."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from accel.ir.errors import PassError
from accel.ir.ops.attention import attention, operands_of
from accel.ir.program import Editor, Program, State
from accel.ir.region import Entry, Region
from accel.ir.state import Part, name_of
from accel.ir.trace import trace
from accel.passes.prefill._entry import added, layer_calls
from accel.passes.state.recurrent import buffer

_MASK = "heads"  # a layer's placeholder
HEAD_SCORES = name_of(Part.HEADS, detail="scores")


def attends(call: fx.Node) -> fx.Node | None:
    """The attention of a layer over its cache."""
    region = call.target
    assert isinstance(region, Region)
    nodes = (n for n in region.graph.nodes if n.target is attention.default)
    return next((n for n in nodes if "layer" in n.meta), None)


def mask_of(call: fx.Node) -> fx.Node | None:
    """The mask [B,H] that a layer's heads are multiplied with, where there is one."""
    region = call.target
    assert isinstance(region, Region)
    holders = region.graph.find_nodes(op="placeholder")
    return next((n for n in holders if n.target == _MASK), None)


def number_of_heads(program: Program, name: str) -> int:
    """H. Raises PassError where layers differ."""
    nodes = [node for call in layer_calls(program, program.step) if (node := attends(call))]
    found = {int(operands_of(node).q.meta["val"].shape[1]) for node in nodes}
    if len(found) != 1:
        raise PassError(
            f"{name}: layers of this model have {', '.join(map(str, sorted(found)))} query heads, and heads can be "
            "pruned only where all have as many; give heads = 1"
        )
    return found.pop()


def mask_heads(program: Program, firsts: list[int], heads: int) -> None:
    """The step reads `kv.heads.<stage> [B,H]` (1: kept, which all are until a prompt is pruned) in the layers behind
    each stage, which begin at `firsts`, and carries them and `kv.heads.scores [B,H]` on.
    """
    step, editor = program.step, Editor(program, program.step.graph)
    calls, outputs = layer_calls(program, step), step.output_nodes()
    letters = {"B": step.input("tokens").meta["val"].shape[0]}
    details = {"scores": 0, **{str(stage): 1 for stage in range(1, len(firsts) + 1)}}
    for detail, fill in details.items():
        state = State(Part.HEADS, None, "float32", ("B", heads), fill, detail=detail)
        holder = buffer(program, editor, state, letters)
        with editor.graph.inserting_before(editor.graph.find_nodes(op="output")[0]):
            outputs[state.output] = editor.call(torch.ops.aten.clone.default, holder)
        if detail.isdigit():
            ends = [*firsts[1:], len(calls)]
            for call in calls[firsts[int(detail) - 1] : ends[int(detail) - 1]]:
                _mask(program, call, holder)
    step.set_outputs(outputs)


def _mask(program: Program, call: fx.Node, holder: fx.Node) -> None:
    region, node = call.target, attends(call)
    assert isinstance(region, Region)
    if node is None:
        return
    with region.graph.inserting_after(region.graph.find_nodes(op="placeholder")[-1]):
        inside = region.graph.placeholder(_MASK)
    inside.meta["val"] = holder.meta["val"]
    call.args = (*call.args, holder)
    users, editor = list(node.users), Editor(program, region.graph)
    with region.graph.inserting_before(node.next):
        made: fx.Node = trace(editor, "heads", _times, node, inside, like=node)
    for user in users:
        user.replace_input_with(node, made)


def _times(out: Tensor, head_mask: Tensor) -> Tensor:
    return out * head_mask[:, :, None, None]


def add_scores(program: Program, entry: Entry, calls: list[fx.Node], score: fx.Node) -> fx.Node:
    """Head scores [B,H], and to them what each of these layers' heads gave for real tokens, summed over its size."""

    def summed(out: Tensor, positions: Tensor, *mask: Tensor) -> Tensor:
        real = (positions >= 0)[:, None, :, None]
        size = (out.abs() * real).sum((2, 3))
        return size * mask[0] if mask else size

    for call in calls:
        region, node, mask = call.target, attends(call), mask_of(call)
        assert isinstance(region, Region) and node is not None
        operands = [node, operands_of(node).q_pos, *([] if mask is None else [mask])]
        with region.graph.inserting_before(region.graph.find_nodes(op="output")[0]):
            made = trace(Editor(program, region.graph), "sizes", summed, *operands, like=node)
        item = added(call, made)
        with entry.graph.inserting_before(entry.graph.find_nodes(op="output")[0]):
            score = Editor(program, entry.graph).call(torch.ops.aten.add.Tensor, score, item)
    return score


def choose_heads(
    program: Program, entry: Entry, scores: fx.Node, stage: int, count: int
) -> fx.Node:
    """The mask of a stage: the `count` heads with the highest scores, of those that the stage before left."""
    mask_input, before = entry.input(mask_name(stage)), []
    if stage > 1:
        before.append(entry.input(mask_name(stage - 1)))

    def mask(scores: Tensor, positions: Tensor, current: Tensor, *before: Tensor) -> Tensor:
        left = scores.masked_fill(before[0] == 0, -1) if before else scores
        best = left.topk(count, dim=1).indices
        found = torch.zeros_like(scores).scatter(1, best, torch.ones_like(best).to(scores.dtype))
        real = (positions >= 0).any(
            1, keepdim=True
        )  # a row that has no token in this call keeps its own
        return torch.where(real, found, current)

    with entry.graph.inserting_before(entry.graph.find_nodes(op="output")[0]):
        made: fx.Node = trace(
            Editor(program, entry.graph),
            "heads",
            mask,
            scores,
            entry.input("positions"),
            mask_input,
            *before,
        )
    return made


def mask_name(stage: int) -> str:
    """The state that holds the mask of a stage."""
    return name_of(Part.HEADS, detail=str(stage))
