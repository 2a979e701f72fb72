"""What to say of a loss: which method loses less, and where a model is broken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel.compiler.assemble import Plan
from accel.ir.axis import find_axes
from accel.ir.errors import PassError, RecipeError
from accel.passes import Rewriting
from accel.passes.check import UNCHECKED

BROKEN = 3.0  # nats: the KL divergence of half of the tokens at which little of a model is left; guessing has about 8
_NOTED = 1.1  # times the perplexity from which on it is said what loses less


def advice(lost: Mapping[str, Any], plan: Plan) -> str:
    """Which methods lose less; empty where little is lost."""
    if lost["perplexity"] <= _NOTED * lost["perplexity_float32"] and lost["kl_median"] <= BROKEN:
        return ""
    found = []
    for axis, method in plan.methods.items():
        if not isinstance(method, Rewriting) or method.grade != "approximate":
            continue
        use = plan.recipe.tables[axis]["use"] if axis in plan.recipe.tables else ""
        less = _less(axis, method)
        also = (
            f"{axis} = {' or '.join(less)} loses less"
            if less
            else f"leave [{axis}] out to lose nothing by it"
        )
        found.append(f"by {axis} = {use}: {also}")
    return "; ".join(found)


def _less(axis: str, method: Rewriting) -> list[str]:
    """Methods of an axis that declare a smaller loss, the nearest first."""
    found = {name: _declared(axis, name) for name in find_axes()[axis].names()}
    less = [name for name, error in found.items() if Rewriting.error < error < method.error]
    return sorted(less, key=found.__getitem__, reverse=True)[:2]


def _declared(axis: str, name: str) -> float:
    """What a method declares by its own options; nothing where it must be given some, or declares nothing."""
    try:
        return float(getattr(find_axes()[axis].build(name), "error", 0.0))
    except (RecipeError, TypeError):
        return 0.0


def refuse_broken(lost: dict[str, Any], plan: Plan) -> None:
    """Note what loses less. Raises PassError where half of the tokens of a real text are predicted by little more
    than chance.
    """
    lost["advice"] = advice(lost, plan)
    if lost["kl_median"] <= BROKEN or lost["text"] == "random":
        return
    half = f"half of {lost['tokens']:,} tokens of text have a KL divergence of {lost['kl_median']:.2g} or more"
    raise PassError(
        f"recipe '{plan.recipe.name}' breaks this model: {half}, and {BROKEN:g} is the most; perplexity "
        f"{lost['perplexity']:.4g}, in float32 {lost['perplexity_float32']:.4g}; {lost['advice']}, or {UNCHECKED}"
    )
