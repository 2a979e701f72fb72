"""Complex numbers become pairs of real ones: what follows, and every target, knows real numbers only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from accel.ir.errors import PassError
from accel.ir.program import Editor, Program
from accel.passes import Pass, Report
from accel.passes.clean.clean import Clean, replace

aten = torch.ops.aten
# Operators that move whole elements; the numbers are the axes among their arguments.
_AXES: dict[Any, tuple[int, ...]] = {
    aten.unsqueeze.default: (1,), aten.squeeze.dim: (1,), aten.transpose.int: (1, 2),
    aten.slice.Tensor: (1,), aten.select.int: (1,), aten.index_select.default: (1,), aten.cat.default: (1,),
    aten.stack.default: (1,), aten.alias.default: (), aten.clone.default: (), aten.detach.default: (),
    aten.contiguous.default: (), aten.lift_fresh_copy.default: (), aten.index.Tensor: (),
    aten.neg.default: (),
}  # fmt: skip


@dataclass(frozen=True)
class Reals(Pass):
    """complex [...] -> float [..., 2], (real, imaginary): rotary tables written as e^(i·angle)."""

    after = (Clean,)

    def run(self, program: Program) -> Report:
        graph = program.step.graph
        editor = Editor(program, graph)
        pairs: dict[fx.Node, fx.Node] = {}
        report = Report()
        for node in list(graph.nodes):
            known = any(n in pairs for n in node.all_input_nodes)
            if node.op not in ("call_function", "get_attr") or not (known or _is_complex(node)):
                continue
            with graph.inserting_before(node):
                new = _rewrite(program, editor, pairs, node)
            if _is_complex(node):
                pairs[node] = new
            else:
                replace(node, new)
            report.changed += 1
        if report.changed:
            Clean().run(program)
        return report


def _is_complex(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_complex()


def _rewrite(
    program: Program, editor: Editor, pairs: dict[fx.Node, fx.Node], node: fx.Node
) -> fx.Node:
    """The pair that stands for a complex value, or the real value that is read out of one."""
    if node.op == "get_attr":
        table = program.params[str(node.target)].resolve_conj()
        return editor.param(f"{node.target}.real", torch.view_as_real(table).contiguous())
    if node.target in _AXES:
        return _move(editor, pairs, node, _AXES[node.target])
    rule = _RULES.get(getattr(node.target, "overloadpacket", node.target))
    if rule is None:
        raise PassError(
            f"{node.name} ({node.target}) uses complex numbers that accel cannot rewrite as real "
            "numbers; write it with cos and sin"
        )
    return rule(editor, pairs, node)


def _move(
    editor: Editor, pairs: dict[fx.Node, fx.Node], node: fx.Node, axes: tuple[int, ...]
) -> fx.Node:
    """The same movement of elements, axes counted from the front."""
    first: Any = node.args[0]
    rank = (first[0] if isinstance(first, (list, tuple)) else first).meta["val"].dim()
    args: list[Any] = list(fx.node.map_arg(node.args, lambda n: pairs.get(n, n)))
    for i in axes:
        if i < len(args) and args[i] < 0:
            args[i] += rank + (node.target in (aten.unsqueeze.default, aten.stack.default))
    assert callable(node.target)
    return editor.call(node.target, *args, like=node)


def _sizes(editor: Editor, pairs: dict[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    """reshape, expand: a last axis of 2 more."""
    shape: Any = node.args[1]
    assert callable(node.target)
    return editor.call(aten.reshape.default if node.target is aten.view.default else node.target,
                       pairs[_of(node, 0)], [*shape, 2], like=node)  # fmt: skip


def _permute(editor: Editor, pairs: dict[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    order: Any = node.args[1]
    rank = len(order)
    order = [*(a % rank for a in order), rank]
    return editor.call(aten.permute.default, pairs[_of(node, 0)], order, like=node)


def _product(editor: Editor, pairs: dict[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    """(a + bi)(c + di), or a complex number times a real one."""
    x, y = node.args[:2]
    if isinstance(x, fx.Node) and isinstance(y, fx.Node) and x in pairs and y in pairs:
        a, b = _parts(editor, pairs[x])
        c, d = _parts(editor, pairs[y])
        real = _sub(editor, _mul(editor, a, c), _mul(editor, b, d))
        imaginary = editor.call(aten.add.Tensor, _mul(editor, a, d), _mul(editor, b, c))
        return _stack(editor, real, imaginary)
    if isinstance(y, complex):
        return _by_number(editor, x, y, pairs)
    if not (isinstance(x, fx.Node) and x in pairs):
        x, y = y, x
    if isinstance(y, fx.Node) and _dim(y):
        y = editor.call(aten.unsqueeze.default, y, _dim(y))
    return editor.call(aten.mul.Tensor, pairs[_node(x)], y)


def _by_number(editor: Editor, x: Any, y: complex, pairs: dict[fx.Node, fx.Node]) -> fx.Node:
    """A value, real or complex, times a complex number."""
    if x not in pairs:
        return _stack(editor, _mul(editor, x, y.real), _mul(editor, x, y.imag))
    a, b = _parts(editor, pairs[x])
    real = _sub(editor, _mul(editor, a, y.real), _mul(editor, b, y.imag))
    imaginary = editor.call(aten.add.Tensor, _mul(editor, a, y.imag), _mul(editor, b, y.real))
    return _stack(editor, real, imaginary)


def _quotient(editor: Editor, pairs: dict[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    x, y = node.args[:2]
    if isinstance(y, complex) or not (isinstance(x, fx.Node) and x in pairs) or y in pairs:
        raise PassError(f"{node.name} divides by a complex number; multiply by its inverse instead")
    if isinstance(y, fx.Node) and _dim(y):
        y = editor.call(aten.unsqueeze.default, y, _dim(y))
    return editor.call(aten.div.Tensor, pairs[x], y)


def _sum(editor: Editor, pairs: dict[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    x, y = node.args[:2]
    if x not in pairs or y not in pairs or node.kwargs:
        raise PassError(
            f"{node.name} adds a real number to a complex one; write it with cos and sin"
        )
    assert callable(node.target)
    return editor.call(node.target, pairs[_node(x)], pairs[_node(y)])


def _conjugate(editor: Editor, pairs: dict[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    a, b = _parts(editor, pairs[_of(node, 0)])
    return _stack(editor, a, editor.call(aten.neg.default, b))


def _from_angle(editor: Editor, pairs: dict[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    """polar(length, angle) or exp(a + bi)."""
    if node.target is aten.polar.default:
        length, angle = _of(node, 0), _of(node, 1)
    else:
        real, angle = _parts(editor, pairs[_of(node, 0)])
        length = editor.call(aten.exp.default, real)
    cos, sin = editor.call(aten.cos.default, angle), editor.call(aten.sin.default, angle)
    return _stack(editor, _mul(editor, length, cos), _mul(editor, length, sin))


def _part(axis: int) -> Callable[[Editor, dict[fx.Node, fx.Node], fx.Node], fx.Node]:
    return lambda editor, pairs, node: _parts(editor, pairs[_of(node, 0)])[axis]


def _parts(editor: Editor, pair: fx.Node) -> tuple[fx.Node, fx.Node]:
    last = _dim(pair) - 1
    first = editor.call(aten.select.int, pair, last, 0)
    return first, editor.call(aten.select.int, pair, last, 1)


def _stack(editor: Editor, real: fx.Node, imaginary: fx.Node) -> fx.Node:
    return editor.call(aten.stack.default, [real, imaginary], _dim(real))


def _mul(editor: Editor, a: Any, b: Any) -> fx.Node:
    return editor.call(aten.mul.Tensor, a, b)


def _sub(editor: Editor, a: fx.Node, b: fx.Node) -> fx.Node:
    return editor.call(aten.sub.Tensor, a, b)


def _dim(node: fx.Node) -> int:
    return int(node.meta["val"].dim())


def _of(node: fx.Node, index: int) -> fx.Node:
    return _node(node.args[index])


def _node(value: Any) -> fx.Node:
    assert isinstance(value, fx.Node)
    return value


def _same(editor: Editor, pairs: dict[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    """A cast from complex to complex, or between a complex value and its pair."""
    x = _of(node, 0)
    if x in pairs and not _is_complex(node) and node.target is not aten.view_as_real.default:
        raise PassError(f"{node.name} drops imaginary parts; take the real part by name instead")
    if x not in pairs and node.target is not aten.view_as_complex.default:
        raise PassError(f"{node.name} makes a real number complex; write it with cos and sin")
    return pairs.get(x, x)


_RULES: dict[Any, Callable[[Editor, dict[fx.Node, fx.Node], fx.Node], fx.Node]] = {
    aten.view_as_complex: _same, aten.view_as_real: _same, aten.to: _same, aten._to_copy: _same,
    aten.real: _part(0), aten.imag: _part(1), aten.mul: _product, aten.div: _quotient,
    aten.add: _sum, aten.sub: _sum, aten.polar: _from_angle, aten.exp: _from_angle,
    aten.complex: lambda editor, pairs, node: _stack(editor, _of(node, 0), _of(node, 1)),
    aten._conj: _conjugate, aten.conj: _conjugate, aten.conj_physical: _conjugate, aten.resolve_conj: _same,
    aten.reshape: _sizes, aten.view: _sizes, aten.expand: _sizes, aten._unsafe_view: _sizes,
    aten.permute: _permute,
}  # fmt: skip
