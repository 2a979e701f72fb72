"""The trained parts that the loop reads: which file each is, of those that are kept for a model and its draft model."""

from __future__ import annotations

import json
from dataclasses import replace

from accel.compiler.facts_json import model_facts
from accel.compiler.job import Job
from accel.ir.errors import InputError
from accel.ir.parts import part
from accel.ir.program import Program
from accel.ir.trained import located, searched
from accel.passes.trained import options_of
from accel.runtime.backends.eager import EagerBackend
from accel.runtime.decode.trained_part import TrainedPart, like_logits, sample
from accel.runtime.model.compiled import CompiledModel


def name_parts(job: Job, program: Program, draft_model: CompiledModel | None) -> None:
    """Let the recipe name each part that is kept for these models, or comes along, unless it names one: an artifact
    takes it along.

    Raises InputError where there is none, of a method that cannot do without.
    """
    plan = job.plan
    there = {"model"} if draft_model is None else {"model", "draft"}
    wanted = {  # of a draft model that is not built yet the run finds out
        axis: method
        for axis, method in plan.methods.items()
        if isinstance(method, TrainedPart)
        and method.wants_part
        and not method.trained
        and there.issuperset(method.models)
    }
    if not wanted:
        return
    recipe = plan.recipe.to_json()  # what sessions go by
    with CompiledModel(EagerBackend(program), model_facts(program), recipe=recipe) as model:
        samples = {"model": sample(model.session)}
    if draft_model is not None:
        samples["draft"] = sample(draft_model.session)
    for axis, method in wanted.items():
        known = json.dumps({name: samples[name] for name in method.models})
        one, name = part(method.key, False), program.facts.name
        told = known, options_of(method), like_logits, InputError
        if method.optional:
            file, _ = searched(one, *told, "trained")
        else:
            file = located(one, ("trained", ""), name, *told)
        if file is not None:
            table = {**plan.recipe.tables[axis], "trained": str(file)}
            plan.recipe = replace(plan.recipe, tables={**plan.recipe.tables, axis: table})
            plan.methods[axis] = replace(method, trained=str(file))  # type: ignore[type-var]
