"""choose(model, prompts) -> Choice: recipes are built and measured until the time is over; what is good goes on."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from accel.compiler.assemble import Plan
from accel.compiler.build_options import BuildOptions
from accel.compiler.choose import measure
from accel.compiler.choose.builds import Builds
from accel.compiler.choose.candidates import (
    BASE,
    Candidate,
    combinations,
    lossless,
    plan_of,
    singles,
)
from accel.compiler.choose.front import Point, survivors
from accel.compiler.choose.measure import Base, Rung, Test
from accel.compiler.choose.prompts import Samples, read_prompts, samples
from accel.compiler.choose.store import Store, fingerprint
from accel.compiler.explain.costs import cache
from accel.compiler.load.hub import model_folder
from accel.compiler.pipeline import reads_text
from accel.compiler.quality.calibration import read_calibration
from accel.ir.errors import AccelError, InputError
from accel.ir.version import VERSION
from accel.lowering.onnx.threads import default_threads
from accel.runtime.artifact.artifact import open_artifact
from accel.runtime.backends.onnx.machine import machine
from accel.runtime.loop import HOST
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.model.load import from_artifact

if TYPE_CHECKING:
    from collections.abc import Iterator

SHARES = (0.55, 0.75, 1.0)  # of the time, by the end of singles, of combinations, of the refinement
_BUILDS = ".accel-builds-"
_ROOM = 4  # a build is kept while so many more of its size would fit on the disk
_SECOND = 1.0  # between two lines of progress
_SHORT = 4  # prompts below so small a part of the context are worth a note
Progress = Callable[[str, float], None]
Tell = Callable[[str], None]


@dataclass
class Row:
    """What was found of a recipe. refused: why it does not fit, "" where it does; tests: by prompt.

    weights: bytes; kv: bytes of the cache after the longest prompt; peak: most resident bytes of a process, None
    where it was not measured.
    """

    candidate: Candidate
    refused: str = ""
    lossless: bool = False
    weights: int = 0
    kv: int = 0
    peak: int | None = None
    tests: list[Test] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.candidate.name

    @property
    def measured(self) -> bool:
        return any(test.runs for test in self.tests)

    def done(self, ladder: Sequence[Rung]) -> list[Rung]:
        """The rungs that were measured to their end; if none was, what there is."""
        found = [rung for rung in ladder if measure.reached(self.tests, rung)]
        return found or [measure.partial(self.tests)]

    def point(self, ladder: Sequence[Rung]) -> Point:
        """Where it stands, rung after rung."""
        stages = tuple(measure.stage(self.tests, rung) for rung in self.done(ladder))
        return Point(self.name, len(self.candidate.specs), self.weights + self.kv, stages)

    def to_json(self) -> dict[str, Any]:
        """As it is kept; `from_json` reads it."""
        return {
            "refused": self.refused, "weights": self.weights, "kv": self.kv,
            "peak": self.peak, "tests": measure.to_json(self.tests),
        }  # fmt: skip

    @staticmethod
    def from_json(candidate: Candidate, promised: bool, value: dict[str, Any]) -> Row:
        """Raises KeyError, TypeError or ValueError where it is something else."""
        peak = value["peak"]
        return Row(
            candidate, str(value["refused"]), promised, int(value["weights"]), int(value["kv"]),
            None if peak is None else int(peak), measure.from_json(value["tests"]),
        )  # fmt: skip


@dataclass(frozen=True)
class Request:
    """What was asked for: files, and the options of `choose` that figures depend on."""

    model: Path
    prompts: tuple[Path, ...]
    options: BuildOptions
    new: int
    recipes: tuple[str, ...]
    threads: int


@dataclass
class Choice:
    """All that was found. rows: measured ones, base first. refused: recipe -> why. untried: for lack of time."""

    request: Request
    machine: dict[str, Any]
    samples: Samples
    context: int
    ladder: list[Rung]
    rows: list[Row]
    refused: dict[str, str]
    untried: list[str]
    notes: list[str]
    calibrated: set[str]  # recipes that read a calibration text


def choose(
    model: Path,
    prompts: Sequence[Path],
    out: Path,
    *,
    budget: float,
    options: BuildOptions,
    new: int = 32,
    recipes: Sequence[str] = (),
    progress: Progress | None = None,
) -> Choice:
    """Measure recipes on a model and prompts until the time is over. Results are kept in `out`, and a later call
    with the same model, prompts, options and machine goes on from them.

    Args:
        model: a Hugging Face model directory, or the id of a cached repository.
        prompts: files as `read_prompts` takes them.
        budget: seconds. A build or a round that has begun is ended.
        options: those of the builds.
        new: tokens generated after each prompt.
        recipes: names and files; only these and their combinations are tried. Default: all bundled ones.

    Raises:
        AccelError: with the place, the reason and the next step. What was measured before is kept.
    """
    if not budget > 0:
        raise InputError(f"--budget of {budget:g} s leaves no time; give at least 1s, such as 10m")
    given, tried = read_prompts(prompts), singles(recipes)
    folder = model_folder(model, options.download)
    threads = options.threads or default_threads()
    request = Request(model, tuple(prompts), options, new, tuple(recipes), threads)
    calibration = read_calibration(options.calibration)
    key = {
        "accel": VERSION,
        "model": fingerprint(folder),
        "machine": machine(threads),
        "prompts": [[one.text, one.answer] for one in given],
        "new": new,
        "context": options.max_context,
        "tokenizer": str(options.tokenizer or ""),
        "calibration": calibration if isinstance(calibration, str) else "",
    }
    with ExitStack() as stack:
        store = Store(out, key)
        stack.callback(store.close)
        clock = _Clock(budget, progress or (lambda *_: None))
        clock.tell("base", "capture")
        builds = Builds(folder, options)
        facts = builds.program.facts
        if facts.diffusion is not None:
            raise InputError(
                f"{facts.name} is a masked-diffusion model; choose compares models that generate token by "
                "token. Build its recipes (dllm-lowconf, dllm-threshold, …) and compare them with accel-compile bench"
            )
        if facts.encoder is not None and facts.encoder.features:
            raise InputError(
                f"the encoder of {facts.name} takes features, and prompts are text; choose compares models that "
                "read text. Build recipes and compare them with accel-compile bench"
            )
        if builds.tokenizer is None:
            raise InputError(f"{model} has no tokenizer for the prompts; give tokenizer=…")
        found = samples(given, facts, builds.tokenizer, new)
        for stale in out.glob(f"{_BUILDS}*"):  # of a run that was killed
            shutil.rmtree(stale, ignore_errors=True)
        temporary = stack.enter_context(tempfile.TemporaryDirectory(dir=out, prefix=_BUILDS))
        work = stack.enter_context(
            _Work(request, store, builds, found, Path(temporary), clock).open()
        )
        work.run(tried)
        return work.choice(machine(threads))


class _Clock:
    """The time that is left, and what is told of it."""

    def __init__(self, budget: float, progress: Progress):
        self.budget = budget
        self._start = time.monotonic()
        self._progress = progress
        self._told = ("", 0.0)

    def left(self, share: float = 1.0) -> float:
        """Seconds until a share of the budget is spent."""
        return self.budget * share - (time.monotonic() - self._start)

    def tell(self, recipe: str, what: str) -> None:
        """Tell at the start of a recipe, and then not oftener than every second."""
        now = time.monotonic()
        if recipe == self._told[0] and now < self._told[1] + _SECOND:
            return
        self._told = recipe, now
        left = max(0, round(self.left()))
        share = min(1.0, 1 - self.left() / self.budget)
        self._progress(f"{recipe}: {what} ({left // 60}:{left % 60:02d} left)", share)


class _Work:
    """One run: rows that are measured, and builds that are kept for more."""

    def __init__(
        self,
        request: Request,
        store: Store,
        builds: Builds,
        samples: Samples,
        folder: Path,
        clock: _Clock,
    ):
        self.request = request
        self.store = store
        self.builds = builds
        self.samples = samples
        self.folder = folder
        self.clock = clock
        self.ladder = measure.rungs(len(samples.rows))
        self.rows: dict[Candidate, Row] = {}
        self.untried: list[Candidate] = []
        self.crashed: dict[str, str] = {}
        self._plans: dict[Candidate, Plan] = {}
        self._kept: dict[Candidate, Path] = {}
        self._base: Base | None = None
        self._spent: list[float] = []  # seconds of each build with its first rung

    @contextmanager
    def open(self) -> Iterator[_Work]:
        """Close base at the end."""
        try:
            yield self
        finally:
            if self._base is not None:
                self._base.model.close()

    def run(self, first: Sequence[Candidate]) -> None:
        """Singles, their combinations, then more prompts for the better half, and again while that brings up new
        ones; each has a share of the time, and what it leaves goes to the others.
        """
        for one in (BASE, *first):
            self._look_up(one)
        self._try([BASE], 1.0, needed=True)
        for shares in itertools.chain([SHARES], itertools.repeat((1.0, 1.0, 1.0))):
            before = self._count()
            self._try(first, shares[0])
            self._try(self._combinations(), shares[1])
            self._refine(shares[2])
            if shares != SHARES and self._count() == before:
                break
        self.untried = [one for one in (*first, *self._combinations()) if not self._settled(one)]

    def _count(self) -> int:
        return len(self._measured()) + len(self.crashed)

    def choice(self, on: dict[str, Any]) -> Choice:
        rows = sorted(self._measured(), key=lambda row: row.candidate != BASE)
        refused = {row.name: row.refused for row in self.rows.values() if row.refused}
        return Choice(
            self.request, on, self.samples, self.builds.program.facts.max_context, self.ladder, rows,
            {**refused, **self.crashed}, [one.name for one in self.untried], self._notes(rows),
            {one.name for one, plan in self._plans.items() if reads_text(plan)},
        )  # fmt: skip

    def _measured(self) -> list[Row]:
        return [row for row in self.rows.values() if row.measured]

    def _points(self) -> dict[Candidate, Point]:
        return {row.candidate: row.point(self.ladder) for row in self._measured()}

    def _combinations(self) -> list[Candidate]:
        points = self._points()
        if BASE not in points:
            return []
        facts = self.builds.program.facts
        found = combinations(points, points[BASE], facts, [*self.rows, *self._kept])
        for one in found:
            self._look_up(one)
        return [one for one in found if one.name not in self.crashed]

    def _look_up(self, candidate: Candidate) -> None:
        """A row of a recipe that was refused, or that an earlier run measured."""
        try:
            plan = self._plans[candidate] = plan_of(candidate, self.builds.program.facts)
        except AccelError as error:
            self.rows[candidate] = Row(candidate, " ".join(str(error).split()))
            return
        if kept := self.store.read(candidate.recipe.tables):
            try:
                self.rows[candidate] = Row.from_json(candidate, lossless(plan), kept)
            except (KeyError, TypeError, ValueError):
                pass  # written by hand: measured again

    def _settled(self, candidate: Candidate) -> bool:
        row = self.rows.get(candidate)
        return (
            candidate.name in self.crashed or row is not None and bool(row.refused or row.measured)
        )

    def _try(self, candidates: Iterable[Candidate], share: float, needed: bool = False) -> None:
        """The first rung of those that have none, while there is time for another."""
        for candidate in candidates:
            expected = median(self._spent) if self._spent else 0.0
            if not needed and self.clock.left(share) <= expected:
                return
            if not self._settled(candidate):
                start = time.monotonic()
                self._measure(candidate, 0)
                self._spent.append(time.monotonic() - start)

    def _refine(self, share: float) -> None:
        """Rung after rung, with half of the points each time."""
        alive = self._points()
        for level in range(len(self.ladder)):
            best = {point.name for point in survivors(list(alive.values()))}
            chosen = [one for one in alive if one == BASE or one.name in best]
            for one in chosen:
                if self.clock.left(share) <= 0:
                    return
                row = self.rows[one]
                done = measure.reached(row.tests, self.ladder[level])
                if not done or (row.peak is None and level):
                    self._measure(one, level)
            points = self._points()  # without those that failed just now
            alive = {one: points[one] for one in chosen if one in points}

    def _measure(self, candidate: Candidate, level: int) -> None:
        """A rung of a recipe; what it says is kept at once."""
        tell: Tell = partial(self.clock.tell, candidate.name)
        try:
            row = self._built(candidate, tell)
            if row.refused:
                return
            for rung in self._parts(candidate, self.ladder[level]):
                self._climb(candidate, row, rung, tell)
            if level and row.peak is None:
                tell("memory")
                longest = self.samples.longest
                tokens = int((longest.ids if longest.source is None else longest.source).size)
                row.peak = measure.peak(self._kept[candidate], self.request.options.threads, tokens)
        except AccelError as error:
            if candidate == BASE:
                raise
            self.rows[candidate] = row = Row(candidate, " ".join(str(error).split()))
        except Exception as error:
            if candidate == BASE:
                raise
            self.crashed[candidate.name] = (
                f"{type(error).__name__}: {error}: this is a bug in accel"
            )
            self.rows.pop(candidate, None)
            return
        finally:
            self._drop(candidate)
        self.store.write(candidate.recipe.tables, row.to_json())

    def _parts(self, candidate: Candidate, rung: Rung) -> list[Rung]:
        """A rung, round by round where sessions share blocks: a model opened anew has seen no prompt before."""
        if "kv.reuse" not in self._plans[candidate].methods:
            return [rung]
        return [Rung(rung.prompts, number + 1) for number in range(rung.rounds)]

    def _climb(self, candidate: Candidate, row: Row, rung: Rung, tell: Tell) -> None:
        """Measure what a rung lacks."""
        base = self._open_base()
        model = base.model if candidate == BASE else self._open(candidate)
        try:
            measure.measure(model, base, row.tests, rung, lambda: self.clock.left() > 0, tell)
        finally:
            if model is not base.model:
                model.close()

    def _built(self, candidate: Candidate, tell: Tell) -> Row:
        """The recipe's row, with its artifact in a folder."""
        row = self.rows.setdefault(
            candidate, Row(candidate, lossless=lossless(self._plans[candidate]))
        )
        if candidate in self._kept:
            return row
        tell("build")
        folder = self.folder / f"{len(self._kept)}-{time.monotonic_ns()}"
        with self.builds.build(self._plans[candidate], folder, lambda what, _: tell(what)) as model:
            self._kept[candidate] = folder
            if why := self._idle(candidate, model):
                row.refused = why
                self.store.write(candidate.recipe.tables, row.to_json())
                return row
            row.weights = measure.weights_bytes(model)
            row.kv = self._cache(candidate, model)
        return row

    def _idle(self, candidate: Candidate, model: CompiledModel) -> str:
        """Why a recipe leaves the model as it is at this context; "" where it does something."""
        plan = self._plans[candidate]
        names = {step.name for step in plan.passes}
        own = [step for step in model.report["steps"] if step["name"] in names]
        idle = own and all(step["refused"] and not step["changed"] for step in own)
        if not idle or {*HOST, "kv.reuse"} & set(plan.methods):
            return ""
        return f"changes nothing here: {own[0]['refused'][0]}"

    def _cache(self, candidate: Candidate, model: CompiledModel) -> int:
        """Bytes of KV after the longest prompt; by formula where sessions share blocks, which none counts."""
        longest, methods = self.samples.longest, self._plans[candidate].methods
        if "kv.reuse" in methods:
            count = longest.ids.size
            return cache(model.program, None, methods, (count,), 0).bytes(count)
        beside = 0 if model.draft_model is None else model.draft_model.report["kv_bytes_per_token"]
        return measure.kv_bytes(model, longest) + int(beside * longest.ids.size)

    def _open(self, candidate: Candidate) -> CompiledModel:
        artifact = open_artifact(self._kept[candidate], hashes=False)
        return from_artifact(artifact, threads=self.request.options.threads)

    def _open_base(self) -> Base:
        if self._base is None:
            self._built(BASE, partial(self.clock.tell, BASE.name))
            self._base = Base(self._open(BASE), self.samples)
        return self._base

    def _drop(self, candidate: Candidate) -> None:
        """Remove a build that takes too much room, or that nothing more is asked of."""
        folder = self._kept.get(candidate)
        if folder is None or candidate == BASE:
            return
        row = self.rows.get(candidate)
        size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
        fits = shutil.disk_usage(self.folder).free > _ROOM * size
        best = survivors(list(self._points().values()))
        if row is None or row.refused or not fits or row.name not in {p.name for p in best}:
            shutil.rmtree(folder, ignore_errors=True)
            del self._kept[candidate]

    def _notes(self, rows: Sequence[Row]) -> list[str]:
        found = []
        facts = self.builds.program.facts
        longest, context = self.samples.longest.length, facts.max_context
        if facts.encoder is None and longest * _SHORT < context:
            found.append(
                f"The longest prompt and its new tokens have {longest} of {context} tokens. Recipes for long prompts "
                "show little here; give prompts as long as yours will be."
            )
        for row in rows:
            tests = row.tests
            off = [t for t in tests if not t.equal or t.same < t.tokens]
            if row.lossless and off:
                found.append(
                    f"{row.name} promises the model's greedy tokens, but {len(off)} of {len(tests)} texts differ: "
                    "a near tie that rounding decides, or a bug."
                )
        return found
