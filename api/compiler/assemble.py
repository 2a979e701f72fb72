"""Recipe -> objects: the one place where names become methods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from accel.compiler.capabilities import TARGET_METHODS, conflict_text, conflicts
from accel.compiler.nearest import nearest
from accel.ir.axis import Axis, find_axes
from accel.ir.errors import RecipeError, unknown
from accel.ir.invariants import Invariant, Method
from accel.ir.recipe import Recipe
from accel.passes import Pass, Rewriting
from accel.passes.kv.codec._default import IfCached
from accel.passes.kv.compress import Compress
from accel.passes.state.embeds import Embeds
from accel.passes.state.kv_taps import KvTaps
from accel.passes.state.replay import Replay
from accel.passes.state.taps import Taps
from accel.passes.state.trees import Trees
from accel.passes.window._default import Windows

EVICTION = (
    "kv.score",
    "kv.refine",
    "kv.budget",
    "kv.keep",
    "kv.when",
)  # axes that one pass takes together
WINDOW = "window"  # an axis that every recipe has, if it can
CODEC = "kv.codec"
OF_CACHE = ("kv.", "prefill")  # how axes begin that say something of the cache
STEPS = (
    "kv.reuse",
    "prefill.ranks",
    "draft",
    "canvas",
    "prompt",
)  # axes of the engine whose methods name passes
OF_REQUESTS = frozenset(
    {"sample", "schedule"}
)  # axes that change nothing of a build, nor of one greedy request
DRAFTING = {  # axes of speculative decoding
    "draft": "draft proposes tokens",
    "verify": "verify sets which drafted tokens are accepted",
    "length": "length sets how many tokens are drafted",
    "tree": "tree sets the shape of drafts",
}
_NO_TEXT = {
    ("loop", "autoregressive"),
    ("schedule", "continuous-batching"),
}  # what a model of vectors has no use for, and is as if it were not named
GRADES = ("lossless", "distribution-exact", "approximate")


@dataclass
class Plan:
    """A recipe whose every name exists and whose options are right."""

    recipe: Recipe
    passes: list[Pass] = field(default_factory=list)
    methods: dict[str, Any] = field(default_factory=dict)  # axis -> the method built
    unasked: list[Pass] = field(default_factory=list)  # passes that it has without naming them

    @property
    def every(self) -> list[Pass]:
        """All its passes."""
        return [*self.passes, *self.unasked]

    @property
    def grade(self) -> str:
        """The weakest promise of any method: how the tokens compare with the model's own."""
        parts = [*self.methods.values(), *self.passes]
        ranks = [GRADES.index(getattr(part, "grade", GRADES[0])) for part in parts]
        return GRADES[max(ranks, default=0)]


class Incompatible(RecipeError):
    """Methods that do not go together; the text ends before what to do."""


def assemble(recipe: Recipe) -> Plan:
    """Build every method that a recipe names.

    Raises:
        RecipeError: an axis, method or option that does not exist (with the near name), a value
            of the wrong type, or methods that do not go together (with the nearest recipe that does).
    """
    try:
        return assemble_alone(recipe)
    except Incompatible as error:
        near = nearest(recipe, str(error), assemble_alone, first="swap")
        works = f" (the nearest recipe that works: {near.change})" if near.recipe else ""
        raise RecipeError(f"{error}; leave one of the two out{works}") from None


def assemble_alone(recipe: Recipe) -> Plan:
    """The same, without a look for the nearest recipe that works, which takes ten times as long."""
    axes = find_axes()
    plan = Plan(recipe)
    for name, table in recipe.tables.items():
        axis = _axis(axes, recipe, name)
        options = {k: v for k, v in table.items() if k != "use"}
        try:
            method = axis.build(table["use"], **options)
            method.check_table(options)
        except RecipeError as error:
            raise RecipeError(f"recipe '{recipe.name}': {error}") from None
        plan.methods[name] = method
        if isinstance(method, Rewriting):
            plan.passes += method.steps()
    _canvas(plan, axes)
    _draft(plan, axes)
    if "kv.score" in plan.methods:
        _evict(plan, axes)
    if found := conflicts(plan.methods):
        by_default = [sum(a not in recipe.tables for a in (c.relying, c.other)) for c in found]
        first = found[by_default.index(min(by_default))]  # what the recipe itself names, if any
        raise Incompatible(f"recipe '{recipe.name}': {conflict_text(first, _uses(plan))}")
    plan.passes, plan.unasked = _passes(plan, axes), _always(plan.methods, axes)
    return plan


def check_target(plan: Plan, target: str) -> None:
    """Raise RecipeError where a method relies on what no artifact of a target keeps."""
    methods = {**plan.methods, "target": TARGET_METHODS.get(target, Method())}
    for one in conflicts(methods):
        raise RecipeError(
            f"recipe '{plan.recipe.name}': {conflict_text(one, {**_uses(plan), 'target': target})}; "
            f"use target='onnx', or leave [{one.relying}] out"
        )


def _uses(plan: Plan) -> dict[str, str]:
    """Axis -> the name of its method."""
    return {axis: table["use"] for axis, table in plan.recipe.tables.items()}


def fit(plan: Plan, facts: Any, captured: bool = True) -> None:
    """Refuse a loop that is for another kind of model.

    `captured`: that tokens see later ones is known; else only the configuration was read.

    Raises:
        RecipeError: with the loops that the model takes.
    """
    if facts.embedding is not None:
        _embeds(plan, facts)
    axis = find_axes()["loop"]
    use = plan.recipe.tables.get("loop", {}).get("use", "autoregressive")
    loop = plan.methods.get("loop") or axis.build(use)
    ways = {
        diffusion: ", ".join(
            n
            for n in axis.names()
            if axis.method(n).masked_diffusion is diffusion
            and (facts.diffusion is None or not _unfit(axis, n, facts))
        )
        for diffusion in (True, False)
    }
    known = captured or facts.encoder is None  # a decoder beside an encoder needs no mask
    if loop.masked_diffusion and facts.diffusion is None and known:
        why = (
            "attends only to earlier tokens"
            if captured
            else "has no mask token (config.mask_token_id)"
        )
        raise RecipeError(
            f"recipe '{plan.recipe.name}': loop = {use} decodes masked-diffusion models, and "
            f"{facts.name} {why}; give a masked-diffusion "
            f"model, or a recipe with one of {ways[False]}"
        )
    if loop.masked_diffusion is (facts.diffusion is not None) and (why := loop.unfit(facts)):
        raise RecipeError(
            f"recipe '{plan.recipe.name}': loop = {use}: {facts.name} {why}, or build with another [loop]"
        )
    if captured and facts.diffusion is not None and not loop.masked_diffusion:
        raise RecipeError(
            f"recipe '{plan.recipe.name}': loop = {use} generates token by token, and {facts.name} is a "
            f"masked-diffusion model; give a recipe with [loop], one of {ways[True]}"
        )


def _unfit(axis: Axis, name: str, facts: Any) -> str:
    """What the facts lack that a loop with its defaults needs."""
    why: str = axis.build(name).unfit(facts)
    return why


def _embeds(plan: Plan, facts: Any) -> None:
    """Refuse what says how text is made, or what a model of vectors is not measured for. Raises RecipeError."""
    uses = {axis: use for axis, use in _uses(plan).items() if (axis, use) not in _NO_TEXT}
    if uses:
        named = ", ".join(f"{axis} = {use}" for axis, use in uses.items())
        raise RecipeError(
            f"recipe '{plan.recipe.name}': {named}: {facts.name} gives vectors, not text, and accel computes these as "
            "the model does; give the recipe 'base'"
        )


def _canvas(plan: Plan, axes: dict[str, Axis]) -> None:
    """Refuse what is of loops that fill masks beside another loop. Raises RecipeError."""
    loop = plan.methods.get("loop") or axes["loop"].build("autoregressive")
    if "canvas" in plan.methods and "canvas" not in loop.asks:
        fills = [n for n in axes["loop"].names() if "canvas" in axes["loop"].method(n).asks]
        raise RecipeError(
            f"recipe '{plan.recipe.name}': canvas sets which slots of masked text a call computes, and loop = "
            f"{loop.use} fills no masks; leave [canvas] out, or give [loop] with one of {', '.join(fills)}"
        )


def _draft(plan: Plan, axes: dict[str, Axis]) -> None:
    """The loop and what it works with: a recipe that drafts and names no loop decodes speculatively, and axes that
    it leaves out get their default, which an artifact's recipe then says.
    """
    name, asked = plan.recipe.name, [axis for axis in DRAFTING if axis in plan.methods]
    if asked and "draft" not in asked:
        raise RecipeError(
            f"recipe '{name}': {DRAFTING[asked[0]]}, but the recipe has no [draft]; leave "
            f"[{asked[0]}] out, or add [draft] "
            f"with one of {', '.join(axes['draft'].names())}"
        )
    if "draft" in asked and "loop" not in plan.methods:
        _default(plan, axes, "loop", "speculative")
    asks = dict(plan.methods["loop"].asks) if "loop" in plan.methods else {}
    uses = _uses(plan)
    if "draft" in asks and "draft" in asked:
        asks |= plan.methods["draft"].asks
    for axis in asked:
        if axis not in asks and "draft" in asks:
            own = f"draft = {uses['draft']} sets its own draft shape"
            why = own if axis == "tree" else f"loop = {uses['loop']} has its own rule"
            raise RecipeError(f"recipe '{name}': {DRAFTING[axis]}, and {why}; leave [{axis}] out")
        if axis not in asks:
            raise RecipeError(
                f"recipe '{name}': loop = {uses['loop']} drafts no tokens, and {DRAFTING[axis]}; leave one of the two "
                "out (a recipe with [draft] and without [loop] decodes speculatively)"
            )
    for axis, use in sorted(
        asks.items(), key=lambda one: one[0] == "verify"
    ):  # a rule goes by the tree
        if axis not in plan.methods and not use:
            one = ", ".join(axes[axis].names())
            raise RecipeError(
                f"recipe '{name}': loop = {uses['loop']} needs [{axis}]; add it with one of {one}"
            )
        if axis not in plan.methods:
            shaping = [plan.methods[a] for a in ("draft", "tree") if a in plan.methods]
            if axis == "verify" and any(Invariant.CHAINS in one.breaks for one in shaping):
                use = axes[axis].method(use).instead or use
            _default(plan, axes, axis, use)
    for axis, use in plan.methods["draft"].needs.items() if "draft" in asks else ():
        if axis not in plan.methods:
            _default(plan, axes, axis, use)
            plan.passes += plan.methods[axis].steps()


def _default(plan: Plan, axes: dict[str, Axis], axis: str, use: str) -> None:
    """A method that the recipe leaves out."""
    plan.methods[axis] = axes[axis].build(use)
    plan.recipe = replace(plan.recipe, tables={**plan.recipe.tables, axis: {"use": use}})


def _evict(plan: Plan, axes: dict[str, Axis]) -> None:
    """The axes of eviction that the recipe leaves out get their default, which an artifact's recipe then says."""
    score = plan.methods["kv.score"]
    for axis, use in (("kv.budget", "uniform"), ("kv.keep", "drop"), ("kv.when", score.when)):
        if axis not in plan.methods:
            _default(plan, axes, axis, use)


def _always(methods: Mapping[str, Any], axes: dict[str, Axis]) -> list[Pass]:
    """The passes of a recipe that it does not name: of layers with a window, where it does not say what they keep; of
    the cache, where its weights have few bits and it does not say how it is stored. Neither, where it has a method that
    conflicts.
    """
    windows, found = Windows(), list[Pass]()
    if WINDOW not in methods and not conflicts({**methods, WINDOW: windows}):
        found.append(windows)
    codec = getattr(methods.get("weights"), "codec", None)
    if codec is not None and not any(axis.startswith(OF_CACHE) for axis in methods):
        method = axes[CODEC].build(codec)
        if not conflicts({**methods, CODEC: method}):
            found.append(IfCached(method))
    return found


def _passes(plan: Plan, axes: dict[str, Axis]) -> list[Pass]:
    """Those that methods need beside the ones that are passes themselves, in their order.

    Raises:
        RecipeError: tokens are dropped, and no method says which.
    """
    methods = plan.methods
    found = list(plan.passes)
    for axis in STEPS:
        if axis in methods:
            found[:0] = methods[axis].steps()  # before slots are encoded
    if any(Invariant.CHAINS in method.breaks for method in methods.values()):
        found.append(Trees())
    readers = [m for m in methods.values() if isinstance(m, Method) and m.taps(1)]
    if readers:
        found += [KvTaps(tuple(readers)), Taps(tuple(readers))]
    if readers := [m for m in methods.values() if isinstance(m, Method) and m.embeds]:
        found.append(Embeds(max(readers, key=lambda m: m.gives_embeds)))
    if "loop" in methods and Invariant.REWIND in methods["loop"].relies:
        found.append(Replay())
    if named := [axis for axis in methods if axis in EVICTION]:
        if "kv.score" not in methods:
            raise RecipeError(
                f"recipe '{plan.recipe.name}': {', '.join(named)} sets how tokens are evicted, but no "
                f"kv.score selects them; add [kv.score] with one of {', '.join(axes['kv.score'].names())}"
            )
        score, budget, keep = methods["kv.score"], methods["kv.budget"], methods["kv.keep"]
        compress = Compress(score, budget, keep, methods.get("kv.refine"))
        found.insert(0, compress)  # before what it keeps is encoded
    return found


def _axis(axes: dict[str, Axis], recipe: Recipe, name: str) -> Axis:
    if name not in axes:
        raise RecipeError(f"recipe '{recipe.name}': {unknown('axis', name, axes)}")
    return axes[name]
