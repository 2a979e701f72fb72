"""Run a build's passes over its program: progress, dumps, errors, and what those that approximate cost."""

from __future__ import annotations

import torch
from torch import Tensor

from accel.compiler.advice import refuse_broken
from accel.compiler.assemble import Plan
from accel.compiler.draft_build import check_rewind, share
from accel.compiler.facts_json import model_facts
from accel.compiler.job import Job, Progress
from accel.compiler.pipeline import loses, pipeline
from accel.compiler.quality.loss import loss, storage
from accel.ir.adapters import ROWS, AdapterFacts
from accel.ir.errors import RecipeError
from accel.ir.program import Program
from accel.passes import Pass, Step, refuse, run
from accel.passes.adapters.lora import Lora
from accel.passes.check import NumericCheck
from accel.passes.weights import Base as WeightsPass
from accel.passes.weights._calibrated import Calibrated
from accel.passes.weights._kept import keeping
from accel.runtime.backends.eager import EagerBackend
from accel.runtime.model.adapters import Adapters
from accel.runtime.model.compiled import CompiledModel

_LONG = 20  # a pass that runs the model over a text takes about as long as so many others


def progress_within(job: Job) -> Progress:
    """Progress within a pass, told at every twentieth of it."""
    told = ("", -1)

    def tell(name: str, share: float) -> None:
        nonlocal told
        now = (name.split(":")[0], int(20 * share))
        if now != told:
            told = now
            job.progress(name, _passed(job, share))

    return tell


def _passed(job: Job, share: float = 1.0) -> float:
    """The share of a build that is done with a share of the present pass."""
    sizes = [_LONG if isinstance(step, Calibrated) else 1 for step in job.passes()]
    done = len(job.steps)
    return min(
        0.8, 0.4 + 0.4 * (sum(sizes[:done]) + share * sum(sizes[done : done + 1])) / sum(sizes)
    )


def rewrite(job: Job, program: Program, check: NumericCheck | None) -> None:
    """All passes, each noted in the job, and checked where there is a `check`."""
    passes = job.passes(program.facts.encoder is not None)
    before = None

    def write(name: str) -> None:
        if job.dump:
            path = job.dump / f"{len(job.steps):02d}-{name.lower()}.txt"
            path.write_text(program.text(), encoding="utf-8")

    def watch(step: Pass, line: Step, program: Program) -> None:
        nonlocal before
        job.steps.append(line)
        coming = passes[len(job.steps)] if len(job.steps) < len(passes) else None
        if coming is not None:
            job.progress(type(coming).__name__, _passed(job, 0.0))
        write(line.name)
        if isinstance(step, Lora):
            _adapt(job, program)
            if check is not None:
                check.begin(program)  # with adapters from now on
        if before is None and coming is not None and loses(coming):
            before = program.copy()

    write("captured")
    job.progress(type(passes[0]).__name__, _passed(job, 0.0))
    run(program, passes, check, watch)
    if check is not None:
        job.errors["passes"] = max((s.error for s in job.steps if s.error is not None), default=0.0)
    if before is not None:
        if stored := any(isinstance(step, WeightsPass) for step in passes):
            job.weights = storage(before, program)
        text = program.calibration
        if check is not None and text is not None and (stored or text.source != "random"):
            job.loss = loss(before, program, text)
            refuse_broken(job.loss, job.plan)
    program.params.origins.clear()
    program.parts.clear()
    program.calibration = program.spelling = program.second_model = None


def _adapt(job: Job, program: Program) -> None:
    """Bring the adapters into the form in which sessions take them; checks use the first and the last."""
    facts = program.facts.adapters
    assert facts is not None
    job.adapters = Adapters(AdapterFacts(facts.modules))
    for name, given in job.peft_adapters.items():
        added = job.adapters.add(name, given)
        facts.ranks[name], facts.bytes[name] = added.rank, added.bytes
    names = list(job.peft_adapters)
    example = job.adapters.chosen([names[0], names[-1] if len(names) > 1 else None])
    program.examples = {n: torch.from_numpy(a) for n, a in example.arrays.items()}
    program.examples[ROWS] = torch.from_numpy(example.rows)


def rewritten_draft(
    job: Job, captured: Program, target: Program, plan: Plan, text: Tensor | None = None
) -> Program:
    """A captured program, by the recipe by which it drafts for the target, which has that `plan`. `text`: token ids
    that it is checked on.
    """
    if captured.facts.encoder is not None:
        raise RecipeError(
            f"recipe '{job.plan.recipe.name}': {captured.facts.name} has an encoder; a draft model must be a decoder"
        )
    job.plan.passes = keeping(captured, job.plan.passes)
    refuse(job.passes(), captured.facts, job.plan.recipe.name)
    check = NumericCheck(captured, text) if job.options.verify else None
    run(captured, pipeline(recipe_passes=job.plan.every), check)
    captured.calibration = captured.spelling = captured.second_model = None
    share(captured, target, any(isinstance(step, Calibrated) for step in job.plan.passes))
    facts, recipe = model_facts(captured), job.plan.recipe.to_json()
    with CompiledModel(EagerBackend(captured), facts, recipe=recipe) as model:
        check_rewind(model, plan)
    return captured
