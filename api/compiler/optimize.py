"""optimize(model, recipe) -> CompiledModel: capture, passes, lowering, checks, with a report of each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from accel.compiler.artifact_build import write_artifact
from accel.compiler.assemble import assemble, check_target, fit
from accel.compiler.build_options import BuildOptions
from accel.compiler.draft_build import at_home, check_draft, own_plan
from accel.compiler.draft_build import builder as draft_builder
from accel.compiler.in_process import in_process_model
from accel.compiler.job import Job, Progress
from accel.compiler.load.heads._folder import head_at
from accel.compiler.load.hub import model_folder
from accel.compiler.load.merge import merged
from accel.compiler.load.second_model import second_model
from accel.compiler.load.source import Source, open_source, tokenizer_of
from accel.compiler.load.tokenizer import end_note
from accel.compiler.measure import measure_missing
from accel.compiler.pipeline import pipeline, reads_text
from accel.compiler.quality.calibration import make_calibration, read_calibration, sample
from accel.compiler.rewrite import progress_within, rewrite, rewritten_draft
from accel.compiler.with_draft import with_draft
from accel.ir.capture.capture import capture_inspected
from accel.ir.capture.inspect import inspect
from accel.ir.capture.traits import Kind
from accel.ir.embedding import Embedding
from accel.ir.errors import InputError, LoweringError, RecipeError, shown
from accel.ir.facts import Facts
from accel.ir.peft import read_adapter
from accel.ir.program import Program
from accel.ir.recipe import Recipe
from accel.ir.weights import Stored
from accel.lowering import triton
from accel.passes import check_order, refuse
from accel.passes.check import NumericCheck
from accel.passes.depth._cascade import Cascade
from accel.passes.state.features import Features
from accel.passes.state.head import output_head
from accel.passes.weights._kept import keeping
from accel.runtime.artifact.atomic import AtomicOutputDir, writable
from accel.runtime.artifact.shipped import check_shipped
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.loop import HOST
from accel.runtime.model.adapters import check_name
from accel.runtime.model.compiled import CompiledModel


def optimize(
    model: Any,
    recipe: Any = "base",
    *,
    target: str = "onnx",
    tokenizer: Any = None,
    max_context: int = 2048,
    max_batch: int = 8,
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
    train: bool = False,
    pooling: str | None = None,
    draft: str | Path | None = None,
) -> CompiledModel:
    """Compile a language model: a causal decoder, an encoder-decoder, a masked-diffusion or an embedding model.

    Args:
        model: an `nn.Module` that returns logits [B,T,V] for tokens [B,T], a Hugging Face model or
            model directory, the id of a repository in the Hugging Face cache ("org/name"), or a
            `torch.export.ExportedProgram` with symbolic B and T. Quantised weights of a directory stay
            in the codes that it holds them in.
        recipe: a name, a list of names (merged), a path to a TOML file, a dict, or a `Recipe`.
        target: "onnx" (an artifact for ONNX Runtime), "triton" (Triton kernels on a CUDA GPU, in this
            process) or "eager" (the PyTorch reference of every operator; slow).
        tokenizer: a fast Hugging Face tokenizer, a `tokenizers.Tokenizer`, or a path. Default: the
            tokenizer in the model directory: its tokenizer.json, or what transformers makes of older files.
        max_context: maximum sequence length in tokens; at most the model's own limit.
        max_batch: maximum number of prompts per call, and of requests that a server runs at once; a search uses
            several rows per prompt.
        out: folder for the artifact. Default: a temporary folder until `close()`.
        verify: compare the logits after the passes and for the written graph, and measure what passes that
            approximate lose on a text. The captured program is always compared with the module.
        calibration: text for what a recipe calibrates (int4-awq, int4-gptq, calm) and for its loss: the
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
        train: measure the tables that the recipe needs and that are not there for this model, on the bundled
            text, and keep them in the user's cache. What must be trained: `accel-compile train`.
        pooling: give vectors for texts: the "mean" of the tokens', the first ("cls") or the "last" one, of length 1;
            `model` has no head then. Default: as a directory's files of sentence-transformers say, if it has any.
        draft: what drafts for the model: the folder of a published head (EAGLE-3, in its authors' layout or that of
            speculators; DFlash, DFlash2 and DSpark, likewise; Medusa; speculators' MTP; Gemma 4's assistant), or a
            smaller model: a directory, a GGUF file or an artifact. Next-token layers in the model's own directory need
            none: the recipe `mtp`.

    Returns:
        The compiled model. Close it, or use it in a `with` statement.

    Raises:
        AccelError: with the place, the reason and the next step. No partial output remains.
    """
    options = BuildOptions(
        *(target, tokenizer, max_context, max_batch, verify, calibration, trust_remote_code, dump),
        *(threads, download, merge_adapter, adapters or {}, train, pooling),
    )
    recipe = recipe if draft is None else with_draft(recipe, draft)
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
    source = None
    if isinstance(model, Source):
        source = model
    elif isinstance(model, (str, Path)):
        folder = model_folder(model, options.download)
        if (head := head_at(folder)) is not None:
            head.config()
        source = open_source(folder)
    job.plan = at_home(job.plan, source)
    job.build_draft = draft_builder(job.plan, build, options)
    how = None if source is None or options.pooling is not None else source.sentence_recipe
    embedding = how.embedding if how is not None else None
    if options.pooling is not None:
        embedding = Embedding(options.pooling)
    if embedding is not None and options.adapters:
        raise InputError(
            "adapters: sessions of a model of vectors choose none; merge one with merge_adapter=DIR"
        )
    if how is not None and how.max_length is not None:
        max_context = min(max_context, how.max_length)
    with job.part("tokenizer", 0.0):
        tokenizer = tokenizer_of(options.tokenizer, source)
    _check_tokenizer(job, tokenizer)
    stored: dict[Tensor, Stored] = {}
    notes: list[str] = []
    if source is not None:
        with job.part("load", 0.0):
            loaded = source.load(options.trust_remote_code, embedding)
            model, stored, notes = loaded.model, loaded.stored, loaded.notes
            del loaded
    if merge is not None:
        model, stored = merged(model, stored, merge)
    traits = inspect(model, max_context, embedding)
    if traits.kind is not Kind.PROGRAM:
        refuse(job.passes(), facts := traits.facts(), job.plan.recipe.name)
        fit(job.plan, facts, captured=False)
    with job.part("capture", 0.1):
        program = capture_inspected(model, traits, stored)
    program.facts.notes += notes
    if tokenizer is None and source is not None and source.no_tokenizer is not None:
        program.facts.notes.append(source.no_tokenizer)
    if tokenizer is not None and source is not None and embedding is None:
        end = end_note(tokenizer, program.facts.eos)
        program.facts.notes += [] if end is None else [end]
    if max_context < options.max_context:
        program.facts.notes.append(
            f"max_context is {max_context}, the max_seq_length of the model's directory"
        )
    if source is not None:
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
    refuse(job.passes(), program.facts, job.plan.recipe.name)
    return _compiled(job, program.copy(), tokenizer, out)


def _started(recipe: Any, options: BuildOptions, progress: Progress | None) -> Job:
    """A build of which all is checked that needs no model."""
    job = Job(assemble(Recipe.load(recipe)), options, progress or (lambda *_: None))
    if options.dump is not None:
        job.dump = writable(options.dump)
    job.build_draft = draft_builder(job.plan, build, options)
    check_shipped(job.plan.recipe.tables, HOST)
    if (own := own_plan(job.plan, options.max_context)) is not None:
        job.self_draft = Job(own, replace(options, dump=None, adapters={}), lambda *_: None)
        check_order(job.self_draft.passes())
    check_target(job.plan, job.target)
    job.peft_adapters = {check_name(n): read_adapter(path) for n, path in options.adapters.items()}
    check_order(job.passes())
    if options.calibration is not None and not reads_text(job.plan):
        raise RecipeError(
            f"recipe '{job.plan.recipe.name}' does not use calibration, because no pass of it goes by a text or "
            "loses anything on one; give a recipe with [weights], such as int4-gptq"
        )
    job.calibration = read_calibration(options.calibration)
    return job


def _check_tokenizer(job: Job, tokenizer: Tokenizer | None) -> None:
    """Refuse a model whose text the recipe's loop cannot work with; one without a tokenizer may get it later."""
    if tokenizer is not None and (loop := job.plan.methods.get("loop")) is not None:
        loop.check(tokenizer)


def _without_weights(facts: Facts, tokenizer: Tokenizer | None) -> list[str]:
    """What to say of tokens that the embedding has no rows for."""
    known = {} if tokenizer is None else tokenizer.vocabulary
    few = sorted(token for token, index in known.items() if index >= facts.vocab_size)
    if not few:
        return []
    named = ", ".join(shown(token) for token in few[:3]) + (", …" if len(few) > 3 else "")
    many = (
        f"{len(few)} tokens of the tokenizer have"
        if len(few) > 1
        else "1 token of the tokenizer has"
    )
    return [f"{many} no weights in the model ({named}): texts with them are refused"]


def _compiled(
    job: Job, program: Program, tokenizer: Tokenizer | None, out: str | Path | None
) -> CompiledModel:
    """The passes over a captured program, and what its target makes of it."""
    fit(job.plan, program.facts)
    program.facts.notes += _without_weights(program.facts, tokenizer)
    if "draft" in job.plan.methods:
        job.plan.methods["draft"].store(
            program.facts, tokenizer
        )  # which is refused before any work
        if job.plan.methods["draft"].head:
            job.output_head = output_head(program)
    if program.facts.draft_head is not None:
        job.plan.unasked.append(Features())
        if program.facts.draft_head.cascade:
            job.plan.unasked.append(Cascade())
    program.facts.max_batch = job.options.max_batch
    check_draft(job.plan, program.facts, tokenizer)
    job.plan.passes = keeping(program, job.plan.passes)
    if reads_text(job.plan):
        program.calibration = make_calibration(
            job.calibration, tokenizer, program.facts, progress_within(job)
        )
    if tokenizer is not None and any(step.reads_spelling for step in job.plan.passes):
        program.spelling = [tokenizer.decode([i]) for i in range(program.facts.vocab_size)]
    program.second_model = second_model(job.plan.passes, pipeline(), program.facts, tokenizer)
    text = sample(tokenizer, program.facts)
    if job.options.train:
        for plan in (job.plan, *([] if job.self_draft is None else [job.self_draft.plan])):
            measure_missing(plan, program, tokenizer, progress_within(job))
    captured = None if job.self_draft is None else program.copy()
    with job.part("passes", 0.4):
        check = NumericCheck(program, text) if job.options.verify else None
        rewrite(job, program, check)
    own = None
    if job.self_draft is not None and captured is not None:
        with job.part("draft passes", 0.8):
            own = rewritten_draft(job.self_draft, captured, program, job.plan, text)
    if job.target != "onnx":
        return in_process_model(job, program, check, tokenizer, own)
    return write_artifact(job, program, check, tokenizer, out, own)
