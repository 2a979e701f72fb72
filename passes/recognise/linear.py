"""Every product with a weight becomes aten.linear, so that later passes look for one form."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from accel.ir.region import sizes
from accel.passes.clean.clean import Clean
from accel.passes.recognise.rewrite import Pattern, Rewrite, Rule, Site, Value, call

aten = torch.ops.aten


def _stored(node: fx.Node) -> bool:
    return node.op == "get_attr" and node.meta["val"].dim() == 2


def _product(x: Pattern) -> Pattern:
    weight, bias = Value("weight", _stored), Value("bias", lambda node: len(sizes(node)) == 1)
    return call((aten.mm.default, aten.matmul.default), x, weight) | call(
        aten.addmm.default, bias, x, weight
    )


FLAT = call(aten.reshape.default, Value("x"), ..., name="flat", shared=True)


def _linear(
    at: Site,
    x: fx.Node,
    weight: fx.Node,
    bias: fx.Node | None = None,
    flat: fx.Node | None = None,
) -> fx.Node | None:
    if flat is not None and sizes(x) != [*sizes(at.node)[:-1], sizes(flat)[-1]]:
        return None
    stored = at.editor.derived(f"{weight.target}.T", str(weight.target), torch.t)
    return at.call(aten.linear.default, x, stored, bias)


@dataclass(frozen=True)
class Linears(Rewrite):
    """mm / matmul / addmm with a parameter [I,O]  ->  linear with its transposed view [O,I].

    Flattening the tokens before the product and restoring them after it goes too.

    Before and after: `tests/passes/texts/linears.before.txt`, `linears.after.txt`.
    """

    after = (Clean,)
    rules = (
        Rule(call(aten.reshape.default, _product(FLAT), ...), _linear),
        Rule(_product(Value("x", lambda node: len(sizes(node)) > 1)), _linear),
    )
