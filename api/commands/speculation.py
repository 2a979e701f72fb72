"""bench --speculation: what drafting gains over plain decoding of the same artifact, by kind of prompt."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from accel.commands.console import pairs, table
from accel.ir.errors import InputError

if TYPE_CHECKING:
    from accel.runtime.model.compiled import CompiledModel

QUIET = 0.1  # seconds before a run: threads of the other model wait busily for a while after theirs
PLACES = 4  # of a draft, shown on a screen


def measure(
    path: Path,
    *,
    count: int,
    tokens: int,
    repeat: int,
    batch: int = 1,
    temperature: float = 0.0,
    threads: int | None = None,
    kernels: str = "auto",
    kinds: Sequence[str] = (),
    show: Callable[[str, float], None] = lambda *_: None,
) -> dict[str, Any]:
    """Figures of an artifact that drafts, by kind of prompt (`accel.reference.kinds`): `count` prompts, each gone on
    with for `tokens` tokens, or answered where the model has a chat template, plainly and with drafts in turns,
    `repeat` times after one that warms up.
    `batch`: prompts that run together; of each kind there are at least so many. `temperature`: 0 is greedy; else both
    ways sample with the same seed, another in each turn.

    Raises InputError where the artifact does not draft, has no tokenizer, or takes no batch of that size.
    """
    from accel.reference.kinds import KINDS

    rows = []
    plain, drafting = _both(path, threads, kernels)
    with plain, drafting:
        if batch > plain.facts.max_batch:
            raise InputError(
                f"--batch {batch} is more than max_batch = {plain.facts.max_batch} of {path}; build it with a larger "
                "max_batch"
            )
        groups = -(-count // batch)
        wanted = list(kinds or KINDS)
        for i, kind in enumerate(wanted):
            runs = []
            texts = _ids(plain, kind, groups * batch)
            for j in range(groups):
                show(kind, (i + j / groups) / len(wanted))
                group = texts[j * batch : (j + 1) * batch]
                runs.append(_prompts(plain, drafting, group, tokens, repeat, temperature))
            rows.append({"kind": kind, **_together(runs)})
        tuning = drafting.tuning
        return {
            "artifact": str(path),
            "recipe": drafting.recipe.get("name"),
            "kernels": tuning.kernels if tuning else None,
            "costs": drafting.costs.ratios,
            "draft_parameters": drafting.draft_model.facts.parameters
            if drafting.draft_model
            else None,
            "draft_bytes": _draft_bytes(drafting),
            "batch": batch,
            "temperature": temperature,
            "prompts": groups * batch,
            "new_tokens": tokens,
            "repeat": repeat,
            "rows": rows,
        }


def _draft_bytes(model: CompiledModel) -> int:
    """Of the files of a draft model or head; 0 where it has none of its own."""
    from accel.runtime.artifact.manifest import DRAFT_FOLDER

    assert model.artifact is not None, "it was opened"
    files = model.artifact.files
    return sum(file.bytes for name, file in files.items() if name.startswith(f"{DRAFT_FOLDER}/"))


def _both(path: Path, threads: int | None, kernels: str) -> tuple[CompiledModel, CompiledModel]:
    """The artifact as it decodes plainly, and as its recipe says."""
    from accel.runtime.artifact.artifact import open_artifact
    from accel.runtime.model.load import from_artifact

    artifact = open_artifact(path)
    loop = artifact.recipe.get("tables", {}).get("loop", {}).get("use", "autoregressive")
    if loop == "autoregressive" or artifact.facts.diffusion is not None:
        raise InputError(
            f"{path} was built with loop = {loop}, which does not draft; give an artifact of a "
            "recipe that drafts, such as "
            "prompt-lookup (accel-compile recipes lists them)"
        )
    drafting = from_artifact(artifact, threads=threads, kernels=kernels)
    if drafting.tokenizer is None:
        drafting.close()
        raise InputError(
            f"{path} has no tokenizer, but the prompts are text; build it with --tokenizer"
        )
    return from_artifact(artifact, threads=threads, kernels=kernels, plain=True), drafting


def _ids(model: CompiledModel, kind: str, count: int) -> list[list[int]]:
    """Tokens of prompts of a kind: questions by the chat template, where the model has one, or texts to go on with."""
    from accel.reference.kinds import prompts, questions

    tokenizer = model.tokenizer
    assert tokenizer is not None
    if not tokenizer.config.templates:
        return [tokenizer.encode(text) for text in prompts(kind, count)]
    asked = [[{"role": "user", "content": text}] for text in questions(kind, count)]
    return [tokenizer.apply_chat_template(messages) for messages in asked]


def _prompts(
    plain: CompiledModel, drafting: CompiledModel, ids: Sequence[list[int]], tokens: int, repeat: int,
    temperature: float,
) -> dict[str, Any]:  # fmt: skip
    """Prompts that run together, both ways in turns: the ratio of each pair of runs, and what the last one with drafts
    did.
    """
    if (longest := max(map(len, ids))) + tokens > plain.facts.max_context:
        raise InputError(
            f"a prompt of {longest} tokens plus {tokens} new tokens exceeds max_context = "
            f"{plain.facts.max_context}; give fewer --tokens"
        )
    ratios, speeds, wholes = [], [], []
    for turn in range(repeat + 1):
        models = (plain, drafting) if turn % 2 else (drafting, plain)
        outputs = {}
        for model in models:
            time.sleep(QUIET)
            outputs[id(model)] = model.generate(
                ids, tokens, eos=[], temperature=temperature, seed=turn
            )
        before, after = outputs[id(plain)], outputs[id(drafting)]
        if turn:
            speeds.append((before.stats["tokens_per_second"], after.stats["tokens_per_second"]))
            ratios.append(speeds[-1][1] / speeds[-1][0])
            spent = after.stats["prefill_seconds"] + after.stats["decode_seconds"]
            wholes.append(after.stats["tokens"] / spent)
    return {
        "ratios": ratios,
        "plain": median(s[0] for s in speeds),
        "drafting": median(s[1] for s in speeds),
        "whole": median(wholes),
        "equal": sum(a == b for a, b in zip(before.tokens, after.tokens, strict=True)),
        "tokens": after.stats["tokens"],
        "rows": len(ids),
        "speculation": after.stats["speculation"] or {},
    }


def _together(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all prompts of a kind."""
    figures, seconds = Counter[str](), Counter[str]()
    places: list[list[int]] = []
    for run in (r["speculation"] for r in runs):
        figures.update({n: v for n, v in run.items() if isinstance(v, int)})
        seconds.update(run.get("seconds", {}))
        for i, (tested, stood) in enumerate(run.get("by_place", [])):
            places += [[0, 0]] * (i + 1 - len(places))
            places[i] = [places[i][0] + tested, places[i][1] + stood]
    whole, new = (
        sum(seconds.values()),
        sum(r["tokens"] - r["rows"] for r in runs),
    )  # the prompt's call gives the first of each row
    checks = max(1, new - figures["accepted"])  # of each row, plain steps among them
    call = 1000 * runs[0]["rows"] / checks  # rows run together
    return {
        "speedup": median(ratio for r in runs for ratio in r["ratios"]),
        "slowest": min(median(r["ratios"]) for r in runs),
        "plain_tokens_per_second": median(r["plain"] for r in runs),
        "tokens_per_second": median(r["drafting"] for r in runs),
        "whole_tokens_per_second": median(r["whole"] for r in runs),  # the prompt's call among them
        "tokens_per_check": new / checks,
        "milliseconds": {stage: call * spent for stage, spent in seconds.items()},  # of a check
        "equal": sum(r["equal"] for r in runs),
        "accepted": figures["accepted"] / figures["drafted"] if figures["drafted"] else 0.0,
        "fallback": figures["fallback"],
        "by_place": [stood / tested for tested, stood in places],
        "shares": {stage: spent / whole for stage, spent in seconds.items()} if whole else {},
    }


def show(result: dict[str, Any]) -> None:
    """On a screen."""
    columns = [
        "prompts", ">speed-up", ">minimum", ">tokens/s", ">per call", ">accepted", "% by position",
        ">draft verify host", ">equal",
    ]  # fmt: skip
    rows = [
        [
            r["kind"], f"{r['speedup']:.2f}", f"{r['slowest']:.2f}", f"{r['tokens_per_second']:.0f}",
            f"{r['tokens_per_check']:.2f}", f"{r['accepted']:.0%}",
            " ".join(f"{100 * p:.0f}" for p in r["by_place"][:PLACES]),
            " ".join(f"{r['shares'].get(stage, 0.0):.0%}" for stage in ("draft", "verify", "host")),
            f"{r['equal']}/{result['prompts']}",
        ]
        for r in result["rows"]
    ]  # fmt: skip
    table(columns, rows)
    pairs([
        ("recipe", result["recipe"]),
        ("kernels", result["kernels"]),
        ("calls of T tokens", ", ".join(f"{t}: {c:.2f}" for t, c in result["costs"].items())),
        ("measured", f"{result['prompts']} prompts per kind, {result['batch']} at a time, {result['new_tokens']} "
                     f"tokens each, {result['repeat']} alternating runs with and without drafts; medians"),
    ])  # fmt: skip
