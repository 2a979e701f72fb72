"""A model that runs in this process and writes no artifact."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from accel.compiler.build_report import build_report
from accel.compiler.facts_json import model_facts
from accel.compiler.host_parts import name_parts
from accel.compiler.job import Job
from accel.ir.program import Program
from accel.lowering.triton.lowered import Lowered, lower_program, triton_error
from accel.passes.check import NumericCheck
from accel.runtime.backends.eager import EagerBackend
from accel.runtime.backends.triton.backend import TritonBackend
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.model.compiled import CompiledModel


def in_process_model(
    job: Job,
    program: Program,
    check: NumericCheck | None,
    tokenizer: Tokenizer | None,
    self_draft: Program | None = None,
) -> CompiledModel:
    """A model that runs here and writes no artifact. `self_draft`: the program by which it drafts for itself."""
    held: dict[str, Tensor] = {}  # on the device
    rewritten = program
    if job.target == "triton":
        with job.part("lower", 0.8):
            program = lower_program(program, held)
        for dtype in sorted({str(d).removeprefix("torch.") for d in program.halves.values()}):
            program.facts.notes.append(
                f"products with weights in {dtype} round their inputs to it, and add in float32"
            )
        if check is not None:
            with job.part("verify", 0.9):
                job.errors["triton"] = triton_error(program, check.cases, check.rounded)
    draft_model = None
    if self_draft is not None and job.self_draft is not None:
        self_draft = lower_program(self_draft, held) if job.target == "triton" else self_draft
        draft_model = CompiledModel(
            _backend(self_draft),
            model_facts(self_draft),
            recipe=job.self_draft.plan.recipe.to_json(),
            report=build_report(job.self_draft, self_draft, {}),
            program=self_draft,
        )
    elif job.build_draft is not None:
        draft_model = job.build_draft(model_facts(program), job.output_head, tokenizer, None)
    name_parts(job, rewritten, draft_model)
    return CompiledModel(
        _backend(program),
        model_facts(program),
        tokenizer=tokenizer,
        recipe=job.plan.recipe.to_json(),
        report=build_report(job, program, {}),
        program=program,
        adapters=job.adapters,
        weights=lambda: _weights_digest(program),
        draft_model=draft_model,
    )


def _backend(program: Program) -> TritonBackend | EagerBackend:
    """What runs it here."""
    return TritonBackend(program) if isinstance(program, Lowered) else EagerBackend(program)


def _weights_digest(program: Program) -> str:
    """sha256 of a program's parameters."""
    found = hashlib.sha256()
    for name in sorted(program.params):
        value = program.params[name].detach().cpu().contiguous()
        found.update(f"{name} {value.dtype} {list(value.shape)} ".encode())
        found.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
