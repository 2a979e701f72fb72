"""Remove what exporting left behind: assertions, no-op casts and copies, writes by piece, duplicates, dead code."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from accel.ir.program import Program
from accel.passes import Pass, Report
from accel.passes.clean.filled import join_pieces

aten = torch.ops.aten
_ASSERTS = {
    aten._assert_tensor_metadata.default,
    aten._assert_async.msg,
    aten._assert_scalar.default,
    aten.sym_constrain_range_for_size.default,
    aten.sym_constrain_range.default,
}
_COPIES = {
    aten.alias.default,
    aten.detach.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.lift_fresh_copy.default,
    aten.dropout.default,
}
_VIEWS = {aten.view.default, aten._unsafe_view.default}
_END = 9223372036854775807  # an open end, as slices are exported
_CASTS = {
    aten._to_copy.default,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten.type_as.default,
}


@dataclass(frozen=True)
class Clean(Pass):
    """Drop assertions, copies and casts that change nothing, repeated computations and dead nodes; join what is
    written piece by piece.

    Before and after: `tests/passes/texts/clean.before.txt`, `clean.after.txt`; of pieces
    `tests/passes/texts/pieces.before.txt`, `pieces.after.txt`.
    """

    def run(self, program: Program) -> Report:
        report = Report()
        for graph in program.graphs():
            report.changed += _drop(graph) + join_pieces(program, graph)
            report.changed += _unify(graph) + remove_dead(graph)
        forget_unused(program)
        return report


def _drop(graph: fx.Graph) -> int:
    changed = 0
    complex_ = _before_complex(graph)
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _VIEWS:  # with copies gone a value need not be contiguous
            node.target = aten.reshape.default
        if node.target in _ASSERTS:
            graph.erase_node(node)
        elif node not in complex_ and _does_nothing(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        else:
            continue
        changed += 1
    return changed


def _before_complex(graph: fx.Graph) -> set[fx.Node]:
    """Copies, casts and views that lay out what is viewed as complex, where the two numbers must be neighbours."""
    found: set[fx.Node] = set()
    for node in graph.find_nodes(op="call_function", target=aten.view_as_complex.default):
        value: Any = node.args[0]
        while value.target in {*_COPIES, *_CASTS, *_VIEWS, aten.reshape.default}:
            found.add(value)
            value = value.args[0]
    return found


def _does_nothing(node: fx.Node) -> bool:
    if node.target in _COPIES:
        return True
    if node.target in _CASTS:
        return _same(node)
    if node.target is aten.reshape.default:
        return _shape(node) == _shape(node.args[0])
    if node.target in (aten.add.Tensor, aten.mul.Tensor):
        return _neutral(node)
    return node.target is aten.slice.Tensor and node.args[2:] in ((0, _END), (0, _END, 1))


def _shape(node: Any) -> list[str]:
    return [str(d) for d in node.meta["val"].shape]


def _same(node: fx.Node) -> bool:
    """A cast to the dtype that the value has."""
    before, after = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    return bool(before.dtype == after.dtype)


def _neutral(node: fx.Node) -> bool:
    """x + 0 or x * 1, of unchanged dtype and shape."""
    x, y = node.args[:2]
    if (
        not isinstance(x, fx.Node)
        or isinstance(y, (fx.Node, bool))
        or not isinstance(y, (int, float))
    ):
        return False
    unit = 1 if node.target == aten.mul.Tensor else 0
    return y == unit and _same(node)


def _unify(graph: fx.Graph) -> int:
    """Equal computations become one."""
    seen: dict[Hashable, fx.Node] = {}
    changed = 0
    for node in list(graph.nodes):
        if node.op == "get_attr":
            key: Hashable = ("get_attr", node.target)
        elif node.op == "call_function" and _pure(node):
            key = (node.target, _freeze(node.args), _freeze(node.kwargs))
        else:
            continue
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            changed += 1
    return changed


def _pure(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    tags = getattr(node.target, "tags", ())
    return not (schema and schema.is_mutable) and torch.Tag.nondeterministic_seeded not in tags


def _freeze(value: Any) -> Hashable:
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(v) for v in value)
    if isinstance(value, dict):
        return tuple(sorted((k, _freeze(v)) for k, v in value.items()))
    if isinstance(value, slice):
        return ("slice", value.start, value.stop, value.step)
    return (type(value).__name__, value) if isinstance(value, (bool, int, float)) else value


def remove_dead(graph: fx.Graph) -> int:
    changed = 0
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)
            changed += 1
    return changed


def forget_unused(program: Program) -> None:
    """Drop the parameters that no graph reads."""
    used = {str(n.target) for g in program.graphs() for n in g.nodes if n.op == "get_attr"}
    for name in set(program.params) - used:
        del program.params[name]


def replace(node: fx.Node, new: fx.Node) -> None:
    """Let every user of `node` read `new`, and remove it."""
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    node.graph.erase_node(node)


def remove_unread(nodes: Iterable[fx.Node]) -> None:
    """Remove values that nothing reads, and what was read by these alone."""
    for node in nodes:
        if not node.users and node.op in ("call_function", "get_attr"):
            before = node.all_input_nodes
            node.graph.erase_node(node)
            remove_unread(before)
