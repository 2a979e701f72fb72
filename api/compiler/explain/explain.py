"""explain(recipe, model) -> Explanation: the passes are run on the graph alone; nothing is lowered or written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from accel.compiler.assemble import Plan, assemble, fit
from accel.compiler.build_options import BuildOptions
from accel.compiler.explain import costs, layer, words
from accel.compiler.explain.rates import Rates, rates
from accel.compiler.explain.subject import Subject, subject
from accel.compiler.facts_json import kv_bytes, model_facts, state_json
from accel.compiler.layer_summary import bytes_text
from accel.compiler.load.second_model import second_model
from accel.compiler.nearest import Nearest, nearest
from accel.compiler.pipeline import pipeline
from accel.compiler.quality.calibration import make_calibration
from accel.ir.calibration import Calibration
from accel.ir.errors import AccelError, InputError
from accel.ir.facts import Facts
from accel.ir.program import Program
from accel.ir.recipe import Recipe
from accel.lowering.onnx.threads import default_threads
from accel.passes import Pass, Rewriting, Step, refuse, run
from accel.passes.weights._kept import keeping
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.model.notebook import table

_ROWS = 4  # of a text, for passes that go by one
SHORT = 512  # tokens of the shorter prompt
Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Method:
    """One method of a recipe, in its own words."""

    axis: str
    use: str
    about: str
    details: str
    grade: str
    error: float | None
    options: list[dict[str, Any]]


@dataclass(frozen=True)
class Rewrite:
    """What one pass did to the step: sites, why others were left, operators by name (before, after)."""

    name: str
    about: str
    changed: int
    refused: list[str]
    operators: dict[str, tuple[int, int]]
    entries: list[str]
    bytes_per_token: tuple[int, int]


@dataclass
class Explanation:
    """All that is told. `refused`: why the recipe does not suit the model, "" where it does; then `nearest` is
    one that does, and what follows is empty.

    before, after: the model's facts and state with `base` and with the recipe. drawn: the number of the layer
    that changed most; pictures: both sides of it. speed: by tokens of prompt, (base, recipe), or why it is not told.
    """

    recipe: Recipe
    model: str
    grade: str
    methods: list[Method]
    max_context: int
    refused: str = ""
    nearest: Nearest | None = None
    notes: list[str] = field(default_factory=list)
    rewrites: list[Rewrite] = field(default_factory=list)
    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)
    drawn: int = 0
    changed_layers: list[int] = field(default_factory=list)
    pictures: tuple[layer.Layer, layer.Layer] | None = None
    cache: costs.Cache | None = None
    cache_base: costs.Cache | None = None
    weights: costs.Reading | None = None
    weights_base: costs.Reading | None = None
    speed: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    rates: Rates | None = None
    threads: int = 0

    @property
    def error(self) -> float | None:
        """The largest error that any method declares beyond rounding, of the largest logit."""
        return max((m.error for m in self.methods if m.error is not None), default=None)

    def _repr_html_(self) -> str:
        facts = [("model", self.model), ("about", self.recipe.about), ("grade", self.grade)]
        facts += [(f"{m.axis} = {m.use}", m.about) for m in self.methods]
        facts += [("note", note) for note in self.notes]
        facts += [("refused", self.refused)] if self.refused else []
        facts += [(f"pass {r.name}", f"{r.about} ({r.changed} sites)") for r in self.rewrites]
        if self.cache is not None and self.cache_base is not None:
            base, made = self.cache_base, self.cache
            kept = {"KV of a token": (base.slot, made.slot)}
            kept |= {f"KV after {n} tokens": (base.bytes(n), made.bytes(n)) for n in made.tokens}
            facts += [(k, f"{bytes_text(a)} → {bytes_text(b)}") for k, (a, b) in kept.items()]
        return table(self.recipe.name, [], facts)


def explain(
    recipe: Any,
    model: Any,
    *,
    max_context: int = 2048,
    speed: bool = True,
    threads: int | None = None,
    progress: Progress | None = None,
    trust_remote_code: bool = False,
    captured: Subject | None = None,
) -> Explanation:
    """Tell what a recipe does to a model. Nothing is written.

    Args:
        recipe, max_context, trust_remote_code: as `optimize` takes them.
        model: as `subject` takes it.
        speed: predict tokens per second, for which the machine is measured once.
        captured: the model, where it was captured before with this `max_context`.

    Raises:
        AccelError: no such recipe, method or model. A recipe that exists and does not suit the model is no
            error: `refused` says why.
    """
    tell = progress or (lambda *_: None)
    BuildOptions(max_context=max_context, threads=threads)  # which checks them
    asked = Recipe.load(recipe)
    plan, reason = _assembled(asked)
    if captured is None:
        tell("capture", 0.05)

        def check(facts: Facts) -> None:
            nonlocal reason
            if plan is not None and not reason:
                reason = _refusal(lambda: refuse(_passes(plan, False), facts, asked.name))

        captured = subject(model, max_context, check, trust_remote_code)
    work, facts = _Work(captured, tell), captured.program.facts
    if plan is not None and not reason:
        reason = _refusal(lambda: fit(plan, facts))
    if plan is not None and not reason:
        tell("passes", 0.5)
        base = work.base()
        try:
            return _told(
                asked, plan, work, base, work.run(plan), _rates(speed, threads, tell), threads
            )
        except AccelError as error:
            reason = str(error)
    near = nearest(
        asked,
        reason,
        lambda r: _try(work, r),
        lambda change: tell(f"trying {change}", 0.7),
        "options" if plan is None else "drop",
    )
    told = _methods(plan) if plan is not None else []
    grade = plan.grade if plan is not None else ""
    return Explanation(asked, facts.name, grade, told, facts.max_context, reason, near)


def _refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except AccelError as error:
        return str(error)
    return ""


def _assembled(recipe: Recipe) -> tuple[Plan | None, str]:
    """The plan, or why there is none: a value that no method takes. Unknown names stay errors."""
    try:
        return assemble(recipe), ""
    except AccelError as error:
        if "does not exist" in str(error):
            raise
        return None, str(error)


def _passes(plan: Plan, encoder: bool) -> list[Pass]:
    return pipeline(encoder, plan.every)


@dataclass
class _Run:
    """A program after a plan's passes, and what each of the plan's own did."""

    program: Program
    rewrites: list[Rewrite]


@dataclass
class _Work:
    """Runs plans on copies of one captured program."""

    subject: Subject
    tell: Progress

    def base(self) -> Program:
        """The program of the model as it is; of one subject made once."""
        if self.subject.base is None:
            self.subject.base = self.run(assemble(Recipe())).program
        return self.subject.base

    def run(self, plan: Plan) -> _Run:
        program = self.subject.program.copy()
        if any(step.reads_text for step in plan.passes):
            program.calibration = _text(program.facts)
        program.second_model = second_model(plan.passes, pipeline(), program.facts, None)
        plan.passes = keeping(program, plan.passes)
        own = {id(step) for step in plan.passes}
        rewrites: list[Rewrite] = []
        before = layer.operators(program), kv_bytes(program), set(program.entries)

        def watch(step: Pass, line: Step, now: Program) -> None:
            nonlocal before
            found = layer.operators(now), kv_bytes(now), set(now.entries)
            if id(step) in own:
                self.tell(line.name, 0.6)
                rewrites.append(Rewrite(
                    line.name, _about(step), line.changed, list(dict.fromkeys(line.refused)),
                    layer.changes(before[0], found[0]), sorted(found[2] - before[2]), (before[1], found[1]),
                ))  # fmt: skip
            before = found

        run(program, _passes(plan, program.facts.encoder is not None), None, watch)
        return _Run(program, rewrites)


def _try(work: _Work, recipe: Recipe) -> None:
    plan = assemble(recipe)
    fit(plan, work.subject.program.facts)
    refuse(_passes(plan, False), work.subject.program.facts, recipe.name)
    work.run(plan)


def _about(step: Pass) -> str:
    return words.details(step.method) or words.about(step.method)


def _text(facts: Facts) -> Calibration:
    """A few rows: what they say matters to no shape, and to few choices."""
    from pathlib import Path

    import accel.reference

    file = Path(next(iter(accel.reference.__path__))) / "tokenizer.json"
    tokenizer = Tokenizer(file) if file.is_file() else None
    found = make_calibration(None, tokenizer, facts, lambda *_: None)
    return Calibration(found.tokens[:_ROWS], found.held_out[:1], found.source, lambda *_: None)


def _methods(plan: Plan) -> list[Method]:
    """Every method, the ones that stand for tables left out included."""
    found = []
    for axis, method in plan.methods.items():
        table = plan.recipe.tables.get(axis, {})
        error = getattr(method, "error", None)
        grade = getattr(method, "grade", "")
        found.append(Method(
            axis, str(table.get("use", "")), words.about(method), words.details(method), grade,
            error if isinstance(method, Rewriting) and error and error > Pass.error else None,
            words.options(method, table),
        ))  # fmt: skip
    return found


def _rates(speed: bool, threads: int | None, tell: Progress) -> Rates | None:
    if not speed:
        return None
    try:
        return rates(
            threads or default_threads(), lambda name, share: tell(name, 0.8 + 0.2 * share)
        )
    except AccelError as error:
        raise InputError(f"this machine cannot be measured: {error}; use speed=False") from error


def _told(
    asked: Recipe,
    plan: Plan,
    work: _Work,
    base: Program,
    done: _Run,
    measured: Rates | None,
    threads: int | None,
) -> Explanation:
    """Everything about a recipe that was accepted."""
    subject, a, b = work.subject, base, done.program
    sides = layer.layers(a), layer.layers(b)
    counts = [layer.compare(x, y) for x, y in zip(*sides, strict=False)]
    most = max(range(len(counts)), key=counts.__getitem__)
    prompts = sorted({min(SHORT, b.facts.max_context - 1), b.facts.max_context - 1})
    dense = costs.cache(a, subject.sizes, {}, prompts, 0)
    held = costs.cache(b, subject.sizes, plan.methods, prompts, dense.slot)
    read = costs.reading(subject, a, a), costs.reading(subject, a, b)
    out = Explanation(
        asked, a.facts.name, plan.grade, _methods(plan), b.facts.max_context, notes=[*subject.notes, *b.facts.notes],
        rewrites=done.rewrites, before=_facts(a), after=_facts(b), drawn=most,
        changed_layers=[i for i, n in enumerate(counts) if n], pictures=(sides[0][most], sides[1][most]),
        cache=held, cache_base=dense, weights=read[1], weights_base=read[0], rates=measured,
        threads=threads or default_threads(),
    )  # fmt: skip
    if measured is not None:
        for prompt in prompts:
            both = [
                costs.predict(p, subject.sizes, w, c.tokens[prompt], measured)
                for p, w, c in ((a, read[0], dense), (b, read[1], held))
            ]
            out.speed[prompt] = (both[0], both[1])
    return out


def _facts(program: Program) -> dict[str, Any]:
    return {**model_facts(program).to_json(), "state": state_json(program)}
