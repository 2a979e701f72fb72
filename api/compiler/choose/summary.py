"""A choice as rows and sentences, which the terminal, the page and JSON share."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accel.compiler.choose.choose import Choice, Row
from accel.compiler.choose.front import EXACT, Point, Spread, alike, dominates, front
from accel.compiler.choose.measure import Timed, base_seconds, loss, ratios
from accel.compiler.layer_summary import bytes_text

SAME = 0.95  # of next tokens, for which a loss is called small


@dataclass(frozen=True)
class Line:
    """A recipe as it is shown. number: on the front, from 1; 0 beside it. standing: why it is not on the front.

    speed: new tokens per second, prompts included, with the least and most of the rounds; times: the same as
    ratios to base. memory, weights, kv, peak: bytes. kl: nats per token. same: share of next tokens
    that are base's. equal: texts that are base's, of `texts`. bleu: mean of the texts'
    against base's, 0 to 1. right: answers, of `asked`.
    """

    name: str
    number: int
    standing: str
    lossless: bool
    speed: Spread
    times: Spread
    prefill_seconds: float
    decode_tokens_per_second: float
    memory: int
    weights: int
    kv: int
    peak: int | None
    kl: float
    same: float
    equal: int
    bleu: float
    texts: int
    right: int
    asked: int
    rounds: int
    command: str


def lines(choice: Choice) -> list[Line]:
    """All that were measured: the front by its loss, then the others by their speed."""
    points = {row.name: row.point(choice.ladder) for row in choice.rows}
    leads = front(list(points.values()))
    leads.sort(key=lambda p: (p.loss if p.loss >= EXACT else 0.0, -p.speed.median))
    every = [*leads, *points.values()]
    number = {point.name: i + 1 for i, point in enumerate(leads)}
    base = base_seconds([row.tests for row in choice.rows])
    found = [
        _line(choice, row, points[row.name], number.get(row.name, 0), every, base)
        for row in choice.rows
    ]
    return sorted(found, key=lambda line: (line.number == 0, line.number, -line.times.median))


def _line(
    choice: Choice, row: Row, point: Point, number: int, every: list[Point], base: Timed
) -> Line:
    done = row.done(choice.ladder)[-1]
    tests = row.tests[: done.prompts]
    times = ratios(tests, done.rounds, lambda one: one.total)
    new = sum(sample.new for sample in choice.samples.rows) / len(choice.samples.rows)
    rate = new / base.total
    answered = [test.right for test in tests if test.right is not None]
    return Line(
        name=row.name, number=number, standing="" if number else _standing(point, every),
        lossless=row.lossless,
        speed=Spread(rate * times.median, rate * times.least, rate * times.most), times=times,
        prefill_seconds=base.prefill / ratios(tests, done.rounds, lambda one: one.prefill).median,
        decode_tokens_per_second=new / base.decode * ratios(tests, done.rounds, lambda one: one.decode).median,
        memory=row.weights + row.kv, weights=row.weights, kv=row.kv, peak=row.peak,
        kl=0.0 if loss(tests) < EXACT else loss(tests),
        same=sum(t.same for t in tests) / sum(t.tokens for t in tests),
        equal=sum(t.equal for t in tests),
        bleu=sum(t.bleu for t in tests) / len(tests), texts=len(tests), right=sum(answered), asked=len(answered),
        rounds=done.rounds, command=command(choice, row.candidate.specs, row.name),
    )  # fmt: skip


def _standing(point: Point, every: list[Point]) -> str:
    """Which recipe makes it needless; `every`: the front first."""
    others = [one for one in every if one.name != point.name]
    better = [one.name for one in others if dominates(one, point)]
    same = [one.name for one in others if alike(one, point)]
    return f"behind {better[0]}" if better else f"like {same[0]}"


def command(choice: Choice, specs: tuple[str, ...], name: str) -> str:
    """What builds it."""
    asked, options = choice.request, choice.request.options
    words = ["accel-compile", "build", str(asked.model)]
    for spec in specs or ("base",):
        words += ["--recipe", spec]
    words += ["--max-context", str(options.max_context)]
    for option, value in (("tokenizer", options.tokenizer), ("calibration", options.calibration)):
        if value is not None and (option != "calibration" or name in choice.calibrated):
            words += [f"--{option}", str(value)]
    if options.trust_remote_code:
        words.append("--trust-remote-code")
    return shlex.join([*words, "--out", f"{asked.model.resolve().name}-{name}"])


def off_front(lines: list[Line]) -> dict[str, list[str]]:
    """Why recipes are not on the front -> their names."""
    groups: dict[str, list[str]] = {}
    for line in lines:
        if not line.number:
            groups.setdefault(line.standing, []).append(line.name)
    return groups


def picks(lines: list[Line]) -> list[tuple[str, str]]:
    """The front's answers to the usual questions: (question, recipe)."""
    leads = [line for line in lines if line.number]
    exact = [line for line in leads if line.kl == 0]
    small = [line for line in leads if line.same >= SAME]
    fast: Callable[[Line], float] = lambda line: line.times.median  # noqa: E731
    asked = [
        ("fastest without loss", max(exact, key=fast, default=None)),
        (f"fastest with at least {SAME:.0%} of base's tokens", max(small, key=fast, default=None)),
        (
            f"least memory with at least {SAME:.0%} of base's tokens",
            min(small, key=lambda line: line.memory, default=None),
        ),
    ]
    return [(question, line.name) for question, line in asked if line is not None]


def columns(
    lines: list[Line], details: bool = True
) -> tuple[list[str], Callable[[Line], list[str]]]:
    """Names of columns ('>': to the right), and a line's cells. `details`: parts of speed and memory."""
    answers = any(line.asked for line in lines)
    peaks = any(line.peak for line in lines)
    head = [
        ">", "recipe", *([">prompts"] if details else []), ">tok/s", ">times base",
        *([">prefill s", ">decode tok/s"] if details else []), ">memory",
        *([">KV", *([">peak"] if peaks else [])] if details else []), ">KL", ">same", ">BLEU",
        *([">right"] if answers else []),
    ]  # fmt: skip

    def cells(line: Line) -> list[str]:
        times = line.times
        each = [f"{line.prefill_seconds:.3f}", f"{line.decode_tokens_per_second:.3g}"]
        peak = bytes_text(line.peak) if line.peak else "–"
        more = [bytes_text(line.kv), *([peak] if peaks else [])]
        right = f"{line.right}/{line.asked}" if line.asked else "–"
        return [
            str(line.number or ""), line.name, *([str(line.texts)] if details else []), f"{line.speed.median:.3g}",
            f"{times.median:.2f} ({times.least:.2f}–{times.most:.2f})", *(each if details else []),
            bytes_text(line.memory), *(more if details else []), f"{line.kl:.2g}", f"{line.same:.0%}",
            f"{line.bleu:.2f}",
            *([right] if answers else []),
        ]  # fmt: skip

    return head, cells


def basis(choice: Choice) -> list[str]:
    """What the figures rest on."""
    rows, on = choice.samples.rows, choice.machine
    lengths = sorted(int(row.ids.size if row.source is None else row.source.size) for row in rows)
    most = max((len([t for t in row.tests if t.runs]) for row in choice.rows), default=0)
    spans = f"{lengths[0]}" if lengths[0] == lengths[-1] else f"{lengths[0]} to {lengths[-1]}"
    return [
        f"{len(rows)} prompts of {spans} tokens, {choice.request.new} new tokens each, up to {most} of them measured; "
        f"context {choice.context}; {on['cpu']}, {on['threads']} threads.",
        "tok/s: new tokens per second of whole requests, prompt included. times base: median (least–most) of "
        "rounds in which recipe and base took turns; recipes whose ranges overlap are not told apart.",
        "memory: weights and the KV cache after the longest prompt. KL: mean divergence of the next token's "
        "probabilities from base's, in nats, along base's own greedy text. same: share of these tokens at which both "
        "put the same token first. BLEU: mean of the texts' against base's, on token ids."
        + (" right: answers." if choice.samples.answers else ""),
    ]


def to_json(choice: Choice, page: Path) -> dict[str, Any]:
    """All of it, for programs."""
    found = lines(choice)
    return {
        "model": str(choice.request.model),
        "machine": choice.machine,
        "context": choice.context,
        "prompts": len(choice.samples.rows),
        "recipes": [asdict(line) for line in found],
        "picks": dict(picks(found)),
        "refused": choice.refused,
        "untried": choice.untried,
        "notes": choice.notes,
        "page": str(page),
    }
