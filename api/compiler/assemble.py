"""Recipe -> objects: the one place where names become methods."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from accel.ir.axis import Axis, find_axes
from accel.ir.errors import RecipeError, unknown
from accel.ir.recipe import Recipe
from accel.passes import Pass
from accel.passes.kv._shared.compress import Compress
from accel.passes.state.trees import Trees

EVICTION = ("kv.score", "kv.budget", "kv.keep", "kv.when")  # axes that one pass takes together
DRAFTING = {  # axes of speculative decoding
    "draft": "draft proposes tokens",
    "verify": "verify says which drafted tokens stand",
    "length": "length says how many tokens are drafted",
    "tree": "tree says what shape drafts take",
}
# Axes whose methods may ask for trees of guesses, and what says so; `branches` of a loop are rows.
BRANCHING = (("tree", "branches"), ("draft", "branches"), ("loop", "trees"))
TREELESS = {  # axes with no way to take a guess back, and why
    "kv.select": "reads pages by the order of positions, in which guesses do not lie",
    "kv.reuse": "shares blocks of tokens between sessions, from which no guess can be taken back",
    "prefill.sparse": "runs prompts by a graph of its own, which takes none",
}
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
    if "sample" in recipe.tables:
        raise RecipeError(
            f"recipe '{recipe.name}': how tokens are picked is asked with each request, not built in; leave [sample] "
            "out, and give generate(temperature=…, top_k=…, top_p=…) or the same options to accel-compile run"
        )
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
    _draft(plan, axes)
    _apart(plan)
    if "kv.reuse" in plan.methods:
        plan.passes[:0] = plan.methods["kv.reuse"].steps()  # before slots are encoded
    _trees(plan)
    if eviction := [axis for axis in plan.methods if axis in EVICTION]:
        if (codec := plan.methods.get("kv.codec")) is not None and codec.block:
            raise RecipeError(
                f"recipe '{recipe.name}': kv.codec '{recipe.tables['kv.codec']['use']}' encodes blocks of tokens that "
                f"follow each other, and {eviction[0]} leaves gaps between them; use a codec of single tokens "
                "(kv-int8), or leave one of the two out"
            )
        plan.passes.insert(0, _compress(plan, axes, eviction))  # before what it keeps is encoded
        _apart(plan)  # of what it left out, too
    return plan


def fit(plan: Plan, facts: Any, captured: bool = True) -> None:
    """Refuse a loop that is for another kind of model.

    `captured`: that tokens see later ones is known; else only the configuration was read.

    Raises:
        RecipeError: with the loops that the model takes.
    """
    axis = find_axes()["loop"]
    use = plan.recipe.tables.get("loop", {}).get("use", "autoregressive")
    loop = plan.methods.get("loop") or axis.build(use)
    ways = {
        fills: ", ".join(n for n in axis.names() if axis.method(n).fills is fills)
        for fills in (True, False)
    }
    if loop.fills and facts.diffusion is None:
        why = "sees no later tokens" if captured else "names no mask (config.mask_token_id)"
        raise RecipeError(
            f"recipe '{plan.recipe.name}': loop = {use} fills masks, and {facts.name} {why}; give a masked-diffusion "
            f"model, or a recipe with one of {ways[False]}"
        )
    if captured and facts.diffusion is not None and not loop.fills:
        raise RecipeError(
            f"recipe '{plan.recipe.name}': loop = {use} takes tokens one after the other, and {facts.name} sees both "
            f"ways and fills masks; give a recipe with [loop], one of {ways[True]}"
        )


def _draft(plan: Plan, axes: dict[str, Axis]) -> None:
    """The loop and what it works with: a recipe that drafts and names no loop decodes speculatively, and axes that
    it leaves out get their default, which an artifact's recipe then says.
    """
    name, asked = plan.recipe.name, [axis for axis in DRAFTING if axis in plan.methods]
    if asked and "draft" not in asked:
        raise RecipeError(
            f"recipe '{name}': {DRAFTING[asked[0]]}, and no [draft] drafts any; leave [{asked[0]}] out, or add [draft] "
            f"with one of {', '.join(axes['draft'].names())}"
        )
    if "draft" in asked and "loop" not in plan.methods:
        _default(plan, axes, "loop", "speculative")
    wanted = dict(plan.methods["loop"].asks) if "loop" in plan.methods else {}
    uses = {axis: table["use"] for axis, table in plan.recipe.tables.items()}
    if "draft" in wanted and "draft" in asked:
        wanted |= plan.methods["draft"].asks
    for axis in asked:
        if axis not in wanted and "draft" in wanted:
            own = f"draft = {uses['draft']} gives them a shape of its own"
            why = own if axis == "tree" else f"loop = {uses['loop']} has a way of its own"
            raise RecipeError(f"recipe '{name}': {DRAFTING[axis]}, and {why}; leave [{axis}] out")
        if axis not in wanted:
            raise RecipeError(
                f"recipe '{name}': loop = {uses['loop']} drafts no tokens, and {DRAFTING[axis]}; leave one of the two "
                "out (a recipe with [draft] and without [loop] decodes speculatively)"
            )
    for axis, use in sorted(
        wanted.items(), key=lambda one: one[0] == "verify"
    ):  # a rule goes by the tree
        if axis not in plan.methods and not use:
            one = ", ".join(axes[axis].names())
            raise RecipeError(
                f"recipe '{name}': loop = {uses['loop']} needs [{axis}]; add it with one of {one}"
            )
        if axis not in plan.methods:
            if axis == "verify" and "tree" in plan.methods and plan.methods["tree"].branches:
                use = axes[axis].method(use).instead or use
            _default(plan, axes, axis, use)
    for axis, use in plan.methods["draft"].needs.items() if "draft" in wanted else ():
        if axis not in plan.methods:
            _default(plan, axes, axis, use)
            plan.passes.append(plan.methods[axis])


def _trees(plan: Plan) -> None:
    """The pass for trees of guesses, where a method asks for them. Raises RecipeError where another takes none."""
    asking = [axis for axis, said in BRANCHING if getattr(plan.methods.get(axis), said, False)]
    if not asking:
        return
    uses = {axis: f"{axis} = {plan.recipe.tables[axis]['use']}" for axis in plan.methods}
    for axis in TREELESS.keys() & uses.keys():
        raise RecipeError(
            f"recipe '{plan.recipe.name}': {uses[asking[0]]} guesses trees, and {uses[axis]} {TREELESS[axis]}; leave "
            "one of the two out, or draft a chain (prompt-lookup)"
        )
    plan.passes.append(Trees())


def _default(plan: Plan, axes: dict[str, Axis], axis: str, use: str) -> None:
    """A method that the recipe leaves out."""
    plan.methods[axis] = axes[axis].build(use)
    plan.recipe = replace(plan.recipe, tables={**plan.recipe.tables, axis: {"use": use}})


def _apart(plan: Plan) -> None:
    """Refuse methods of which one says that it cannot go with the other."""
    uses = {axis: f"{axis} = {plan.recipe.tables[axis]['use']}" for axis in plan.methods}
    for axis, method in plan.methods.items():
        for other in plan.methods:
            if (
                other != axis
                and hasattr(method, "apart")
                and (why := method.apart(other, plan.methods[other]))
            ):
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
    for axis, use in (("kv.budget", "uniform"), ("kv.keep", "drop"), ("kv.when", score.when)):
        if axis not in plan.methods:
            _default(plan, axes, axis, use)
    return Compress(score, plan.methods["kv.budget"], plan.methods["kv.keep"])


def _axis(axes: dict[str, Axis], recipe: Recipe, name: str) -> Axis:
    if name not in axes:
        raise RecipeError(f"recipe '{recipe.name}': {unknown('axis', name, axes)}")
    return axes[name]
