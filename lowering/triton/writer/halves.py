"""Weights in half precision: which stay so on the device, and the program that rounds inputs as their products do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from accel.ir.ops.experts import expert_linear
from accel.ir.ops.op import operand_of, set_operand
from accel.ir.program import Program
from accel.ir.weights import Experts, Stacked, Stored
from accel.passes.recognise.experts import routes

aten = torch.ops.aten
HALVES = (torch.bfloat16, torch.float16)
LOOKUP = aten.embedding.default
INPUTS: dict[Any, str] = {
    aten.linear.default: "input",
    expert_linear.default: "x",
}  # of products: what is rounded
READERS: dict[Any, int] = {
    aten.linear.default: 1,
    expert_linear.default: 2,
    LOOKUP: 0,
}  # of a weight, and its place
WIDEN = aten._to_copy.default


def stored_in_half(program: Program) -> dict[str, Stored]:
    """Parameters that products and look-ups alone read, as a checkpoint or a recipe stores them in half precision."""
    found = {name: as_stored(program.params.stored(name)) for name in multiplied(program)}
    return {name: stored for name, stored in found.items() if stored is not None}


def as_stored(stored: Stored) -> Stored | None:
    """A parameter without the widening of each reading; None where it is not stored in half precision."""
    if stored.blank.dtype in HALVES:
        return stored
    if isinstance(stored, (Stacked, Experts)):
        own = stored.parts if isinstance(stored, Stacked) else stored.experts
        parts = [part for part in map(as_stored, own) if part is not None]
        alike = len(parts) == len(own) and len({part.blank.dtype for part in parts}) == 1
        if stored.changes or not alike:
            return None
        if isinstance(stored, Stacked):
            return Stacked.rows(parts)
        return Experts.stack(parts, stored.turned)
    widened = type(stored) is Stored and stored.changes == (Tensor.float,)
    return replace(stored, changes=()) if widened and stored.source.dtype in HALVES else None


def multiplied(program: Program) -> list[str]:
    """Matrices that nothing but products and look-ups of float32 reads. Not those of routers, whose few rows decide
    which experts run.
    """
    found = dict[str, bool]()
    for graph in program.graphs():
        for node in graph.find_nodes(op="get_attr"):
            name = str(node.target)
            readers = [r for user in node.users for r in (user.users if _widens(user) else (user,))]
            fit = all(_reads(reader, node) for reader in readers)
            found[name] = found.get(name, True) and fit
    return [n for n, fit in found.items() if fit and program.params.blank(n).dim() > 1]


def _widens(node: fx.Node) -> bool:
    """Whether a node is a parameter in half precision, in float32."""
    value = node.args[0] if node.target is WIDEN else None
    return (
        isinstance(value, fx.Node)
        and value.op == "get_attr"
        and value.meta["val"].dtype in HALVES
        and node.meta["val"].dtype == torch.float32
    )


def weight_of(node: fx.Node) -> fx.Node | None:
    """The parameter that a product or a look-up reads; None where its weight is computed."""
    weight = operand_of(node, "weight")
    if isinstance(weight, fx.Node) and _widens(weight):
        weight = weight.args[0]
    return weight if isinstance(weight, fx.Node) and weight.op == "get_attr" else None


def _reads(node: fx.Node, weight: fx.Node) -> bool:
    if node.target not in READERS or weight_of(node) is not weight or routes(node):
        return False
    if node.target is LOOKUP:
        return True
    x = operand_of(node, INPUTS[node.target])
    return x is not weight and x.meta["val"].dtype == torch.float32


def rounding(program: Program, dtypes: Mapping[str, torch.dtype]) -> Program:
    """The program in which inputs of products with these weights are rounded to such a dtype."""
    same = program.copy()
    same.params = program.params
    for node in same.nodes(*INPUTS):
        weight = weight_of(node)
        if weight is not None and str(weight.target) in dtypes:
            name = INPUTS[node.target]
            with node.graph.inserting_before(node):
                given = operand_of(node, name), dtypes[str(weight.target)]
                set_operand(node, name, node.graph.call_function(rounded, given))
    return same


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest numbers of a dtype, in float32; of each row by a power of two, where float16 has none so large."""
    if dtype is torch.float16:
        _, exponent = torch.frexp(x.abs().amax(-1, keepdim=True))
        power = torch.ldexp(torch.ones_like(x[..., :1]), (exponent - 15).clamp(min=0))
        return (x / power).to(dtype).float() * power
    return x.to(dtype).float()
