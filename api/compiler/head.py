"""The trained head of a draft's length: which file it is, of those that are kept for a model and its draft model."""

from __future__ import annotations

import json
from dataclasses import replace

from accel.compiler.facts_json import model_facts
from accel.compiler.job import Job
from accel.ir.errors import InputError
from accel.ir.parts import bundled, part
from accel.ir.program import Program
from accel.ir.trained import located
from accel.passes.trained import options_of
from accel.runtime.backends.eager import EagerBackend
from accel.runtime.length._head import Head, like_logits, sample
from accel.runtime.model.compiled import CompiledModel


def name_head(job: Job, program: Program, draft_model: CompiledModel) -> None:
    """Let the recipe name the head that is kept for these two models, unless it names one: an artifact holds it.

    Raises InputError where there is none.
    """
    method = job.plan.methods.get("length")
    if not isinstance(method, Head) or method.trained:
        return
    with CompiledModel(EagerBackend(program), model_facts(program)) as model:
        both = {"model": sample(model.session), "draft": sample(draft_model.session)}
    one, options = part(method.key, False), options_of(method)
    name, known = program.facts.name, json.dumps(both)
    file = located(one, ("trained", ""), name, known, options, like_logits, InputError)
    if file == bundled(method.key):
        return
    recipe = job.plan.recipe
    table = {**recipe.tables["length"], "trained": str(file)}
    job.plan.recipe = replace(recipe, tables={**recipe.tables, "length": table})
    job.plan.methods["length"] = replace(method, trained=str(file))  # type: ignore[type-var]
