"""Decoders on closed tasks: exact answers, likelihood of the answers, speed; each over its main option.

    python tools/bench/bench_decoding.py MODEL LOG.jsonl                       copying, extraction, addition
    python tools/bench/bench_decoding.py MODEL LOG.jsonl --lists               every item of a sentence
    python tools/bench/bench_decoding.py MODEL LOG.jsonl --every 8 --middle    every eighth of HumanEval, no sweep
    python tools/bench/bench_decoding.py MODEL LOG.jsonl --speed               speed instead, for a quiet machine

Each setting is a line of LOG; a run that was cut goes on behind the last one, and the table is of all lines that are of
the same model and tasks. Answers are right as decoding_tasks.py checks them, with the 95 % interval of Wilson. A
decoder that draws answers once, with a seed. Likelihood: the mean log-probability of a token that was given out, by the
model itself. Speed: tokens over time of greedy decoding by the same weights in turns, the median of pairs, one prompt
at a time. Below the table: the rank correlation of likelihood and exact answers over settings, and its 95 % interval
over tasks that are drawn anew. (A Thorough Examination of Decoding Methods in the Era of LLMs, arXiv:2402.06925;
Language Model Decoding as Likelihood-Utility Alignment, arXiv:2210.07228)
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import decoding_tasks
import numpy as np
import numpy.typing as npt
import typer
from bench_searches import likelihood
from decoding_tasks import Task
from rich.progress import Progress
from turns import head, row

import accel
from accel.cli import error_text
from accel.compiler.assemble import assemble
from accel.compiler.build_options import BuildOptions
from accel.compiler.choose.builds import Builds
from accel.ir.errors import AccelError, InputError
from accel.ir.recipe import Recipe

CONTEXT, ROWS, SEED = 1024, 8, 1
SAMPLED = {"temperature": 0.7, "seed": SEED}  # of searches that draw
PAIRS, NEW = 3, 48  # of speed: turns for each of its prompts, tokens
TOPICS = ("Why is the sky blue?", "Describe the water cycle to a child.", "What makes bread rise?")
Z = 1.96  # of a 95 % interval
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Setting:
    """`loop`: a recipe's table, empty: plain decoding; `request`: options of `generate`."""

    decoder: str
    told: str = ""
    loop: dict[str, Any] = field(default_factory=dict)
    request: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.decoder} {self.told}".strip()


def searched(name: str, option: str, values: Sequence[float], **request: Any) -> list[Setting]:
    return [
        Setting(name, f"{option} = {value:g}", {"use": name, option: value}, request)
        for value in values
    ]


def requested(name: str, option: str, values: Sequence[float]) -> list[Setting]:
    """Of plain sampling at temperature 1, unless that is the option."""
    drawn = {"temperature": 1.0, "seed": SEED}
    return [Setting(name, f"{option} = {v:g}", {}, {**drawn, option: v}) for v in values]


def drawn(name: str, option: str, values: Sequence[float]) -> list[Setting]:
    """Of a method of the axis `sample`, at temperature 1."""
    return [
        Setting(
            name, f"{option} = {v:g}", {},
            {"temperature": 1.0, "seed": SEED, "sampler": {"use": name, option: v}},
        )
        for v in values
    ]  # fmt: skip


SWEEPS: list[list[Setting]] = [
    [Setting("greedy")],
    searched("beam-patience", "beams", (2, 4, 8)),
    searched("contrastive", "alpha", (0.2, 0.6, 0.8)),
    searched("adadec", "threshold", (0.5, 1.0, 2.0)),
    searched("superposed", "drafts", (2, 3, 6)),
    searched("phi-decoding", "beams", (2, 4), **SAMPLED),
    searched("a-star-decoding", "width", (2, 4), **SAMPLED),
    searched("first-finish", "samples", (2, 4, 8), **SAMPLED),
    searched("adaptive-bok", "mean", (2, 4, 8), **SAMPLED),
    searched("desel", "samples", (2, 8, 16), **SAMPLED),
    requested("temperature", "temperature", (0.3, 0.7, 1.0, 1.5)),
    requested("top-k", "top_k", (5, 20, 50)),
    requested("top-p", "top_p", (0.5, 0.8, 0.95)),
    requested("min-p", "min_p", (0.05, 0.1, 0.3)),
    drawn("typical", "mass", (0.2, 0.5, 0.9)),
    drawn("epsilon", "epsilon", (3e-4, 3e-3, 3e-2)),
    drawn("eta", "epsilon", (3e-4, 3e-3, 3e-2)),
    drawn("top-h", "share", (0.2, 0.4, 0.6)),
    drawn("bregman-topk", "price", (1e-3, 1e-2, 1e-1)),
]


def settings(middle: bool) -> list[Setting]:
    """All, or the middle one of each decoder."""
    return [one for sweep in SWEEPS for one in (sweep[len(sweep) // 2 :][:1] if middle else sweep)]


def answers(model: Any, plain: Any, setting: Setting, tasks: list[Task], step: Any) -> Any:
    """What a log says of the answers: of each task, whether it is right, the tokens' log-probabilities and number."""
    found: dict[int, tuple[bool, float, int]] = {}
    prompts = [prompt_of(plain, task) for task in tasks]
    order = sorted(range(len(tasks)), key=lambda i: len(prompts[i]))
    for start in range(0, len(order), ROWS):
        part = order[start : start + ROWS]
        first = tasks[part[0]]
        more = {**({"stop": list(first.stop)} if first.stop else {}), **setting.request}
        if not setting.loop:
            more["logprobs"] = 0
        out = model.generate([prompts[i] for i in part], first.most, **more)
        for place, i in enumerate(part):
            tokens, right = out.tokens[place], bool(tasks[i].right(out.text[place]))
            if setting.loop:
                total = likelihood(plain, prompts[i], tokens) * len(tokens) if tokens else 0.0
            else:
                said = zip(out.logprobs[place], tokens, strict=True)
                total = sum(one[token].logprob for one, token in said)
            found[i] = right, total, len(tokens)
        step(len(part))
    columns = zip(*(found[i] for i in range(len(tasks))), strict=True)
    return dict(zip(("right", "logs", "tokens"), columns, strict=True))


def prompt_of(model: Any, task: Task) -> list[int]:
    if isinstance(task.prompt, str):
        return list(model.tokenizer.encode(task.prompt))
    return list(model.tokenizer.apply_chat_template(task.prompt))


def speeds(model: Any, plain: Any, setting: Setting, step: Any) -> Any:
    """What a log says of the speed: of each pair, tokens over time of greedy decoding."""
    found = []
    for topic in TOPICS:
        prompt = prompt_of(plain, Task("", [{"role": "user", "content": topic}], bool))
        ways = [(plain, {}), (model, setting.request)]
        for turn in range(-1, PAIRS):
            rates = {}
            for way in (0, 1) if turn % 2 else (1, 0):
                one, request = ways[way]
                start = time.perf_counter()
                out = one.generate(prompt, NEW, eos=[], **request)
                rates[way] = len(out.tokens[0]) / (time.perf_counter() - start)
            if turn >= 0:
                found.append(rates[1] / rates[0])
        step(1)
    return {"speed": found}


def wilson(right: int, of: int) -> tuple[float, float]:
    """The 95 % interval of a share."""
    share, over = right / of, 1 + Z * Z / of
    middle = (share + Z * Z / (2 * of)) / over
    half = Z * ((share * (1 - share) + Z * Z / (4 * of)) / of) ** 0.5 / over
    return max(0.0, middle - half), min(1.0, middle + half)


def ranks(values: Floats) -> Floats:
    """From 1; equals share the mean of theirs."""
    less = (values[None] < values[:, None]).sum(1)
    same = (values[None] == values[:, None]).sum(1)
    found: Floats = less + (same + 1) / 2
    return found


def rank_correlation(a: Floats, b: Floats) -> float:
    """Spearman's; 0 where all of one are equal."""
    x, y = (ranks(v) - ranks(v).mean() for v in (a, b))
    size = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / size if size else 0.0


def agreement(lines: Sequence[Any], draws: int = 1000) -> tuple[float, float, float]:
    """The rank correlation of likelihood and exact answers over settings, and its 95 % interval over tasks."""
    right, logs, tokens = (np.array([x[key] for x in lines], float) for key in ("right", "logs", "tokens"))  # fmt: skip
    rng, found = np.random.default_rng(0), []
    count = right.shape[1]
    for some in [np.arange(count), *rng.integers(0, count, (draws, count))]:
        means = logs[:, some].sum(1) / np.maximum(tokens[:, some].sum(1), 1)
        found.append(rank_correlation(means, right[:, some].sum(1)))
    low, high = np.quantile(found[1:], (0.025, 0.975))
    return found[0], float(low), float(high)


def read(log: Path, of: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Name of a setting -> what the log says of it. A last line that was cut does not count."""
    found: dict[str, dict[str, Any]] = {}
    if not log.exists():
        return found
    for line in log.read_text(encoding="utf-8").splitlines():
        try:
            one = json.loads(line)
        except ValueError:
            continue
        if {key: one.get(key) for key in of} == of:
            found.setdefault(one["setting"], {}).update(one)
    return found


def write(log: Path, line: dict[str, Any]) -> None:
    """Behind what the log has; a line that was cut there ends first."""
    cut = log.exists() and log.read_bytes()[-1:] not in (b"", b"\n")
    with log.open("a", encoding="utf-8") as file:
        file.write(("\n" if cut else "") + json.dumps(line) + "\n")


def table(chosen: Sequence[Setting], found: dict[str, dict[str, Any]]) -> None:
    head("decoder", "setting", ">exact answers", ">95 %", ">log-probability", ">speed, greedy = 1")
    for one in chosen:
        line = found.get(one.name, {})
        cells = ["–", "–", "–"]
        if "right" in line:
            right, of = sum(line["right"]), len(line["right"])
            low, high = wilson(right, of)
            mean = sum(line["logs"]) / max(1, sum(line["tokens"]))
            cells = [f"{right} of {of}", f"{of * low:.0f}–{of * high:.0f}", f"{mean:.2f}"]
        speed = f"{median(line['speed']):.2f}" if "speed" in line else "–"
        row(f"`{one.decoder}`", one.told, *cells, speed)
    known = [found[s.name] for s in chosen if "right" in found.get(s.name, {})]
    if len(known) > 2:
        rho, low, high = agreement(known)
        print(
            f"\nRank correlation of log-probability and exact answers over {len(known)} settings: {rho:.2f} "
            f"({low:.2f} to {high:.2f})."
        )


def main(
    model: Annotated[Path, typer.Argument(help="A chat model's folder or GGUF file.")],
    log: Annotated[Path, typer.Argument(help="JSON lines; made where it is not there.")],
    count: Annotated[int, typer.Option(min=1, help="Tasks of each kind.")] = 16,
    every: Annotated[int, typer.Option(min=0, help="HumanEval's every so many-th instead.")] = 0,
    lists: Annotated[bool, typer.Option("--lists", help="Lists instead.")] = False,
    middle: Annotated[bool, typer.Option("--middle", help="One setting of each decoder.")] = False,
    speed: Annotated[bool, typer.Option("--speed", help="Measure speed, no answers.")] = False,
    decoder: Annotated[list[str] | None, typer.Option(help="Only these.")] = None,
    threads: int = 2,
) -> None:
    """Measure what the log has not, and print the table."""
    try:
        chosen = settings(middle)
        if decoder:
            known = {one.decoder for one in chosen}
            if wrong := [name for name in decoder if name not in known]:
                raise InputError(f"no decoder {wrong[0]!r}; there are {', '.join(sorted(known))}")
            chosen = [one for one in chosen if one.decoder in decoder]
        kinds = decoding_tasks.LISTS if lists else decoding_tasks.SHORT
        tasks = decoding_tasks.human(every) if every else decoding_tasks.drawn(kinds, count)
        of = {
            "model": model.name,
            "tasks": f"human-eval/{every}" if every else f"{'lists' if lists else 'short'}/{count}",
        }
        found = read(log, of)
        missing = [
            s for s in chosen if ("speed" if speed else "right") not in found.get(s.name, {})
        ]
        if missing:
            run(model, log, of, missing, None if speed else tasks, threads)
        table(chosen, read(log, of))
    except AccelError as error:
        raise SystemExit(f"bench_decoding: {error_text(error)[0]}") from None
    print(
        f"\n{model.name}, {of['tasks']}, {time.strftime('%-d %B %Y')}, {os.cpu_count()} cores, {platform.machine()}, "
        f"load {os.getloadavg()[0]:.1f}."
    )


def run(
    model: Path, log: Path, of: dict[str, Any], missing: list[Setting], tasks: list[Task] | None, threads: int
) -> None:  # fmt: skip
    """Measure settings, and write them down one by one: the answers of tasks, or without any the speed."""
    rows = ROWS if tasks else 1
    builds = Builds(model, BuildOptions(max_context=CONTEXT, max_batch=rows))
    with (
        Progress(disable=not sys.stderr.isatty()) as bar,
        tempfile.TemporaryDirectory() as place,
    ):
        builds.build(assemble(Recipe.load("base")), Path(place) / "base").close()
        with accel.load(Path(place) / "base", threads=threads) as plain:
            for number, setting in enumerate(missing):
                task = bar.add_task(setting.name, total=len(tasks) if tasks else len(TOPICS))
                start = time.perf_counter()

                def step(n: int, task: Any = task) -> None:
                    bar.advance(task, n)

                def measured(made: Any, setting: Setting = setting, step: Any = step) -> Any:
                    if tasks:
                        return answers(made, plain, setting, tasks, step)
                    return speeds(made, plain, setting, step)

                if setting.loop:
                    out = Path(place) / str(number)
                    table = Recipe.load({"loop": setting.loop})
                    builds.build(assemble(table), out).close()
                    with accel.load(out, threads=threads) as made:
                        line = measured(made)
                else:
                    line = measured(plain)
                write(log, {**of, "setting": setting.name, **line})
                told = f"{sum(line['right'])} right" if tasks else f"{median(line['speed']):.2f}"
                print(
                    f"{number + 1} of {len(missing)}: {setting.name}: {told} "
                    f"({time.perf_counter() - start:.0f} s)",
                    file=sys.stderr, flush=True,
                )  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
