"""Program -> Program. A pass is a frozen dataclass; its fields are its options."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from accel.ir.axis import find_axes
from accel.ir.errors import AccelError, PassError, RecipeError
from accel.ir.facts import Facts
from accel.ir.program import Program
from accel.ir.versions import remembered_sizes
from accel.ir.weights import Pages


@dataclass
class Report:
    """What a pass did: how many sites it changed, and why it left others as they were."""

    changed: int = 0
    refused: list[str] = field(default_factory=list)


class Rewriting(ABC):
    """A method that rewrites programs: a pass itself, or one that a pass of its axis serves (`steps`)."""

    error: ClassVar[float] = 1e-4  # largest error that it may add to the logits (relative)
    grade: ClassVar[str] = "lossless"  # how its tokens compare: see accel.compiler.assemble.GRADES

    @abstractmethod
    def steps(self) -> Sequence[Pass]:
        """The passes of a recipe that names it."""


@dataclass(frozen=True)
class Pass(Rewriting):
    """One rewrite of a program. The program is valid before and after, not necessarily in between."""

    after: ClassVar[tuple[type[Pass], ...]] = ()  # these must have run before
    must_change: ClassVar[bool] = False  # finding nothing is an error, not a shrug
    entry: ClassVar[str] = "step"  # the entry that it rewrites, which the numeric check runs
    flat: ClassVar[bool] = False  # it works on the state, and runs before layers become regions
    stage: ClassVar[int] = 0  # of a recipe's own passes those of a lower stage run first
    reads_text: ClassVar[bool] = False  # it goes by `program.calibration`
    reads_spelling: ClassVar[bool] = False  # it goes by `program.spelling`
    alone: ClassVar[bool] = (
        False  # checked right before and after it, as one that declares an error
    )

    @property
    def method(self) -> Rewriting:
        """The method that it serves: most passes are methods themselves."""
        return self

    @property
    def name(self) -> str:
        """As reports and errors give it."""
        return type(self.method).__name__

    def steps(self) -> Sequence[Pass]:
        return [self]

    @property
    def second_model_folder(self) -> str:
        """The folder of another model that it goes by, which is then `program.second_model`; empty: none."""
        return ""

    def refuse(self, facts: Facts) -> str | None:
        """Why it cannot take a model; None where it may.

        Asked before capture, so of `facts` only name, sizes and `config` are known (the model's
        configuration as a dict, empty where it has none). What only the graph tells, `run` refuses.
        """
        return None

    @abstractmethod
    def run(self, program: Program) -> Report:
        """Rewrite the program in place."""


@dataclass(frozen=True)
class Step:
    """One line of a compile report."""

    name: str
    changed: int
    refused: list[str]
    seconds: float
    error: (
        float | None
    )  # relative error of the logits after the pass; None: checked with a later one


Check = Callable[[Program, Pass], float]
Watch = Callable[[Pass, Step, Program], None]


@remembered_sizes()
def run(
    program: Program,
    passes: Sequence[Pass],
    check: Check | None = None,
    watch: Watch = lambda *_: None,
    *,
    done: Sequence[Pass] = (),
) -> list[Step]:
    """Run passes in order, verifying the program's rules after each one.

    Numbers are checked after groups of passes, which takes a group no longer than one pass: those of every model, those
    of the recipe, and each alone that may move the logits. Where a group fails, its passes are run again on a copy of
    the program with a check after each, so that the error names the one.

    Args:
        check: measures the program's numeric error and raises PassError past the pass's bound.
        watch: sees every pass, its report line and the program (dumps, progress).
        done: passes that the program went through before.

    Raises:
        PassError: a pass is out of order, found nothing that it had to find, broke the program's
            rules, or changed what it computes.
    """
    from accel.ir.spec import verify

    check_order([*done, *passes])
    steps: list[Step] = []
    group: list[Pass] = []  # since the last check
    before, changed = program, True  # what is captured is checked, too
    for step, after in itertools.zip_longest(passes, passes[1:]):
        if check and not group:
            before = program.copy()
        group.append(step)
        start = time.perf_counter()
        error, last = None, after is None or _apart(step, after)
        try:
            report = _apply(step, program)
            if step.must_change and not report.changed:
                nearest = (report.refused or ["no candidate in the graph"])[0]
                raise PassError(f"{named(step)} changed nothing. Nearest miss: {nearest}")
            verify(program, step.name)
            changed = changed or report.changed > 0
            Pages.give_back()
            if check and changed and last:
                error = _measure(check, step, program)
        except AccelError:
            if check:
                _blame(check, group[:-1], before)
            raise
        if last:
            group, changed = [], False
        seconds = time.perf_counter() - start
        steps.append(Step(step.name, report.changed, report.refused, round(seconds, 3), error))
        watch(step, steps[-1], program)
    return steps


def _apart(step: Pass, after: Pass) -> bool:
    """Whether the numbers are checked between two passes."""
    if any(p.alone or p.error > Pass.error for p in (step, after)) or step.entry != after.entry:
        return True
    return of_recipe(after) and not of_recipe(step)


def _blame(check: Check, group: Sequence[Pass], program: Program) -> None:
    """Run passes again, each checked. Raises PassError for the first that changed what the program computes."""
    for step in group:
        _apply(step, program)
        _measure(check, step, program)


def check_order(passes: Sequence[Pass]) -> None:
    """Raise PassError where a pass stands before one that it needs."""
    done: set[type[Pass]] = set()
    for step in passes:
        if late := [q.__name__ for q in step.after if q not in done]:
            raise PassError(f"{step.name} runs after {', '.join(late)}; move it down the recipe")
        done.add(type(step))


def named(step: Pass) -> str:
    """A pass as a recipe writes it, `kv.select = 'quest'`; one that no recipe names, by its class."""
    if not of_recipe(step):
        return step.name
    package, _, module = type(step.method).__module__.rpartition(".")
    return f"{package.removeprefix(f'{__name__}.')} = '{module.replace('_', '-')}'"


def of_recipe(step: Pass) -> bool:
    """Whether a recipe names it: the module of an axis."""
    package, _, module = type(step.method).__module__.rpartition(".")
    return package.removeprefix(f"{__name__}.") in find_axes() and not module.startswith("_")


def refuse(passes: Sequence[Pass], facts: Facts, recipe: str) -> None:
    """Raise RecipeError where a pass cannot take a model, by what is known before capture."""
    for step in passes:
        if reason := step.refuse(facts):
            raise RecipeError(
                f"recipe '{recipe}': {named(step)} cannot take {facts.name}: {reason}; "
                "leave it out, or choose another recipe (accel-compile recipes)"
            )


def _measure(check: Check, step: Pass, program: Program) -> float:
    """The check's error; a program that no longer runs is the pass's fault."""
    try:
        return check(program, step)
    except AccelError:
        raise
    except Exception as error:
        raise PassError(
            f"{named(step)} produced a program that does not run: {type(error).__name__}: {error}. "
            "Report it with the model's configuration"
        ) from error


def _apply(step: Pass, program: Program) -> Report:
    """Run one pass; what it did not foresee becomes an error that names it."""
    try:
        return step.run(program)
    except AccelError:
        raise
    except Exception as error:
        raise PassError(
            f"{named(step)} failed on this model: {type(error).__name__}: {error}. "
            f"Report it with the model's configuration"
        ) from error
