"""The outputs of a graph."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import helper

from accel.lowering.onnx.writer.builder import Builder


def name_outputs(b: Builder, outputs: Mapping[str, str]) -> None:
    """Give values their names as outputs: their own node writes them where it can, so that no copy is made."""
    for name, value in outputs.items():
        b.nodes.append(helper.make_node("Identity", [b.use(value)], [name], name=f"output.{name}"))
    made = {o for n in b.nodes for o in n.output}
    new = {}
    for name, value in outputs.items():
        if value in made and value not in new and list(outputs.values()).count(value) == 1:
            new[value] = name
    b.nodes = [
        n
        for n in b.nodes
        if not (n.op_type == "Identity" and n.input[0] in new and n.output[0] == new[n.input[0]])
    ]
    for node in b.nodes:
        _rename(node, new)


def _rename(node: onnx.NodeProto, new: Mapping[str, str]) -> None:
    """Give values other names, in the graphs inside a node too."""
    for side in (node.input, node.output):
        for i, value in enumerate(side):
            if value in new:
                side[i] = new[value]
    for attribute in node.attribute:
        for inner in attribute.g.node:
            _rename(inner, new)
