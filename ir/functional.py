"""In-place operators of an exported graph, where they write into a value that nothing else reads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

_COMPARE = {
    f"{name}_"
    for name in "eq ne lt le gt ge logical_and logical_or logical_xor logical_not less less_equal greater "
    "greater_equal not_equal".split()
}


def without_writes(graph: fx.Graph) -> None:
    """x.add_(y)  ->  x + y, where x is a fresh result (no view) that is read here alone.

    Decomposition removes any write, but traces the whole model once more.
    """
    for node in graph.nodes:
        plain = _plain(node)
        if plain is not None and _is_fresh(node.args[0]) and _keeps_type(node):
            node.target = plain


@contextlib.contextmanager
def unchanged(graph: fx.Graph) -> Iterator[None]:
    """A graph that belongs to somebody else is left as it was found."""
    before = {node: node.target for node in graph.nodes}
    try:
        yield
    finally:
        for node, target in before.items():
            node.target = target


def _plain(node: fx.Node) -> Any:
    """The operator that gives what this one writes into its first operand, where there is one."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.is_mutable:
        return None
    written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    name = schema.name.removeprefix("aten::")
    if written != [schema.arguments[0].name] or not name.endswith("_"):
        return None
    packet = getattr(torch.ops.aten, name[:-1], None)
    return getattr(packet, schema.overload_name or "default", None)


def _keeps_type(node: fx.Node) -> bool:
    """Whether the result has the type of the first operand also where it is not written into that."""
    name = node.target._schema.name.removeprefix("aten::")  # type: ignore[union-attr]
    first, *others = (n.meta["val"] for n in node.all_input_nodes)
    if name in _COMPARE:
        return bool(first.dtype == torch.bool)
    tensors = [v for v in others if isinstance(v, torch.Tensor)]
    return all(torch.result_type(first, v) == first.dtype for v in tensors)


def _is_fresh(node: Any) -> bool:
    """Whether a value is the one reader's own: computed, not a view of another, and read once."""
    schema = getattr(getattr(node, "target", None), "_schema", None)
    return (
        isinstance(node, fx.Node)
        and node.op == "call_function"
        and schema is not None
        and not any(result.alias_info for result in schema.returns)
        and len(node.users) == 1
    )
