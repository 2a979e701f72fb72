"""Recipe -> objects: the one place where names become methods."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from accel.ir.axis import Axis, find_axes
from accel.ir.errors import RecipeError, unknown
from accel.ir.recipe import Recipe
from accel.passes import Pass
from accel.passes.kv.compress import Compress

EVICTION = ("kv.score", "kv.budget", "kv.keep", "kv.when")  # axes that one pass takes together
GRADES = ("bit-exact", "distribution-exact", "approximate")


@dataclass
class Plan:
    """A recipe whose every name exists and whose options are right."""

    recipe: Recipe
    passes: list[Pass] = field(default_factory=list)
    methods: dict[str, Any] = field(default_factory=dict)  # axis -> the method built

    @property
    def grade(self) -> str:
        """The weakest promise of any method: how the tokens compare with the model's own."""
        ranks = [GRADES.index(getattr(m, "grade", GRADES[0])) for m in self.methods.values()]
        return GRADES[max(ranks, default=0)]


def assemble(recipe: Recipe) -> Plan:
    """Build every method that a recipe names.

    Raises:
        RecipeError: an axis, method or option that does not exist (with the near name), or a value
            of the wrong type.
    """
    axes = find_axes()
    plan = Plan(recipe)
    for name, table in recipe.tables.items():
        axis = _axis(axes, recipe, name)
        options = {k: v for k, v in table.items() if k != "use"}
        try:
            method = axis.build(table["use"], **options)
        except RecipeError as error:
            raise RecipeError(f"recipe '{recipe.name}': {error}") from None
        plan.methods[name] = method
        if isinstance(method, Pass):
            plan.passes.append(method)
    _apart(plan)
    if "kv.reuse" in plan.methods:
        plan.passes[:0] = plan.methods["kv.reuse"].steps()  # before slots are encoded
    if eviction := [axis for axis in plan.methods if axis in EVICTION]:
        if (codec := plan.methods.get("kv.codec")) is not None and codec.block:
            raise RecipeError(
                f"recipe '{recipe.name}': kv.codec '{recipe.tables['kv.codec']['use']}' encodes blocks of tokens that "
                f"follow each other, and {eviction[0]} leaves gaps between them; use a codec of single tokens "
                "(kv-int8), or leave one of the two out"
            )
        plan.passes.insert(0, _compress(plan, axes, eviction))  # before what it keeps is encoded
    return plan


def _apart(plan: Plan) -> None:
    """Refuse methods of which one says that it cannot go with the other."""
    uses = {axis: f"{axis} = {plan.recipe.tables[axis]['use']}" for axis in plan.methods}
    for axis, method in plan.methods.items():
        for other in plan.methods:
            if other != axis and hasattr(method, "apart") and (why := method.apart(other, plan.methods[other])):
                raise RecipeError(
                    f"recipe '{plan.recipe.name}': {uses[axis]} cannot go with {uses[other]}: {why}; leave one "
                    "of the two out"
                )


def _compress(plan: Plan, axes: dict[str, Axis], named: list[str]) -> Pass:
    """The pass that evicts, out of its axes; those that the recipe leaves out get their default, which
    an artifact's recipe then says.
    """
    if "kv.score" not in plan.methods:
        raise RecipeError(
            f"recipe '{plan.recipe.name}': {', '.join(named)} says how tokens are dropped, but no kv.score "
            f"says which; add [kv.score] with one of {', '.join(axes['kv.score'].names())}"
        )
    score = plan.methods["kv.score"]
    tables = dict(plan.recipe.tables)
    for axis, use in (("kv.budget", "uniform"), ("kv.keep", "drop"), ("kv.when", score.when)):
        if axis not in plan.methods:
            tables[axis] = {"use": use}
            plan.methods[axis] = axes[axis].build(use)
    plan.recipe = replace(plan.recipe, tables=tables)
    return Compress(score, plan.methods["kv.budget"], plan.methods["kv.keep"])


def _axis(axes: dict[str, Axis], recipe: Recipe, name: str) -> Axis:
    if name not in axes:
        raise RecipeError(f"recipe '{recipe.name}': {unknown('axis', name, axes)}")
    return axes[name]
