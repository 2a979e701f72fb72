"""The joint of methods whose deeper layers hold fewer tokens of a prompt: slots of their own, and the step in parts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from accel.ir.entries.compress import COMPRESS, query_positions_of
from accel.ir.entries.prompt import part_of
from accel.ir.errors import PassError
from accel.ir.invariants import Invariant
from accel.ir.ops.op import operand_of
from accel.ir.prefill import Pick, Prefill
from accel.ir.program import Editor, Program, State, ancestors
from accel.ir.region import Region
from accel.ir.sizes import grows
from accel.ir.state import Part, output_of
from accel.ir.trace import Renamed
from accel.passes import Report
from accel.passes.clean.clean import remove_dead
from accel.passes.prefill._entry import layer_calls
from accel.passes.prefill.prune import Base
from accel.passes.prefill.prune._cut import ending, scoring
from accel.passes.prefill.prune._heads import mask_heads, number_of_heads
from accel.passes.state.slots import own_positions, positions_name

STAGED = Base.breaks | {  # by a method whose layers hold different tokens
    Invariant.CALL_INDEPENDENT,
    Invariant.TOKENS_CONTIGUOUS,
    Invariant.UNIFORM_SLOTS,
}
_SLOTS = 73  # example number of slots while shapes are worked out


def staged(
    program: Program, method: Base, name: str, plan: Mapping[int, Pick], heads: Sequence[float] = ()
) -> Report:
    """Let layers after each of these see what `method` picks there of a prompt, and the step in parts, the entries
    `prompt.<n>`. `heads`: the share of the query heads that stays after each stage, those with the largest
    outputs so far; none: all heads stay. Raises PassError where the model cannot be cut so.
    """
    _check_state(program, name)
    layers, count = sorted(plan), len(program.facts.layers)
    if layers[-1] == count - 1:
        raise PassError(
            f"{name}: no layer comes after layer {layers[-1]} of {count}, so no layer would run on "
            "fewer tokens; give an earlier layer"
        )
    for stage, layer in enumerate(layers, 1):
        own_slots(program, layer + 1, stage)
    firsts = [0, *(layer + 1 for layer in layers)]
    kept = [0] * len(layers)
    if heads:
        every = number_of_heads(program, name)
        kept = [max(1, math.floor(every * share + 1e-9)) for share in heads]
        mask_heads(program, firsts[1:], every)
    for number, (first, last) in enumerate(zip(firsts, layers, strict=False)):
        program.entries[part_of(number)] = scoring(
            program, first, last, method, whole=True, stage=number + 1, heads=kept[number]
        )
    program.entries[part_of(len(layers))] = ending(program, firsts[-1])
    program.facts.prefill = Prefill(stages=tuple(plan[layer] for layer in layers))
    where = ", ".join(map(str, layers))
    word = "layer" if len(layers) == 1 else "layers"
    program.facts.notes.append(f"{name} picks a prompt's tokens at {word} {where}")
    return Report(changed=count - firsts[1])


def _check_state(program: Program, method: str) -> None:
    """Raise PassError where what the model keeps of a token cannot differ from layer to layer."""
    reason = None
    if "commit" in program.entries:
        reason = (
            "deeper layers use other slots, but a draft tree needs the same slots in all layers; "
            "draft chains (tree = chain), or use gemfilter"
        )
    elif any(s.part is Part.RECURRENT for s in program.state):
        reason = (
            "a rewind recomputes recurrent state from the tokens, but deeper layers saw only "
            "some of them; leave prefill.prune out for this model, or use gemfilter"
        )
    elif any(layer.shares is not None for layer in program.facts.layers):
        reason = (
            "layers of this model read keys of other layers, which hold other tokens; leave prefill.prune "
            "out for it, or use gemfilter"
        )
    if reason:
        raise PassError(f"{method}: {reason}")


def own_slots(program: Program, first: int, stage: int) -> None:
    """Layers from `first` on write slots of their own, whose positions are `kv.pos.<stage> [B,C<stage>]`:
    as many before a call's tokens as hold earlier ones.
    """
    step, graph = program.step, program.step.graph
    editor, calls = Editor(program, graph), layer_calls(program, step)[first:]
    letter, old = f"C{stage}", positions_name(stage - 1)
    before, written = step.input(old).meta["val"], step.output_nodes()[output_of(old)]
    slots = operand_of(written, "slots")
    at, positions = own_positions(program, stage, written)
    held = step.input(positions_name(stage))
    own = {s.name: _letters(s, letter) for s in program.state if (s.layer or 0) >= first}
    renamed = Renamed(editor, *_sizes(program, editor, own, [before], [held.meta["val"]]))
    for call in calls:
        call.args = tuple({written: positions, slots: at}.get(a, a) for a in call.args)
        _rename(call, renamed)
    for node in graph.nodes:  # what the step says of a layer outside of it
        if node.meta.get("layer", -1) >= first and not isinstance(node.target, Region):
            node.replace_input_with(written, positions)
            node.meta["val"] = renamed(node.meta["val"])
    _choose_apart(program, first, stage, old, renamed)
    for index, value in enumerate(program.state):
        if value.name in own and grows(value.shape):
            program.state[index] = replace(value, shape=own[value.name])
            holder = step.input(value.name)
            holder.meta["val"] = renamed(holder.meta["val"])


def _sizes(
    program: Program,
    editor: Editor,
    state_shapes: Mapping[str, tuple[int | str, ...]],
    before: list[Tensor],
    now: list[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """Values before and after, which hold every size that changes: C, and C/16 of pages, a size of its own."""
    symbols: dict[int | str, Any] = {}
    for name, letters in state_shapes.items():
        value = program.step.input(name).meta["val"]
        for axis, letter in enumerate(letters):
            if isinstance(letter, str) and "/" in letter and letter not in symbols:
                symbols[letter] = editor.symbol(letter, _SLOTS + 20 + len(symbols))
                with editor.fake:
                    before.append(value.new_empty((value.shape[axis],)))
                    now.append(value.new_empty((symbols[letter],)))
    return before, now


def _choose_apart(program: Program, first: int, stage: int, old: str, renamed: Renamed) -> None:
    """Let `compress` choose among a layer's own slots from `first` on: its nodes for these layers again, over the
    positions of the stage and the queries of its tokens.
    """
    entry = program.entries.get(COMPRESS.name)
    if entry is None:
        return
    graph, outputs = entry.graph, entry.output_nodes()
    layers = {s.output: s.layer for s in program.state}
    if shared := [name for name in outputs if layers[name] is None]:
        raise PassError(
            f"'{shared[0]}' is one for all layers, but layers hold different tokens of a pruned prompt; leave "
            "prefill.prune out, or use gemfilter"
        )
    late = {n: v for n, v in outputs.items() if (layers[n] or 0) >= first}
    needed = ancestors(list(late.values()), set())
    own = {s.name for s in program.state if s.layer is not None and s.layer >= first}
    before = query_positions_of(stage - 1)
    names = {
        old: positions_name(stage),
        before: query_positions_of(stage),
    }
    copies: dict[fx.Node, fx.Node] = {}
    for node in [n for n in graph.nodes if n in needed]:
        name = str(node.target)
        if node.op != "placeholder":
            with graph.inserting_before(next(iter(graph.find_nodes(op="output")))):
                copies[node] = graph.node_copy(node, lambda n: copies.get(n, n))
        elif name in names:
            with graph.inserting_after(node):
                copies[node] = graph.placeholder(names[name])
            copies[node].meta["val"] = node.meta["val"]
        elif name in own:
            node.meta["val"] = renamed(node.meta["val"])
            continue
        else:
            continue
        copies[node].meta = {**node.meta, "val": renamed(node.meta["val"])}
    entry.set_outputs({**outputs, **{n: copies[v] for n, v in late.items()}})
    remove_dead(graph)


def _letters(value: State, letter: str) -> tuple[int | str, ...]:
    """Its sizes over slots of its own: C -> C1, C/16 -> C1/16."""
    return tuple(
        "/".join([letter, *size.split("/")[1:]])
        if isinstance(size, str) and size.startswith("C")
        else size
        for size in value.shape
    )


def _rename(call: fx.Node, renamed: Renamed) -> None:
    """Let the values of a layer have the new number of slots."""
    region = call.target
    assert isinstance(region, Region)
    for node in (call, *call.users, *region.graph.nodes):
        if "val" in node.meta:
            node.meta["val"] = renamed(node.meta["val"])
