"""optimize(model, recipe) -> CompiledModel: capture, passes, lowering, checks, with a report of each step."""

from __future__ import annotations

import gc
import hashlib
import json
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accel.compiler.assemble import Plan, assemble, check_target, fit
from accel.compiler.build_options import BuildOptions
from accel.compiler.draft_build import Build as BuildDraft
from accel.compiler.draft_build import builder as draft_builder
from accel.compiler.draft_build import check_rewind, own_plan, share
from accel.compiler.facts_json import kv_bytes, kv_mapped, model_facts, state_json
from accel.compiler.genai import genai_config
from accel.compiler.load.beside import beside
from accel.compiler.load.checkpoint import load_model
from accel.compiler.load.hub import model_folder
from accel.compiler.load.merge import merged
from accel.compiler.load.tokenizer import read_tokenizer, write_tokenizer
from accel.compiler.quality.batch_invariant import check_rows
from accel.compiler.quality.calibration import make_calibration, read_calibration
from accel.compiler.quality.loss import loss, storage
from accel.ir.adapters import ROWS, AdapterFacts
from accel.ir.capture.capture import capture_inspected
from accel.ir.capture.inspect import inspect
from accel.ir.capture.traits import Kind
from accel.ir.entries import kind_of
from accel.ir.entries.step import STEP
from accel.ir.errors import LoweringError, RecipeError
from accel.ir.peft import PeftAdapter, read_adapter
from accel.ir.program import Program
from accel.ir.recipe import Recipe
from accel.ir.version import VERSION
from accel.ir.weights import Stored
from accel.lowering import triton
from accel.lowering.triton.lowered import Lowered, lower_program, triton_error
from accel.passes import Pass, Step, check_order, refuse, run
from accel.passes.adapters.lora import Lora
from accel.passes.check import NumericCheck
from accel.passes.clean.clean import Clean
from accel.passes.clean.fold import Fold
from accel.passes.clean.linear import Linears
from accel.passes.clean.real import Reals
from accel.passes.fuse.heads import Heads
from accel.passes.fuse.pack import Pack
from accel.passes.fuse.residual import Residual
from accel.passes.recognise.attention import Attention
from accel.passes.recognise.experts import Experts
from accel.passes.recognise.gate import Activations, Gates
from accel.passes.recognise.norm import Norms
from accel.passes.recognise.positions import Positions
from accel.passes.recognise.rope import Rope
from accel.passes.state.cache import Cache
from accel.passes.state.concat import Concat
from accel.passes.state.cross import Cross
from accel.passes.state.head import Head
from accel.passes.state.latent import Latent
from accel.passes.state.layers import Layers
from accel.passes.weights import Base as WeightsPass
from accel.passes.weights._calibrated import Calibrated
from accel.passes.weights._kept import keeping
from accel.runtime.artifact.artifact import bind, open_artifact, write_manifest
from accel.runtime.artifact.atomic import AtomicOutputDir, writable
from accel.runtime.artifact.manifest import (
    BATCH_INVARIANT,
    DRAFT_FOLDER,
    FORMAT,
    OWN_DRAFT,
    OWN_PREFIX,
)
from accel.runtime.artifact.shipped import check_shipped, ship
from accel.runtime.backends.eager import EagerBackend
from accel.runtime.backends.triton import TritonBackend
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.loop import HOST
from accel.runtime.model.adapters import Adapters, adapted, check_name
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.model.load import from_artifact
from accel.runtime.model.output import peak_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

_LONG = 20  # a pass that runs the model over a text takes about as long as so many others
Progress = Callable[[str, float], None]


def pipeline(
    encoder: bool = False, own: Sequence[Pass] = (), adapted: Sequence[str] = ()
) -> list[Pass]:
    """The passes of every model, in order, with the recipe's own passes among or after them. `adapted`: modules whose
    adapters sessions choose.
    """
    own = sorted(own, key=lambda step: step.rank)
    lora = [Lora(tuple(adapted))] if adapted else []
    return [
        Clean(), Reals(), Fold(), Linears(), *lora, Experts(), Positions(), Norms(), Attention(), Rope(),
        Activations(), Gates(), *([Cross()] if encoder else []), Latent(), Cache(), Head(),
        *(step for step in own if step.flat), Pack(), Heads(), Layers(), Residual(),
        *(step for step in own if not step.flat),
    ]  # fmt: skip


def reads_text(plan: Plan) -> bool:
    """Whether a build calibrates on a text, or measures weights on it."""
    return any(step.reads_text or isinstance(step, WeightsPass) for step in plan.passes)


@dataclass
class _Job:
    """One build: what is known so far, and how long each part took."""

    plan: Plan
    options: BuildOptions
    progress: Progress
    seconds: dict[str, float] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    weights: dict[str, Any] = field(default_factory=dict)  # what storing them in fewer bits did
    build_draft: BuildDraft | None = None  # makes the model that drafts
    own: _Job | None = None  # that of the model as it drafts for itself
    given: dict[str, PeftAdapter] = field(default_factory=dict)  # adapters that sessions choose
    adapters: Adapters | None = None  # the same, as sessions take them
    calibration: str | Tensor | None = None  # what was given, read
    dump: Path | None = None

    @property
    def target(self) -> str:
        return self.options.target

    @property
    def modules(self) -> list[str]:
        """Those that the adapters adapt which sessions choose. Raises InputError where one cannot be chosen."""
        return list(dict.fromkeys(m for given in self.given.values() for m in adapted(given)))

    @contextmanager
    def part(self, name: str, done: float) -> Iterator[None]:
        """Time a part of the build; `done` is the share of the work before it."""
        self.progress(name, done)
        start = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start, 3)


def optimize(
    model: Any,
    recipe: Any = "base",
    *,
    target: str = "onnx",
    tokenizer: Any = None,
    max_context: int = 2048,
    max_batch: int = 1,
    out: str | Path | None = None,
    verify: bool = True,
    calibration: Any = None,
    progress: Progress | None = None,
    trust_remote_code: bool = False,
    dump: str | Path | None = None,
    threads: int | None = None,
    download: bool = False,
    merge_adapter: str | Path | None = None,
    adapters: Mapping[str, str | Path] | None = None,
) -> CompiledModel:
    """Compile a language model: a causal decoder, an encoder-decoder or a masked-diffusion model.

    Args:
        model: an `nn.Module` that returns logits [B,T,V] for tokens [B,T], a Hugging Face model or
            model directory, the id of a repository in the Hugging Face cache ("org/name"), or a
            `torch.export.ExportedProgram` with symbolic B and T. Quantised weights of a directory stay
            in the codes that it holds them in.
        recipe: a name, a list of names (merged), a path to a TOML file, a dict, or a `Recipe`.
        target: "onnx" (an artifact for ONNX Runtime), "triton" (Triton kernels on a CUDA GPU, in this
            process) or "eager" (the PyTorch reference of every operator; slow).
        tokenizer: a fast Hugging Face tokenizer, a `tokenizers.Tokenizer`, or a path. Default: the
            tokenizer in the model directory.
        max_context: maximum sequence length in tokens; at most the model's own limit.
        max_batch: maximum number of prompts per call; a search uses several rows per prompt.
        out: folder for the artifact. Default: a temporary folder until `close()`.
        verify: compare the logits after every pass and for the written graph, and measure the loss of
            weight quantisation. The captured program is always compared with the module.
        calibration: calibration text for weight quantisation (int4-awq, int4-gptq) and its loss: the
            path of a text file, or token ids [n,T]. A fifth is held out for the loss. Default: the
            bundled text; random tokens if the model has no tokenizer.
        progress: called with (name of the step, fraction of the work done).
        trust_remote_code: allow Python code from the model directory to run.
        dump: folder for the program's text before and after each pass.
        threads: compute threads of the returned model, as in `accel.load`.
        download: let huggingface_hub download what the cache lacks of a repository.
        merge_adapter: folder of a LoRA or DoRA adapter that `peft` saved, merged into the weights before
            the recipe sees them.
        adapters: name -> folder of a LoRA adapter that `peft` saved. The artifact holds the base weights
            once and these beside them; a session chooses (`session(adapter=name)`).

    Returns:
        The compiled model. Close it, or use it in a `with` statement.

    Raises:
        AccelError: with the place, the reason and the next step. No partial output remains.
    """
    options = BuildOptions(
        target,
        tokenizer,
        max_context,
        max_batch,
        verify,
        calibration,
        trust_remote_code,
        dump,
        threads,
        download,
        merge_adapter,
        adapters or {},
    )
    return build(model, recipe, options, out, progress)


def build(
    model: Any,
    recipe: Any,
    options: BuildOptions,
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> CompiledModel:
    """`optimize` with its options as one object."""
    target, max_context = options.target, options.max_context
    if target != "onnx" and out is not None:
        raise LoweringError(
            f"out is for artifacts, but target '{target}' writes no files; use target='onnx'"
        )
    if target == "triton":
        triton.need()
    if out is not None:
        AtomicOutputDir(out).check()
    job = _started(recipe, options, progress)
    merge = None if options.merge_adapter is None else read_adapter(options.merge_adapter)
    path = model_folder(model, options.download) if isinstance(model, (str, Path)) else None
    tokenizer = read_tokenizer(options.tokenizer, path)
    _check_tokenizer(job, tokenizer)
    stored: dict[Tensor, Stored] = {}
    notes: list[str] = []
    if path is not None:
        with job.part("load", 0.0):
            loaded = load_model(path, options.trust_remote_code)
            model, stored, notes = loaded.model, loaded.stored, loaded.notes
            del loaded
    if merge is not None:
        stored = merged(model, stored, merge)
    traits = inspect(model, max_context)
    if traits.kind is not Kind.PROGRAM:
        refuse(_passes(job), facts := traits.facts(), job.plan.recipe.name)
        fit(job.plan, facts, captured=False)
    with job.part("capture", 0.1):
        program = capture_inspected(model, traits, stored)
    program.facts.notes += notes
    if path is not None:
        del model, stored  # the weights live on only where the program still reads them
    return _compiled(job, program, tokenizer, out)


def build_captured(
    program: Program,
    recipe: Any,
    options: BuildOptions,
    tokenizer: Tokenizer | None,
    out: str | Path,
    progress: Progress | None = None,
) -> CompiledModel:
    """An artifact of a program that was captured before and stays as it was: for many recipes of one model.

    Raises AccelError, as `optimize`.
    """
    AtomicOutputDir(out).check()
    job = _started(recipe, options, progress)
    _check_tokenizer(job, tokenizer)
    refuse(_passes(job), program.facts, job.plan.recipe.name)
    return _compiled(job, program.copy(), tokenizer, out)


def _started(recipe: Any, options: BuildOptions, progress: Progress | None) -> _Job:
    """A build of which all is checked that needs no model."""
    job = _Job(assemble(Recipe.load(recipe)), options, progress or (lambda *_: None))
    if options.dump is not None:
        job.dump = writable(options.dump)
    job.build_draft = draft_builder(job.plan, build, options)
    check_shipped(job.plan.recipe.tables, HOST)
    if (own := own_plan(job.plan, options.max_context)) is not None:
        job.own = _Job(own, replace(options, dump=None, adapters={}), lambda *_: None)
        check_order(_passes(job.own))
    check_target(job.plan, job.target)
    job.given = {check_name(n): read_adapter(path) for n, path in options.adapters.items()}
    check_order(_passes(job))
    if options.calibration is not None and not reads_text(job.plan):
        raise RecipeError(
            f"recipe '{job.plan.recipe.name}' does not use calibration, because it does not quantise "
            "weights; give a recipe with [weights], such as int4-gptq"
        )
    job.calibration = read_calibration(options.calibration)
    return job


def _check_tokenizer(job: _Job, tokenizer: Tokenizer | None) -> None:
    """Refuse a model whose text the recipe's loop cannot work with; one without a tokenizer may get it later."""
    if tokenizer is not None and (loop := job.plan.methods.get("loop")) is not None:
        loop.check(tokenizer)


def _compiled(
    job: _Job, program: Program, tokenizer: Tokenizer | None, out: str | Path | None
) -> CompiledModel:
    """The passes over a captured program, and what its target makes of it."""
    fit(job.plan, program.facts)
    if "draft" in job.plan.methods:
        job.plan.methods["draft"].store(
            program.facts, tokenizer
        )  # which is refused before any work
    program.facts.max_batch = job.options.max_batch
    job.plan.passes = keeping(program, job.plan.passes)
    if reads_text(job.plan):
        program.calibration = make_calibration(
            job.calibration, tokenizer, program.facts, _inner(job)
        )
    if tokenizer is not None and any(step.reads_spelling for step in job.plan.passes):
        program.spelling = [tokenizer.decode([i]) for i in range(program.facts.vocab_size)]
    program.beside = beside(job.plan.passes, pipeline(), program.facts, tokenizer)
    check = NumericCheck(program) if job.options.verify else None
    captured = None if job.own is None else program.copy()
    with job.part("passes", 0.4):
        _rewrite(job, program, check)
    own = None
    if job.own is not None and captured is not None:
        with job.part("draft passes", 0.8):
            own = _drafting(job.own, captured, program, job.plan)
    if job.target != "onnx":
        return _in_process(job, program, check, tokenizer, own)
    return _artifact(job, program, check, tokenizer, out, own)


def _drafting(job: _Job, captured: Program, target: Program, plan: Plan) -> Program:
    """A captured program, by the recipe by which it drafts for the target, which has that `plan`."""
    if captured.facts.encoder is not None:
        raise RecipeError(
            f"recipe '{job.plan.recipe.name}': {captured.facts.name} has an encoder; a draft model must be a decoder"
        )
    job.plan.passes = keeping(captured, job.plan.passes)
    refuse(_passes(job), captured.facts, job.plan.recipe.name)
    check = NumericCheck(captured) if job.options.verify else None
    run(captured, pipeline(own=job.plan.every), check)
    captured.calibration = captured.spelling = captured.beside = None
    share(captured, target, any(isinstance(step, Calibrated) for step in job.plan.passes))
    facts, recipe = model_facts(captured), job.plan.recipe.to_json()
    with CompiledModel(EagerBackend(captured), facts, recipe=recipe) as model:
        check_rewind(model, plan)
    return captured


def _passes(job: _Job, encoder: bool = False) -> list[Pass]:
    """All passes of a build, in order."""
    own = pipeline(encoder, job.plan.every, job.modules)
    return [*own, *([Concat()] if job.target == "onnx" else [])]


def _inner(job: _Job) -> Progress:
    """Progress within a pass, told at every twentieth of it."""
    told = ("", -1)

    def tell(name: str, share: float) -> None:
        nonlocal told
        now = (name.split(":")[0], int(20 * share))
        if now != told:
            told = now
            job.progress(name, _passed(job, share))

    return tell


def _passed(job: _Job, share: float = 1.0) -> float:
    """The share of a build that is done with a share of the present pass."""
    sizes = [_LONG if isinstance(step, Calibrated) else 1 for step in _passes(job)]
    done = len(job.steps)
    return min(
        0.8, 0.4 + 0.4 * (sum(sizes[:done]) + share * sum(sizes[done : done + 1])) / sum(sizes)
    )


def _rewrite(job: _Job, program: Program, check: NumericCheck | None) -> None:
    passes = _passes(job, program.facts.encoder is not None)
    before = None

    def write(name: str) -> None:
        if job.dump:
            path = job.dump / f"{len(job.steps):02d}-{name.lower()}.txt"
            path.write_text(program.text(), encoding="utf-8")

    def watch(step: Pass, line: Step, program: Program) -> None:
        nonlocal before
        job.progress(line.name, _passed(job))
        job.steps.append(line)
        write(line.name)
        if isinstance(step, Lora):
            _adapt(job, program)
            if check is not None:
                check.begin(program)  # with adapters from now on
        coming = passes[len(job.steps)] if len(job.steps) < len(passes) else None
        if before is None and isinstance(coming, WeightsPass):
            before = program.copy()

    write("captured")
    run(program, passes, check, watch)
    if check is not None:
        job.errors["passes"] = max((s.error for s in job.steps if s.error is not None), default=0.0)
    if before is not None and program.calibration is not None:
        job.weights = storage(before, program)
        if check is not None:
            job.weights |= loss(before, program, program.calibration)
    program.calibration = program.spelling = program.beside = None


def _adapt(job: _Job, program: Program) -> None:
    """Bring the adapters into the form in which sessions take them; checks use the first and the last."""
    facts = program.facts.adapters
    assert facts is not None
    job.adapters = Adapters(AdapterFacts(facts.modules))
    for name, given in job.given.items():
        added = job.adapters.add(name, given)
        facts.ranks[name], facts.bytes[name] = added.rank, added.bytes
    names = list(job.given)
    example = job.adapters.chosen([names[0], names[-1] if len(names) > 1 else None])
    program.examples = {n: torch.from_numpy(a) for n, a in example.arrays.items()}
    program.examples[ROWS] = torch.from_numpy(example.rows)


def _in_process(
    job: _Job,
    program: Program,
    check: NumericCheck | None,
    tokenizer: Tokenizer | None,
    own: Program | None = None,
) -> CompiledModel:
    """A model that runs here and writes no artifact. `own`: the program by which it drafts for itself."""
    held: dict[str, Tensor] = {}  # on the device
    if job.target == "triton":
        with job.part("lower", 0.8):
            program = lower_program(program, held)
        if check is not None:
            with job.part("verify", 0.9):
                job.errors["triton"] = triton_error(program, check.cases)
    draft_model = None
    if own is not None and job.own is not None:
        own = lower_program(own, held) if job.target == "triton" else own
        draft_model = CompiledModel(
            _backend(own),
            model_facts(own),
            recipe=job.own.plan.recipe.to_json(),
            report=_report(job.own, own, {}),
            program=own,
        )
    elif job.build_draft is not None:
        draft_model = job.build_draft(model_facts(program), tokenizer, None)
    return CompiledModel(
        _backend(program),
        model_facts(program),
        tokenizer=tokenizer,
        recipe=job.plan.recipe.to_json(),
        report=_report(job, program, {}),
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


def _artifact(
    job: _Job,
    program: Program,
    check: NumericCheck | None,
    tokenizer: Tokenizer | None,
    out: str | Path | None,
    own: Program | None = None,
) -> CompiledModel:
    """Write the artifact where it was asked for, or in a temporary folder, and open it. `own`: as in `_in_process`."""
    remove = None
    if out is None:
        out = Path(tempfile.mkdtemp(prefix="accel-"))
        remove = weakref.finalize(program, shutil.rmtree, out, ignore_errors=True)
    try:
        with AtomicOutputDir(out, needs=program.params.nbytes) as folder:
            if job.build_draft is not None:
                with job.part("draft model", 0.8):
                    job.build_draft(model_facts(program), tokenizer, folder / DRAFT_FOLDER).close()
            recipe = job.plan.recipe
            job.plan.recipe = replace(recipe, tables=ship(recipe.tables, HOST, folder))
            _write(job, program, check, tokenizer, folder, own)
    except BaseException:
        if remove:
            remove()
        raise
    artifact = open_artifact(out, hashes=False)
    return from_artifact(artifact, threads=job.options.threads, program=program, on_close=remove)


def _write(
    job: _Job,
    program: Program,
    check: NumericCheck | None,
    tokenizer: Tokenizer | None,
    folder: Path,
    own: Program | None = None,
) -> None:
    from accel.compiler.report import write_html
    from accel.lowering.onnx.export import WEIGHTS, export_all
    from accel.lowering.onnx.native import library

    def told(step: str, share: float) -> None:
        if not share:
            job.progress(step, 0.8)

    with job.part("kernels", 0.8):
        library(told)
    with job.part("lower", 0.8):
        programs = {"": program, **({} if own is None else {OWN_PREFIX: own})}
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
    if own is not None and job.own is not None:
        drafting = _manifest(job.own, own, written[OWN_PREFIX])
        names = [WEIGHTS, *sorted(p.name for p in folder.glob(f"{OWN_PREFIX}*.onnx"))]
        hashes = bind(folder, drafting, names)
        drafting["report"] = _report(job.own, own, {})
        write_manifest(folder, drafting, hashes, name=OWN_DRAFT, names=names)
    manifest = _manifest(job, program, entries)
    hashes = bind(folder, manifest)
    there = [p for p in sorted(folder.rglob("*")) if p.is_file()]
    report = _report(
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
                found = entry_error(program, name, [folder / file], check.cases)
                errors[f"onnx {variant}".strip()] = found
        else:
            errors[name] = entry_error(program, name, [folder / file for file in graphs.values()])
    return errors


def _manifest(job: _Job, program: Program, entries: dict[str, Any]) -> dict[str, Any]:
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


def _report(job: _Job, program: Program, sizes: dict[str, int]) -> dict[str, Any]:
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
