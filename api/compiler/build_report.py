"""What a build did, as one dict: in Python, in `--json` and in the artifact."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from accel.compiler.facts_json import kv_bytes, kv_mapped, model_facts, state_json
from accel.compiler.job import Job
from accel.ir.program import Program
from accel.ir.version import VERSION
from accel.runtime.model.meter import peak_memory


def build_report(job: Job, program: Program, sizes: dict[str, int]) -> dict[str, Any]:
    """What a build did: the same dict in Python, in `--json` and in the artifact."""
    from accel.lowering.onnx.ort import ort

    return {
        "model": model_facts(program).to_json(),
        "recipe": job.plan.recipe.to_json(),
        "target": job.target,
        "grade": job.plan.grade,
        "steps": [asdict(s) for s in job.steps],
        "seconds": {**job.seconds, "total": round(sum(job.seconds.values()), 3)},
        "errors": job.errors,
        **({"weights": job.weights} if job.weights else {}),
        **({"loss": job.loss} if job.loss else {}),
        "bytes": {**sizes, "total": sum(sizes.values())},
        "entries": {
            name: len(program.nodes(entry=entry))
            for name, entry in program.entries.items()
        },
        "state": state_json(program),
        "kv_bytes_per_token": kv_bytes(program),
        "kv_mapped_per_token": kv_mapped(program) if job.target == "onnx" else 0,
        "notes": program.facts.notes,
        "peak_memory": peak_memory(),
        "versions": {
            "accel": VERSION, "torch": torch.__version__, "onnxruntime": ort.__version__,
        },
    }  # fmt: skip
