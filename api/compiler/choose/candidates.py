"""What is tried: single recipes that fit the model, and then merges of the best of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from accel.compiler.assemble import EVICTION, GRADES, OF_REQUESTS, Plan, assemble, check_target, fit
from accel.compiler.choose.front import Point, Stage, front
from accel.compiler.pipeline import pipeline
from accel.ir.errors import AccelError
from accel.ir.facts import Facts
from accel.ir.recipe import Recipe, bundled
from accel.ir.tables import Tables
from accel.passes import refuse
from accel.passes.trained import Trained
from accel.passes.weights._calibrated import Calibrated
from accel.runtime.loop import HOST

MERGED = 3  # recipes of a combination, at most


@dataclass(frozen=True)
class Candidate:
    """One recipe, or several merged. specs: as `--recipe` takes them; none: base."""

    specs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return Recipe.load(list(self.specs)).name if self.specs else "base"

    @property
    def recipe(self) -> Recipe:
        return Recipe.load(list(self.specs) or "base")


BASE = Candidate()


def singles(recipes: Sequence[str] | None = None) -> list[Candidate]:
    """The bundled recipes, but for those that say nothing of one greedy request, or the given ones, each once: one of
    each kind before the second of any.

    Raises RecipeError where a given one does not exist.
    """
    names = list(recipes) if recipes else [n for n in bundled() if not _of_requests(n)]
    kinds: dict[frozenset[str], list[str]] = {}
    for name in dict.fromkeys(names):
        if name != "base":
            kinds.setdefault(_kind(Recipe.load(name)), []).append(name)
    order = sorted(kinds, key=lambda kind: (len(kind), "weights" not in kind))
    turns = itertools.zip_longest(*(sorted(kinds[kind], key=_slow) for kind in order))
    return [Candidate((name,)) for turn in turns for name in turn if name is not None]


def _of_requests(name: str) -> bool:
    """Whether all that it sets is how an engine serves many, or what requests with a temperature are drawn from."""
    return set(Recipe.load(name).tables) <= OF_REQUESTS


def _kind(recipe: Recipe) -> frozenset[str]:
    """The axes that it sets; those of one loop, or of eviction, as one."""
    same = {**dict.fromkeys(HOST, "loop"), **dict.fromkeys(EVICTION, "kv.score")}
    return frozenset(same.get(axis, axis) for axis in recipe.tables)


def _slow(name: str) -> bool:
    """Whether its build runs the model over a text, or needs a file that may be of another model."""
    try:
        methods = assemble(Recipe.load(name)).methods.values()
    except AccelError:
        return True
    return any(isinstance(m, (Calibrated, Trained, Tables)) for m in methods)


def plan_of(candidate: Candidate, facts: Facts) -> Plan:
    """What it assembles to. Raises AccelError where the model does not take it, before any work."""
    plan = assemble(candidate.recipe)
    check_target(plan, "onnx")
    refuse(pipeline(False, plan.every), facts, plan.recipe.name)
    fit(plan, facts)
    return plan


def lossless(plan: Plan) -> bool:
    """Whether its greedy tokens are promised to be the model's."""
    return plan.grade != GRADES[-1]


def combinations(
    points: Mapping[Candidate, Point], base: Point, facts: Facts, tried: Iterable[Candidate]
) -> list[Candidate]:
    """Merges of measured single recipes that would be on the front if their effects multiplied, best first."""
    best = [one for one in points if len(one.specs) == 1 and _useful(points[one], base)]
    best.sort(key=lambda one: ("weights" not in one.recipe.tables, one.specs))
    known, wished = set(tried), dict(points)
    for count in range(2, MERGED + 1):
        for group in itertools.combinations(best, count):
            merged = Candidate(tuple(spec for one in group for spec in one.specs))
            if _apart(group) and merged not in known and _fits(merged, facts):
                wished[merged] = _guess(merged.name, [points[one] for one in group], base)
    leads = set(front(list(wished.values())))
    found = [one for one, point in wished.items() if one not in known and point in leads]
    return sorted(found, key=lambda one: (len(one.specs), -wished[one].speed.median))


def _useful(point: Point, base: Point) -> bool:
    return point.speed.least > 1 or point.memory < base.memory


def _apart(group: Sequence[Candidate]) -> bool:
    """Whether no axis is set twice, as merging asks."""
    axes = [axis for one in group for axis in one.recipe.tables]
    return len(axes) == len(set(axes))


def _fits(candidate: Candidate, facts: Facts) -> bool:
    try:
        plan_of(candidate, facts)
    except AccelError:
        return False
    return True


def _guess(name: str, points: Sequence[Point], base: Point) -> Point:
    """As if the effects of recipes did not touch each other."""
    speed, loss, saved = points[0].speed, points[0].loss, base.memory - points[0].memory
    for point in points[1:]:
        speed, loss, saved = (
            speed.times(point.speed), loss + point.loss, saved + base.memory - point.memory,
        )  # fmt: skip
    return Point(name, len(points), max(0, base.memory - saved), (Stage(loss, speed),))
