"""Results over keys that lie in no slot, which attention takes in."""

from __future__ import annotations

import operator

from torch import fx

from accel.ir.ops.attention import merge_attention, operands_of
from accel.ir.ops.op import set_operand
from accel.ir.program import Editor


def take_in(editor: Editor, node: fx.Node, value: fx.Node, lse: fx.Node) -> None:
    """Let an attention merge a result over more keys: value [B,H,T,Dv] and its log-sum-exp [B,H,T]. One that merges
    another already, as of a token's own copies, merges both.
    """
    x = operands_of(node)
    if x.beside is not None:
        with editor.graph.inserting_before(node):
            both = editor.call(
                merge_attention.default, x.beside, x.beside_lse, value, lse, like=node
            )
            value, lse = (editor.call(operator.getitem, both, i, like=node) for i in range(2))
    set_operand(node, "beside", value)
    set_operand(node, "beside_lse", lse)
