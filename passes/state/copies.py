"""Nodes of an entry again, in another entry's graph, whose inputs have other sizes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx

from accel.ir.program import Editor
from accel.ir.region import Region

Copied = dict[fx.Node, fx.Node]
Copy = Callable[[Editor, fx.Node, Copied], fx.Node]


def copy_node(editor: Editor, node: fx.Node, copied: Copied) -> fx.Node:
    """A parameter, or an operator over what its operands became."""
    if node.op == "get_attr":
        new = editor.graph.node_copy(node)
        new.meta = dict(node.meta)
        return new
    args: Any = fx.node.map_arg(node.args, copied.__getitem__)
    kwargs: Any = fx.node.map_arg(node.kwargs, copied.__getitem__)
    if node.target is operator.getitem:
        new = editor.graph.call_function(operator.getitem, args)
        new.meta["val"] = args[0].meta["val"][args[1]]
        return new
    if all(_alike(n, copied[n]) for n in node.all_input_nodes):  # its value is known: most are
        new = editor.graph.node_copy(node, copied.__getitem__)
        new.meta = dict(node.meta)
        return new
    return editor.call(node.target, *args, like=node, **kwargs)  # type: ignore[arg-type]


def copy_region(
    editor: Editor, node: fx.Node, copied: Copied, copy: Copy, more: Sequence[fx.Node] = ()
) -> fx.Node:
    """A region and its call again, whose nodes `copy` makes. An argument of which nothing became anything is dropped;
    `more`: placeholders around it that it gets, too, under their names.
    """
    old = node.target
    assert isinstance(old, Region)
    region = Region(old.name, fx.Graph())
    inner: Copied = {}
    arguments = []
    for holder, given in zip(old.graph.find_nodes(op="placeholder"), node.args, strict=True):
        if given in copied:
            inner[holder] = region.graph.placeholder(str(holder.target))
            inner[holder].meta["val"] = copied[given].meta["val"]  # type: ignore[index]
            arguments.append(copied[given])  # type: ignore[index]
    for given in more:
        region.graph.placeholder(str(given.target)).meta["val"] = given.meta["val"]
        arguments.append(given)
    local = Editor(editor.program, region.graph)
    for item in old.graph.nodes:
        if item.op in ("call_function", "get_attr"):
            inner[item] = copy(local, item, inner)
        elif item.op == "output":
            values = tuple(inner[n] for n in item.args[0])
            region.graph.output(values)
    call = editor.graph.call_function(region, tuple(arguments))
    call.meta["val"] = tuple(v.meta["val"] for v in values)
    return call


def _alike(a: fx.Node, b: fx.Node) -> bool:
    """Whether two nodes give tensors of one dtype and the same sizes, symbols included."""
    x, y = a.meta["val"], b.meta["val"]
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return False
    return x.dtype == y.dtype and [str(d) for d in x.shape] == [str(d) for d in y.shape]
