"""Two graphs of the same results, of which a call runs one: an If over values of the graph around it.

State stays in place: a branch's result is written where the If's own result lies, which is bound to the
memory that the branch reads. What every layer reads alike (masks, the positions of rope) is computed
outside, once, as without branches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx
from onnx import helper

from accel.lowering.onnx.writer.builder import DTYPES, Builder

SEEDS = ("positions", "slots", "rows", "tree")  # of a call, not of a layer


def either(
    b: Builder,
    condition: str,
    then: Callable[[], Sequence[str]],
    otherwise: Callable[[], Sequence[str]],
    values: Sequence[object],
) -> tuple[str, ...]:
    """Run what `then` writes where the bool [] holds, else what `otherwise` writes; both return as many
    values. `values`: the fake tensors of these.
    """
    names = [b.name(f"If.{i}") for i in range(len(values))]
    b.meta.update(zip(names, values, strict=True))
    graphs = {
        "then_branch": _branch(b, "then", then, values),
        "else_branch": _branch(b, "else", otherwise, values),
    }
    b.nodes.append(helper.make_node("If", [b.use(condition)], names, name=names[0], **graphs))
    return tuple(names)


def _branch(
    b: Builder, name: str, write: Callable[[], Sequence[str]], values: Sequence[object]
) -> onnx.GraphProto:
    """What `write` adds to the builder, as a graph of its own."""
    outside = b.nodes, b.reused, b.vectors, b.above
    b.above = b.above or (b.nodes, b.reused)
    b.nodes, b.reused, b.vectors = [], dict(b.reused), dict(b.vectors)
    try:
        found = [b.use(value) for value in write()]
        outputs = [b.name(f"{name}.{i}") for i in range(len(found))]
        made = {o for n in b.nodes for o in n.output}
        alone = [value in made and found.count(value) == 1 for value in found]
        outputs = [v if own else o for v, o, own in zip(found, outputs, alone, strict=True)]
        for value, output, own in zip(found, outputs, alone, strict=True):
            if not own:
                b.nodes.append(helper.make_node("Identity", [value], [output], name=output))
        if b.variant is not None:
            b.variant.join(b, outputs)
        b.prune(outputs)
        infos = [_info(o, v) for o, v in zip(outputs, values, strict=True)]
        return helper.make_graph(b.nodes, f"{b.scope}{name}", [], infos)
    finally:
        b.nodes, b.reused, b.vectors, b.above = outside


def _info(name: str, value: object) -> onnx.ValueInfoProto:
    """The type of a result; its sizes, where they are numbers."""
    sizes = [d if isinstance(d, int) else None for d in value.shape]  # type: ignore[attr-defined]
    return helper.make_tensor_value_info(name, DTYPES[value.dtype], sizes)  # type: ignore[attr-defined]
