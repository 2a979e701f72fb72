"""Whose tokens an axis of an attention counts: the decoder's [B,T] or the encoder's [B,X]."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx

from accel.ir.capture.encoder import FEATURES, INPUT_POSITIONS
from accel.ir.errors import PassError
from accel.ir.program import Editor, Program
from accel.ir.region import sizes

aten = torch.ops.aten
_FRAMES = "frames"  # 0 .. X-1, where every row has the same X
_TRIED = 9  # tokens of a mask that is tried out


def of_encoder(program: Program, node: fx.Node) -> bool:
    """Whether a query, key or value [B,H,S,D] belongs to the encoder's tokens."""
    return sizes(node)[2] != sizes(program.step.input("positions"))[1]


def reach(program: Program, node: fx.Node) -> int:
    """How many positions the tokens of a query, key or value may have."""
    facts = program.facts
    return (
        facts.encoder.max_length
        if facts.encoder and of_encoder(program, node)
        else facts.max_context
    )


def positions_of(program: Program, width: str) -> fx.Node:
    """The positions [B,S], -1 at padding, of as many tokens as a symbol or a number says."""
    step = program.step
    if width == sizes(step.input("positions"))[1]:
        return step.input("positions")
    found = None
    if INPUT_POSITIONS in step.inputs:
        found = step.input(INPUT_POSITIONS)
    elif FEATURES in step.inputs and width.isdigit():
        found = _frames(program, int(width))
    if found is None or sizes(found)[1] != width:
        raise PassError(
            f"an attention over {width} keys: neither one per token nor one per encoder "
            "position; accel supports these two only"
        )
    return found


def _frames(program: Program, count: int) -> fx.Node:
    """[B,X]: 0 .. X-1 in every row; made once."""
    graph, features = program.step.graph, program.step.input(FEATURES)
    made: list[fx.Node] = [n for n in graph.find_nodes(op="get_attr") if n.target == _FRAMES]
    if made:
        return next(iter(made[0].users))
    editor = Editor(program, graph)
    last = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last):
        row = editor.param(_FRAMES, torch.arange(count)[None])
    with graph.inserting_after(row):
        batch = editor.call(aten.sym_size.int, features, 0)
    with graph.inserting_after(batch):
        return editor.call(aten.expand.default, row, [batch, count])


def shows_padding(program: Program, keys: fx.Node, look: Callable[[Tensor], Tensor]) -> bool:
    """Whether a mask over the encoder's tokens lets a real one see padding, which attention by
    position never does. `look` gives what is visible [h,T,S] at positions [1,T].
    """
    if INPUT_POSITIONS not in program.step.inputs or not of_encoder(program, keys):
        return False
    positions = torch.arange(_TRIED)[None]
    positions[:, -2:] = -1
    return bool(look(positions)[..., :-2, -2:].any())
