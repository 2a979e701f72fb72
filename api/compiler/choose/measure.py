"""What is measured of one build: speed in turns with base, memory, and what it loses on the prompts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from accel.compiler.choose.front import Spread, Stage
from accel.compiler.choose.prompts import Sample, Samples
from accel.compiler.quality.bleu import bleu
from accel.compiler.quality.divergence import Ids, Odds, along, divergence
from accel.runtime.inputs.encoder_inputs import padded
from accel.runtime.model.compiled import CompiledModel

QUIET = 0.1  # seconds before a run: threads of the other model wait busily for a while after theirs
_FRESH = """
import sys
import numpy as np
import accel
from accel.runtime.model.meter import peak_memory
threads, tokens = int(sys.argv[2]) or None, int(sys.argv[3])
with accel.load(sys.argv[1], threads=threads) as model:
    with model.session() as session:
        ids = np.random.default_rng(0).integers(3, model.facts.vocab_size, (1, tokens))
        if model.facts.encoder is not None:
            session.encode(ids)
            ids = ids[:, :1]
        session.prompt(ids)
        for _ in range(8):
            session.run([[5]])
    print(peak_memory())
"""


@dataclass(frozen=True)
class Timed:
    """One prompt, continued. seconds: of prefill and of decode, for `new` tokens."""

    prefill: float
    decode: float

    @property
    def total(self) -> float:
        return self.prefill + self.decode


@dataclass
class Test:
    """A prompt's figures. kl: summed over `tokens` next tokens. equal: the text is base's. bleu: how near to base's
    it is, 0 to 1. right: the answer is, None where none was given. runs: (this build, base) of each round.
    """

    kl: float
    same: int
    tokens: int
    equal: bool
    bleu: float
    right: bool | None
    runs: list[tuple[Timed, Timed]] = field(default_factory=list)


@dataclass(frozen=True)
class Rung:
    """How much is measured: the first `prompts` of the samples, in so many rounds."""

    prompts: int
    rounds: int


def rungs(prompts: int) -> list[Rung]:
    """From a look to all prompts: twice as many each time, and a round more, up to 5."""
    found = [Rung(min(2, prompts), 3)]
    while found[-1].prompts < prompts or found[-1].rounds < 5:
        last = found[-1]
        found.append(Rung(min(2 * last.prompts, prompts), min(5, last.rounds + 1)))
    return found


class Base:
    """The base build. What it says of a prompt is computed once."""

    def __init__(self, model: CompiledModel, samples: Samples):
        self.model = model
        self.samples = samples
        self._said: dict[int, tuple[Ids, Odds]] = {}

    def said(self, index: int) -> tuple[Ids, Odds]:
        """Its greedy tokens after a prompt, up to the end of the text, and log-probabilities along them."""
        if index not in self._said:
            sample = self.samples.rows[index]
            tokens = self.model.generate(**sample.request()).tokens[0]
            text = np.array(_until_end(tokens, self.model.facts.eos), np.int64)
            odds = along(self.model, sample.ids, text[:-1], sample.source)
            self._said[index] = text, odds
        return self._said[index]


def measure(
    model: CompiledModel,
    base: Base,
    tests: list[Test],
    rung: Rung,
    go_on: Callable[[], bool] = lambda: True,
    tell: Callable[[str], None] = lambda _: None,
) -> None:
    """Add to `tests`, one per prompt, what a rung lacks; stop where `go_on` says so, after a round at the least."""
    ready = False
    for number in range(rung.rounds):
        for index in range(rung.prompts):
            if index < len(tests) and number < len(tests[index].runs):
                continue
            if tests and tests[0].runs and not go_on():
                return
            sample = base.samples.rows[index]
            if not ready:
                for each in (model, base.model):
                    each.generate(**sample.warm())
                ready = True
            tell(f"prompt {index + 1} of {rung.prompts}, round {number + 1} of {rung.rounds}")
            own, other, tokens = _pair(model, base.model, sample, number + index)
            if index == len(tests):
                tests.append(_judged(model, base, index, tokens))
            tests[index].runs.append((own, other))


def _pair(
    model: CompiledModel, base: CompiledModel, sample: Sample, turn: int
) -> tuple[Timed, Timed, list[int]]:
    """Both on one prompt, and the model's tokens; who begins changes with the turn. Base runs once for itself."""
    if model is base:
        own, tokens = _timed(base, sample)
        return own, own, tokens
    if turn % 2:
        own, tokens = _timed(model, sample)
        return own, _timed(base, sample)[0], tokens
    other = _timed(base, sample)[0]
    own, tokens = _timed(model, sample)
    return own, other, tokens


def _timed(model: CompiledModel, sample: Sample) -> tuple[Timed, list[int]]:
    time.sleep(QUIET)
    out = model.generate(**sample.request())
    decode = out.stats["decode_seconds"] * sample.new / out.stats["tokens"]
    return Timed(out.stats["prefill_seconds"], decode), out.tokens[0]


def _judged(model: CompiledModel, base: Base, index: int, tokens: list[int]) -> Test:
    """What a build loses on a prompt: along base's text token by token, and in its own text."""
    sample = base.samples.rows[index]
    text, odds = base.said(index)
    found = divergence(odds, along(model, sample.ids, text[:-1], sample.source))
    near = bleu([_until_end(tokens, model.facts.eos)], [[text]])[0]
    return Test(
        found.kl, found.same, found.tokens,
        np.array_equal(tokens[: text.size], text), float(near), _right(model, sample, tokens),
    )  # fmt: skip


def _right(model: CompiledModel, sample: Sample, tokens: list[int]) -> bool | None:
    """Whether a text begins with the answer, as a whole word, spaces before it aside."""
    answer = sample.prompt.answer
    if answer is None or model.tokenizer is None:
        return None
    text = model.tokenizer.decode(_until_end(tokens, model.facts.eos)).lstrip()
    answer = answer.strip()
    after = text[len(answer) : len(answer) + 1]
    return text.startswith(answer) and not (after.isalnum() and answer[-1:].isalnum())


def _until_end(tokens: list[int], ends: Sequence[int]) -> list[int]:
    """Up to the first token that ends a text, which stays."""
    place = next((i for i, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tokens[: place + 1]


def reached(tests: Sequence[Test], rung: Rung) -> bool:
    """Whether a rung was measured to its end."""
    part = tests[: rung.prompts]
    return len(part) == rung.prompts and all(len(test.runs) >= rung.rounds for test in part)


def stage(tests: Sequence[Test], rung: Rung) -> Stage:
    """Loss and speed of a rung that was reached."""
    part = tests[: rung.prompts]
    return Stage(loss(part), ratios(part, rung.rounds, lambda one: one.total))


def partial(tests: Sequence[Test]) -> Rung:
    """Of a rung that was not reached: as much as every prompt has that was begun."""
    begun = [test for test in tests if test.runs]
    return Rung(len(begun), min(len(test.runs) for test in begun))


def loss(tests: Sequence[Test]) -> float:
    """Mean KL per token, nats."""
    return sum(test.kl for test in tests) / max(1, sum(test.tokens for test in tests))


def ratios(tests: Sequence[Test], rounds: int, part: Callable[[Timed], float]) -> Spread:
    """How many times as fast as base, over all prompts of a round."""
    found = []
    for number in range(rounds):
        pairs = [test.runs[number] for test in tests]
        own, base = (max(1e-9, sum(part(pair[i]) for pair in pairs)) for i in (0, 1))
        found.append(base / own)
    return Spread.of(found)


def base_seconds(rows: Sequence[Sequence[Test]]) -> Timed:
    """Base's own seconds for a prompt: the median of all its runs, and of that the mean of the prompts."""
    longest = max(len(tests) for tests in rows)
    each: list[list[Timed]] = [
        [base for tests in rows if i < len(tests) for _, base in tests[i].runs]
        for i in range(longest)
    ]
    each = [runs for runs in each if runs]
    return Timed(
        fmean(median(run.prefill for run in runs) for runs in each),
        fmean(median(run.decode for run in runs) for runs in each),
    )


def weights_bytes(model: CompiledModel) -> int:
    """Of the files that hold weights, a draft model's among them."""
    assert model.artifact is not None
    sizes = {name: file.bytes for name, file in model.artifact.files.items()}
    return sum(size for name, size in sizes.items() if name.endswith(".bin"))


def kv_bytes(model: CompiledModel, sample: Sample) -> int:
    """Bytes of the cache in memory after a prompt and one token."""
    with model.session() as session:
        if sample.source is not None and model.facts.encoder is not None:
            session.encode(*padded([sample.source], model.facts.encoder))
        session.prompt(sample.ids[None])
        session.run(sample.ids[None, -1:])
        return int(session.stats["kv_bytes"] - session.stats["kv_mapped"])


def peak(folder: Path, threads: int | None, tokens: int) -> int | None:
    """Most resident bytes of a fresh process that opens an artifact and runs a prompt; None where it fails."""
    command = [sys.executable, "-c", _FRESH, str(folder), str(threads or 0), str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    return int(done.stdout) if done.returncode == 0 else None


def to_json(tests: Sequence[Test]) -> list[dict[str, Any]]:
    """As `from_json` reads it."""
    return [
        {
            "kl": t.kl, "same": t.same, "tokens": t.tokens, "equal": t.equal, "bleu": t.bleu,
            "right": t.right,
            "runs": [[a.prefill, a.decode, b.prefill, b.decode] for a, b in t.runs],
        }
        for t in tests
    ]  # fmt: skip


def from_json(value: list[dict[str, Any]]) -> list[Test]:
    """Raises KeyError, TypeError or ValueError where it is something else."""
    return [
        Test(
            float(t["kl"]), int(t["same"]), int(t["tokens"]), bool(t["equal"]), float(t["bleu"]), t["right"],
            [(Timed(a, b), Timed(c, d)) for a, b, c, d in t["runs"]],
        )
        for t in value
    ]  # fmt: skip
