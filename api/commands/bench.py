"""bench: tokens per second of an artifact, and the share of a step spent outside onnxruntime."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accel.commands import options
from accel.commands.conditions import Conditions
from accel.commands.console import pairs, print_json, progress, size, table
from accel.commands.shares import decode_share, prefill_share, show_shares, slope
from accel.commands.speculation import measure, show
from accel.ir.errors import InputError

if TYPE_CHECKING:
    from accel.ir.encoder import EncoderFacts
    from accel.runtime.backends.onnx.backend import OrtBackend
    from accel.runtime.backends.onnx.peaks import Peaks
    from accel.runtime.backends.onnx.work import Work
    from accel.runtime.model.compiled import CompiledModel

EXAMPLES = """\b
Examples:
  accel-compile bench ./artifact
  accel-compile bench ./artifact --context 100 --context 2000 --tokens 64 --repeat 5 --json
  accel-compile bench ./drafting --speculation --prompts 4 --tokens 96
  accel-compile bench ./drafting --speculation --batch 1 --batch 4 --batch 8
"""
CONTEXTS = (16, 128, 512, 1024)


class Timed:
    """An InferenceSession that adds up the seconds of its runs, for prefill and for decode."""

    def __init__(self, inner: Any):
        self.inner = inner
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def run_with_iobinding(self, *args: Any) -> None:
        start = time.perf_counter()
        self.inner.run_with_iobinding(*args)
        self.seconds += time.perf_counter() - start


@dataclass(frozen=True)
class Drafting:
    """What is measured with --speculation."""

    prompts: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Number of prompts per kind, with --speculation."),
    ] = 3
    batch: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Prompts that run together, with --speculation. May be repeated: three or more are fitted.",
        ),
    ] = None
    other_artifacts: Annotated[
        list[Path] | None,
        typer.Option(
            "--beside",
            metavar="DIR",
            help="Another artifact, of the same model with another draft model, with --speculation. May be repeated.",
        ),
    ] = None
    trained: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Tokens that the draft model of each artifact was trained on, in their order.",
        ),
    ] = None


@options.grouped
def bench(
    command: typer.Context,
    path: Annotated[Path, typer.Argument(metavar="DIR", help="An artifact.")],
    *,
    context: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Prompt length in tokens. May be repeated. Default: 16, 128, 512, 1024.",
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=2, metavar="N", help="Number of new tokens per run.")
    ] = 32,
    repeat: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of runs; the median is reported.")
    ] = 3,
    speculation: Annotated[
        bool,
        typer.Option(
            "--speculation",
            help="Compare speculative decoding with plain decoding, by kind of prompt.",
        ),
    ] = False,
    drafting: Drafting,
    threads: options.Threads = None,
    kernels: options.Kernels = "auto",
    as_json: options.Json = False,
) -> None:
    """Measure the speed of an artifact.

    Reports prefill and decode speed on random prompts, time outside onnxruntime, load time and peak memory; and shares
    of what this machine does at most, probed for a second: of a step the time that memory needs for the weights and
    the state that it reads, of a prompt the time that its products need at the peak of their types.
    With --speculation, for a recipe that drafts: speed-up over plain decoding, tokens per call, acceptance
    rate and time by stage, on code completion, code editing, recall, repetitive text, free text and edited copies.
    With several --batch or --beside it fits tokens per call and tokens/s against the logarithm of the batch, of the
    size of the draft model and of its training tokens, and warns where drafting stops paying.
    """
    how: dict[str, Any] = {
        "tokens": tokens,
        "repeat": repeat,
        "threads": threads,
        "kernels": kernels,
    }
    if speculation:
        if context:
            raise InputError("--context is for random prompts; leave it out with --speculation")
        _told(*_drafted([path, *(drafting.other_artifacts or [])], drafting, **how), as_json)
        return
    if (
        drafting.batch
        or drafting.other_artifacts
        or drafting.trained
        or options.was_given(command, "prompts")
    ):
        raise InputError(
            "--prompts, --batch, --beside and --trained are of --speculation; give that too"
        )
    result = _measured(path, context, **how)
    if as_json:
        print_json(result)
    else:
        _show(result)


def _measured(
    path: Path, context: list[int] | None, tokens: int, repeat: int, threads: int | None, kernels: str
) -> dict[str, Any]:  # fmt: skip
    """Speed on random prompts, and its shares of what this machine does at most."""
    from accel.runtime.backends.onnx.peaks import SECONDS, peaks
    from accel.runtime.backends.onnx.work import work_of
    from accel.runtime.model.meter import peak_memory

    conditions = Conditions.now()
    start = time.perf_counter()
    model, timed, engine = _open(path, threads, kernels)
    loaded = time.perf_counter() - start
    with model:
        lengths = _lengths(context, tokens, model.facts.max_context)
        rows = []
        with progress("bench") as tell:
            for i, length in enumerate(lengths):
                tell(f"context {length}", i / len(lengths))
                rows.append(_row(model, timed, length, tokens, repeat))
            memory = peak_memory()  # before memory is probed
            tell("what this machine does at most", 1.0)
            limits = [peaks(n, SECONDS / 2) for n in sorted({1, engine.threads})]
    work = work_of(engine.artifact, engine.tuning.kernels)
    for row in rows:
        row.update(_shares(row, work, limits[-1]))
    return {
        "artifact": str(path),
        "threads": engine.threads,
        "kernels": engine.tuning.kernels,
        "new_tokens": tokens,
        "repeat": repeat,
        "load_seconds": loaded,
        "peak_memory": memory,
        "rows": rows,
        "slope": slope(work, limits[-1], {r["depth"]: r["step_ms"] / 1e3 for r in rows}),
        "weight_bytes": work.weights,
        "not_known": work.unread or None,
        "peaks": [asdict(limit) for limit in limits],
        "conditions": conditions.ended().to_json(),
    }


def _drafted(
    paths: list[Path], drafting: Drafting, **how: Any
) -> tuple[list[dict[str, Any]], list[dict[str, float]]]:
    """What drafts gain with each artifact and batch, and the points that are fitted. `how`: as of `measure`."""
    from accel.commands import scaling

    trained = drafting.trained
    if trained and len(trained) != len(paths):
        raise InputError(
            f"--trained is given {len(trained)} times for {len(paths)} artifacts; give it once for each"
        )
    results, points = list[dict[str, Any]](), list[dict[str, float]]()
    for i, path in enumerate(paths):
        for rows in drafting.batch or [1]:
            with progress(f"bench {path.name}, batch {rows}") as tell:
                given = {"count": drafting.prompts, "batch": rows, "show": tell, **how}
                results.append(measure(path, **given))
            points.append(scaling.point_of(results[-1], trained[i] if trained else None))
    return results, points


def _told(results: list[dict[str, Any]], points: list[dict[str, float]], as_json: bool) -> None:
    """Measurements of drafting, and what several of them say together."""
    from accel.commands import scaling

    if len(results) == 1:
        print_json(results[0]) if as_json else show(results[0])
        return
    found = scaling.study(points)
    if as_json:
        print_json({"artifacts": results, "scaling": found})
        return
    for result in results:
        show(result)
    scaling.show(found)


def _open(path: Path, threads: int | None, kernels: str) -> tuple[CompiledModel, Timed, OrtBackend]:
    """The model over a session that is timed, opened and ready."""
    from accel.runtime.artifact.artifact import open_artifact
    from accel.runtime.backends.onnx.backend import OrtBackend
    from accel.runtime.model.compiled import CompiledModel

    class Engine(OrtBackend):
        def _open(self, entry: str, threads: int | None = None) -> Any:
            opened = super()._open(entry, threads)
            return Timed(opened) if entry == "step" else opened

    artifact = open_artifact(path)
    engine = Engine(artifact, threads=threads, kernels=kernels)
    model = CompiledModel(engine, artifact.facts, recipe=artifact.recipe)
    return model, engine.session, engine


def _lengths(asked: list[int] | None, tokens: int, limit: int) -> list[int]:
    """Prompt lengths that leave room for the new tokens."""
    if limit <= tokens:
        raise InputError(f"--tokens {tokens} fills the context of {limit}; give fewer")
    if asked is None:
        return [n for n in CONTEXTS if n + tokens <= limit] or [limit - tokens]
    for length in asked:
        if length + tokens > limit:
            raise InputError(
                f"--context {length} and {tokens} new tokens are more than max_context = {limit}; "
                f"give at most {limit - tokens}"
            )
    return asked


@dataclass(frozen=True)
class _Run:
    """One prompt, continued: seconds of prefill, of a decode step and of its part outside."""

    prefill: float
    step: float
    outside: float
    speed: float
    kv_bytes: int


def _row(
    model: CompiledModel, timed: Timed, length: int, tokens: int, repeat: int
) -> dict[str, Any]:
    """Medians of several runs at one prompt length, after one that warms up."""
    runs = [_run(model, timed, length, tokens, seed) for seed in range(repeat + 1)][1:]
    prefill = [length / r.prefill for r in runs]
    step = median(r.step for r in runs)
    outside = median(r.outside for r in runs)
    return {
        "context": length,
        "depth": length + tokens / 2,
        "prefill_tokens_per_second": length / median(r.prefill for r in runs),
        "prefill_of_runs": prefill,
        "decode_tokens_per_second": median(r.speed for r in runs),
        "decode_of_runs": [r.speed for r in runs],
        "step_ms": step * 1e3,
        "outside_onnxruntime_ms": outside * 1e3,
        "outside_onnxruntime_share": outside / step,
        "kv_bytes": runs[0].kv_bytes,
    }


def _shares(row: dict[str, Any], work: Work, limit: Peaks) -> dict[str, Any]:
    """Of the limit, at one prompt length; a step is one of the middle of a run."""
    length, depth = row["context"], row["depth"]
    taken = length / row["prefill_tokens_per_second"]
    return {
        "read_bytes": None if work.unread else work.read(depth),
        "decode_share": decode_share(work, limit, depth, row["step_ms"] / 1e3),
        "prefill_products": work.multiplied(length),
        "prefill_share": prefill_share(work, limit, length, taken),
    }


def _run(model: CompiledModel, timed: Timed, length: int, tokens: int, seed: int) -> _Run:
    """Continue one random prompt. Outside: sampling, the loop, copies, the growth of the cache."""
    import numpy as np

    prompt = np.random.default_rng(seed).integers(0, model.facts.vocab_size, length)
    source = _random_source(model.facts.encoder, seed)
    with model.stream(prompt, max_new_tokens=tokens, eos=[], encoder_input=source) as stream:
        next(stream)
        inside, calls = timed.seconds, stream.stats["calls"]
        for _ in stream:
            pass
        stats = stream.stats
    inside, steps = timed.seconds - inside, max(1, stats["calls"] - calls)
    spent = stats["decode_seconds"]
    return _Run(
        prefill=stats["prefill_seconds"],
        step=spent / steps,
        outside=(spent - inside) / steps,
        speed=stats["tokens_per_second"],
        kv_bytes=stats["kv_bytes"],
    )


def _random_source(encoder: EncoderFacts | None, seed: int) -> Any:
    """The longest input that an encoder takes, at most 512 tokens; none for a decoder."""
    import numpy as np

    if encoder is None:
        return None
    random = np.random.default_rng(seed)
    if encoder.features:
        return random.standard_normal(encoder.features, dtype=np.float32)
    return random.integers(0, encoder.vocab_size, min(512, encoder.max_length))


def _show(result: dict[str, Any]) -> None:
    columns = [
        ">context", ">prefill tokens/s", ">decode tokens/s", ">step ms", ">outside ort ms",
        ">outside ort", ">KV",
    ]  # fmt: skip
    rows = [
        [
            r["context"], f"{r['prefill_tokens_per_second']:.0f}",
            f"{r['decode_tokens_per_second']:.1f}", f"{r['step_ms']:.2f}",
            f"{r['outside_onnxruntime_ms']:.3f}", f"{r['outside_onnxruntime_share']:.1%}",
            size(r["kv_bytes"]),
        ]
        for r in result["rows"]
    ]  # fmt: skip
    table(columns, rows)
    show_shares(result)
    conditions = Conditions(**result["conditions"])
    pairs([
        ("load", f"{result['load_seconds']:.2f} s"),
        ("peak memory", size(result["peak_memory"])),
        ("threads", result["threads"]),
        ("kernels", result["kernels"]),
        ("measured", f"median of {result['repeat']} runs of {result['new_tokens']} new tokens"),
        *conditions.text(),
    ])  # fmt: skip
    if conditions.warning:
        typer.echo(f"warning: {conditions.warning}", err=True)
