"""inspect: check an artifact as loading does, and show its contents."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accel.commands import options
from accel.commands.console import error_text, pairs, print_json, size, table
from accel.commands.show import seconds_text, show_chain, show_steps, show_tuning
from accel.compiler.layer_summary import picture, why_not
from accel.compiler.report import adapters_text, cross_bytes, state_bytes, state_text, weights_text
from accel.ir.embedding import Embedding
from accel.ir.facts import FEATURES

if TYPE_CHECKING:
    from accel.ir.depth import Depth
    from accel.ir.encoder import EncoderFacts
    from accel.runtime.artifact.artifact import Artifact
    from accel.runtime.backends.tuning import Tuning
    from accel.runtime.decode.costs import Costs

EXAMPLES = """\b
Examples:
  accel-compile inspect ./artifact
  accel-compile inspect ./artifact --json
  accel-compile inspect ./artifact --measure
  accel-compile inspect ./artifact --picture layers.svg
"""


def inspect(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="An artifact.")],
    chain: Annotated[
        Path | None,
        typer.Option(
            "--picture", metavar="FILE.svg", help="Write a diagram of the layers to this file."
        ),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure kernel variants and call costs on this machine, unless already known.",
        ),
    ] = False,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Check an artifact and show what it holds.

    Shows the model, its layers and their state, entries, files, passes with their errors, and the
    measurements of this machine.
    """
    from accel.lowering.onnx.threads import default_threads
    from accel.runtime.artifact.artifact import open_artifact
    from accel.runtime.backends.onnx.waiting import waiting

    artifact = open_artifact(path)
    if chain is not None:
        state = [value.to_json() for value in artifact.manifest.state]
        drawn = picture(_layers(artifact), state, why_not(artifact.manifest.report))
        chain.write_text(drawn, encoding="utf-8")
    tuning, costs = _measured(artifact, threads, measure)
    count = threads or default_threads()
    how = waiting(count)
    if as_json:
        here = {
            "tuning": tuning and tuning.to_json(),
            "costs": costs and asdict(costs),
            "threads": {"count": count, **how.to_json()},
        }
        print_json({**_facts(artifact), **here})
        return
    _show(artifact)
    pairs([("threads", f"{count}, which {how.text()}")])
    show_tuning(tuning, costs)


def _measured(
    artifact: Artifact, threads: int | None, measure: bool
) -> tuple[Tuning | None, Costs | None]:
    """What is known of its speed on this machine."""
    from accel.runtime.backends.onnx.backend import OrtBackend
    from accel.runtime.backends.onnx.tune import AUTO, choose
    from accel.runtime.decode.costs import known
    from accel.runtime.model.load import from_artifact

    if measure:
        with from_artifact(artifact, threads=threads) as model:
            return model.tuning, model.costs
    engine = OrtBackend(artifact, threads=threads)
    tuning = choose(artifact, AUTO, engine.threads, measure=False)
    return tuning, None if tuning is None else known(engine.cost_key)


def _layers(artifact: Artifact) -> list[dict[str, Any]]:
    """What each layer carries, as a report has it."""
    return [asdict(layer) for layer in artifact.facts.layers]


def _facts(artifact: Artifact) -> dict[str, Any]:
    """All of it, for programs."""
    manifest = artifact.manifest
    state = [value.to_json() for value in manifest.state]
    per_token = state_bytes(state)
    return {
        "path": str(artifact.path),
        "accel": manifest.accel,
        "target": manifest.target,
        "numerics": manifest.numerics,
        "grade": manifest.grade,
        "model": {**dict.fromkeys(FEATURES), **manifest.facts.to_json()},
        "recipe": manifest.recipe,
        "state": state,
        "state_bytes_per_token": sum(per_token.values()),
        "entries": {name: asdict(entry) for name, entry in manifest.entries.items()},
        "files": {name: asdict(file) for name, file in manifest.files.items()},
        "layers_refused": why_not(manifest.report) or None,
        "report": manifest.report,
    }


def _embedding(facts: Embedding | None) -> list[tuple[str, str]]:
    """What comes of a text in place of text."""
    if facts is None:
        return []
    pooling = {
        "mean": "the mean of its tokens'",
        "cls": "its first token's",
        "last": "its last token's",
    }
    length = ", of length 1" if facts.normalize else ""
    return [("a text's vector", f"{facts.width} numbers, {pooling[facts.pooling]}{length}")]


def _show(artifact: Artifact) -> None:
    manifest, facts = artifact.manifest, artifact.facts
    state = [value.to_json() for value in manifest.state]
    tables = manifest.recipe.get("tables", {})
    methods = [f"{axis} = {t.get('use')}" for axis, t in tables.items() if isinstance(t, dict)]
    errors = manifest.report.get("errors", {})
    pairs([
        ("artifact", artifact.path),
        ("built by", f"accel {manifest.accel} for {manifest.target}, {manifest.numerics}"),
        ("model", f"{facts.name}, {facts.parameters:,} parameters, {facts.num_layers} layers"),
        ("vocabulary", facts.vocab_size),
        ("context", f"{facts.max_context} tokens, {facts.max_batch} at a time"),
        ("ends at", ", ".join(map(str, facts.eos)) or "no token"),
        ("recipe", f"{manifest.recipe.get('name', '')}: {', '.join(methods)}"),
        *_encoder(facts.encoder, state),
        *_embedding(facts.embedding),
        *_depth(facts.depth),
        ("grade", manifest.grade),
        *weights_text(manifest.report.get("weights", {}), size),
        *adapters_text(facts.to_json().get("adapters"), size),
        ("state", f"{state_text(state, size)}, {len(state)} buffers"),
        ("largest error", ", ".join(f"{n} {error_text(e)}" for n, e in errors.items())),
        ("seconds", seconds_text(manifest.report)),
        *(("note", note) for note in manifest.report.get("notes", [])),
    ])  # fmt: skip
    show_chain(_layers(artifact), state, why_not(manifest.report))
    beside = () if facts.adapters is None else facts.adapters.shapes()
    entries = [
        [name, e.file, ", ".join(i for i in e.inputs if i not in beside), ", ".join(e.outputs)]
        for name, e in manifest.entries.items()
    ]
    table(["entry", "file", "inputs", "outputs"], entries)
    table(
        ["file", ">bytes", "sha256"],
        [[name, f"{f.bytes:,}", f"{f.sha256[:16]}…"] for name, f in manifest.files.items()],
    )
    show_steps(manifest.report.get("steps", []))


def _depth(depth: Depth | None) -> list[tuple[str, str]]:
    """Which layers decoding runs; nothing where all always run."""
    if depth is None:
        return []
    chosen = [str(i) for i, run in enumerate(depth.plan) if run]
    which = "" if all(depth.plan) else f" ({', '.join(chosen)})"
    does = "early exit" if depth.mlp is None else "fewer MLPs"
    if depth.routed:
        what = "layers" if depth.mlp is None else "branches"
        how = f"each token leaves out {what} above a confidence of {depth.threshold:g}"
        return [("depth", f"{how}; cache {depth.cache}")]
    if depth.by_prompt is not None:
        return [
            (
                "depth",
                f"after a prompt the layers whose mean score in it is at least {depth.by_prompt:g}",
            )
        ]
    exits = "" if depth.threshold is None else f", {does} at a confidence of {depth.threshold:g}"
    what = "layers" if depth.mlp is None else f"attentions and {sum(depth.mlp)} MLPs"
    of = f"{len(chosen)} of {len(depth.plan)} {what} for a token after the prompt{which}{exits}"
    falls = f", reached {max(depth.turns)} tokens after it" if depth.turns else ""
    return [("depth", f"{of}{falls}; cache {depth.cache}")]


def _encoder(encoder: EncoderFacts | None, state: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """What the encoder takes and what is kept of it; nothing for a decoder."""
    if encoder is None:
        return []
    takes = (
        f"features [B, {', '.join(map(str, encoder.features))}]"
        if encoder.features
        else f"up to {encoder.max_length} token ids of {encoder.vocab_size}"
    )
    kept = size(cross_bytes(state))
    starts = ", ".join(map(str, encoder.start)) or "no start token"
    return [
        ("encoder", f"{takes}; {kept} of state per position"),
        ("starts at", starts),
    ]
