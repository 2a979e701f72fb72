"""Tokens per second of an engine that drafts beside one that does not, as more requests run at once.

    python tools/bench/bench_streams.py PLAIN DRAFTS [--streams 1 --streams 16] [--kind edit] [--tokens 96] [--turns 3]

PLAIN and DRAFTS are artifacts of one model. All requests of a turn come at once, greedy, of `--tokens` tokens each, and
the time is from then to the last token, prompts included. Each turn has prompts of its own (`accel.reference.kinds`; as
questions where there is a chat template), the same for both, which take turns. Prints a table: medians of tokens per
second, the median of the ratios of a turn, and of drafts how long they were and how much of them stood.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from accel.reference.kinds import prompts, questions
from accel.runtime.decode.sampling_params import SamplingParams
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.serve.engine import Engine, Request
from accel.runtime.serve.opening import opened
from accel.runtime.serve.phases import Phases

STREAMS, KINDS = (1, 4, 8, 16), ("edit", "free")
COUNTS = ("drafts_total", "drafted_total", "accepted_total")


def asked(model: CompiledModel, kind: str, count: int, seed: int) -> list[Any]:
    """Prompts of a kind, with room for what follows."""
    tokenizer = model.tokenizer
    assert tokenizer is not None, "an engine that is served has one"
    if not tokenizer.config.templates:
        return list(prompts(kind, count, seed))
    talks = [[{"role": "user", "content": text}] for text in questions(kind, count, seed)]
    return [tokenizer.apply_chat_template(talk) for talk in talks]


def run(engine: Engine | Phases, texts: Sequence[Any], tokens: int) -> float:
    """Tokens per second of requests that come at once."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    start = time.perf_counter()
    tickets = [engine.submit(Request(text, params)) for text in texts]
    made = sum(event.token >= 0 for ticket in tickets for event in ticket)
    return made / (time.perf_counter() - start)


def main(
    plain: Annotated[Path, typer.Argument(help="an artifact")],
    drafts: Annotated[
        Path, typer.Argument(help="one of the same model, with a recipe that drafts")
    ],
    streams: Annotated[list[int] | None, typer.Option(help="requests at once")] = None,
    kind: Annotated[list[str] | None, typer.Option(help="of prompts")] = None,
    tokens: Annotated[int, typer.Option(help="of each request")] = 96,
    turns: int = 3,
    threads: int = 2,
) -> None:
    """Measure, and print a table."""
    print("| kind | streams | plain | drafts | ratio | least | tokens a draft | stood |")
    print("|---|---|---|---|---|---|---|---|")
    with ExitStack() as stack:
        both = [stack.enter_context(opened(path, threads=threads)) for path in (plain, drafts)]
        model, engines = both[0][0], [engine for _, engine in both]
        for engine in engines:
            run(engine, asked(model, "code", 1, 0), 16)  # it measures, and opens what it needs
        for name in kind or KINDS:
            for count in streams or STREAMS:
                found, before = list[list[float]](), engines[1].stats
                for turn in range(turns):
                    texts = asked(model, name, count, 1 + turn)
                    order = random.Random(f"{turn} {count}").sample((0, 1), 2)
                    speeds = {i: run(engines[i], texts, tokens) for i in order}
                    found.append([speeds[0], speeds[1]])
                after = engines[1].stats
                made, drafted, stood = (after[one] - before[one] for one in COUNTS)
                ratios = [second / first for first, second in found]
                speed = [median(one[i] for one in found) for i in (0, 1)]
                print(
                    f"| {name} | {count} | {speed[0]:.1f} | {speed[1]:.1f} | {median(ratios):.2f} | "
                    f"{min(ratios):.2f} | {drafted / max(1, made):.1f} | {stood / max(1, drafted):.0%} |",
                    flush=True,
                )


if __name__ == "__main__":
    typer.run(main)
