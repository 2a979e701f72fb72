"""Write the artifact of a build, check its graphs, and open it."""

from __future__ import annotations

import gc
import json
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from accel.compiler.build_report import build_report
from accel.compiler.facts_json import model_facts, state_json
from accel.compiler.genai import genai_config
from accel.compiler.host_parts import name_parts
from accel.compiler.job import Job
from accel.compiler.load.tokenizer import write_tokenizer
from accel.compiler.quality.batch_invariant import check_rows
from accel.ir.entries import kind_of
from accel.ir.entries.step import STEP
from accel.ir.program import Program
from accel.ir.version import VERSION
from accel.passes.check import NumericCheck
from accel.runtime.artifact.artifact import bind, open_artifact, write_manifest
from accel.runtime.artifact.atomic import AtomicOutputDir
from accel.runtime.artifact.manifest import (
    BATCH_INVARIANT,
    DRAFT_FOLDER,
    FORMAT,
    OWN_DRAFT,
    OWN_PREFIX,
)
from accel.runtime.artifact.shipped import ship
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.loop import HOST
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.model.load import from_artifact


def write_artifact(
    job: Job,
    program: Program,
    check: NumericCheck | None,
    tokenizer: Tokenizer | None,
    out: str | Path | None,
    self_draft: Program | None = None,
) -> CompiledModel:
    """Write the artifact to `out` or a temporary folder, and open it. `self_draft`: as in `in_process_model`."""
    remove = None
    if out is None:
        out = Path(tempfile.mkdtemp(prefix="accel-"))
        remove = weakref.finalize(program, shutil.rmtree, out, ignore_errors=True)
    try:
        with AtomicOutputDir(out, needs=program.params.nbytes) as folder:
            if job.build_draft is not None:
                with job.part("draft model", 0.8):
                    there = folder / DRAFT_FOLDER
                    with job.build_draft(
                        *(model_facts(program), job.output_head, tokenizer, there)
                    ) as draft_model:
                        name_parts(job, program, draft_model)
            else:
                name_parts(job, program, None)
            recipe = job.plan.recipe
            job.plan.recipe = replace(recipe, tables=ship(recipe.tables, HOST, folder))
            _write(job, program, check, tokenizer, folder, self_draft)
    except BaseException:
        if remove:
            remove()
        raise
    artifact = open_artifact(out, hashes=False)
    return from_artifact(artifact, threads=job.options.threads, program=program, on_close=remove)


def _write(
    job: Job,
    program: Program,
    check: NumericCheck | None,
    tokenizer: Tokenizer | None,
    folder: Path,
    self_draft: Program | None = None,
) -> None:
    from accel.compiler.report import write_html
    from accel.lowering.onnx.export import WEIGHTS, export_all
    from accel.lowering.onnx.native import library

    def show_step(step: str, share: float) -> None:
        if not share:
            job.progress(step, 0.8)

    with job.part("kernels", 0.8):
        library(show_step)
    with job.part("lower", 0.8):
        programs = {"": program, **({} if self_draft is None else {OWN_PREFIX: self_draft})}
        written = export_all(programs, folder, batch_invariant="numerics" in job.plan.methods)
        entries = written[""]
        gc.collect()  # the module, in cycles since its capture: its weights now lie in the file
    if job.adapters is not None:
        job.adapters.save(folder)
    if tokenizer is not None:
        write_tokenizer(tokenizer, folder)
    if check is not None:
        with job.part("verify", 0.9):
            for prefix, one in programs.items():
                found = _graph_errors(one, written[prefix], check, folder)
                job.errors |= {f"{prefix}{name}": error for name, error in found.items()}
    if "genai" in entries:
        config = genai_config(model_facts(program).to_json(), state_json(program))
        (folder / "genai_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    if self_draft is not None and job.self_draft is not None:
        drafting = _manifest(job.self_draft, self_draft, written[OWN_PREFIX])
        names = [WEIGHTS, *sorted(p.name for p in folder.glob(f"{OWN_PREFIX}*.onnx"))]
        hashes = bind(folder, drafting, names)
        drafting["report"] = build_report(job.self_draft, self_draft, {})
        write_manifest(folder, drafting, hashes, name=OWN_DRAFT, names=names)
    manifest = _manifest(job, program, entries)
    with job.part("hashes", 0.95):
        hashes = bind(folder, manifest)
    there = [p for p in sorted(folder.rglob("*")) if p.is_file()]
    report = build_report(
        job, program, {p.relative_to(folder).as_posix(): p.stat().st_size for p in there}
    )
    write_html(folder / "report.html", report)
    write_manifest(folder, {**manifest, "report": report}, hashes)
    if check is not None and "numerics" in job.plan.methods:
        check_rows(open_artifact(folder, hashes=False))
    job.progress("done", 1.0)


def _graph_errors(
    program: Program, entries: Mapping[str, Any], check: NumericCheck, folder: Path
) -> dict[str, float]:
    """The largest error of each entry's graphs, of the step by variant."""
    from accel.lowering.onnx.verify import entry_error

    errors: dict[str, float] = {}
    for name, entry in entries.items():
        if (kind := kind_of(name)) is None or kind.error is None:
            continue
        graphs = {"": entry["file"], **entry.get("variants", {})}
        if kind is STEP:
            for variant, file in graphs.items():
                found = entry_error(program, name, [folder / file], check.cases, check.rounded)
                errors[f"onnx {variant}".strip()] = found
        else:
            errors[name] = entry_error(program, name, [folder / file for file in graphs.values()])
    return errors


def _manifest(job: Job, program: Program, entries: dict[str, Any]) -> dict[str, Any]:
    """All but what is known last: the report, and the files."""
    return {
        "format": FORMAT,
        "accel": VERSION,
        "target": job.target,
        "model": model_facts(program).to_json(),
        "numerics": BATCH_INVARIANT if "numerics" in job.plan.methods else "float32",
        "grade": job.plan.grade,
        "recipe": job.plan.recipe.to_json(),
        "state": state_json(program),
        "entries": entries,
    }
