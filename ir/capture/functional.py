"""In-place operators of an exported graph, where they write into a value that nothing else reads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx


def without_writes(graph: fx.Graph) -> None:
    """x.add_(y)  ->  x + y, where x is a fresh result (no view) that is read here alone.

    Decomposition removes any write, but traces the whole model once more.
    """
    for node in graph.nodes:
        plain = _plain(node)
        if plain is not None and isinstance(node.args[0], fx.Node) and _is_fresh(node.args[0]):
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


def _is_fresh(node: fx.Node) -> bool:
    """Whether a value is the one reader's own: computed, not a view of another, and read once."""
    schema = getattr(node.target, "_schema", None)
    return (
        node.op == "call_function"
        and schema is not None
        and not any(result.alias_info for result in schema.returns)
        and len(node.users) == 1
    )
