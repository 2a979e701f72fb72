"""What leaving out layers token by token gives: agreement, layers and tokens per second beside the whole model's.

    python tools/bench/bench_plans.py MODEL [--tokens 128] [--prompts 2] [--threads 1] [--only calm] [--keep FOLDER]

The whole model continues prompts of 64 tokens of prose and of code greedily. Each method goes over the same text token
by token, in turns with the whole model in one process; a token agrees where its likeliest next one is the whole
model's. Layers and MLPs per token are those of the plan, or where the graph decides what the build counted on its
calibration text. The controls leave out as many by chance, as early in the answer; the lowest and the top stay. With
one thread its own processor time counts, which others on the machine disturb less.
"""

from __future__ import annotations

import random
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean, quantiles
from typing import Annotated, Any

import numpy as np
import typer
from weights_loss import texts

import accel
from accel.passes.depth.skipdecode import counts

PROMPT = 64
Plans = Callable[[int], dict[str, Any]]
METHODS: dict[str, dict[str, Any]] = {
    "calm, softmax": {"use": "calm"},
    "calm, softmax, agreement 0.9": {"use": "calm", "agreement": 0.9},
    "calm, state": {"use": "calm", "by": "state"},
    "calm, state, agreement 0.9": {"use": "calm", "by": "state", "agreement": 0.9},
    "calm, softmax, agreement 0.9, refeed": {"use": "calm", "agreement": 0.9, "cache": "refeed"},
    "calm, max, agreement 0.9": {"use": "calm", "by": "max", "agreement": 0.9},
    "calm, meta, agreement 0.9": {"use": "calm", "by": "meta", "agreement": 0.9},
    "calm, meta, agreement 0.9, refeed": {
        "use": "calm",
        "by": "meta",
        "agreement": 0.9,
        "cache": "refeed",
    },
    "skipdecode": {"use": "skipdecode"},
    "skipdecode, 3/4 at last": {"use": "skipdecode"},
    "ffn-skip": {"use": "ffn-skip"},
    "ffn-skip, share 0.1": {"use": "ffn-skip", "share": 0.1},
}


def main(
    model: Path,
    tokens: Annotated[int, typer.Option(help="of each answer")] = 128,
    prompts: Annotated[int, typer.Option(help="of each kind of text")] = 2,
    threads: int = 1,
    kernels: str = "native",
    only: Annotated[str, typer.Option(help="methods whose names begin so, or all")] = "",
    part: Annotated[str, typer.Option(help="the trained part of calm by meta")] = "",
    keep: Annotated[Path | None, typer.Option(help="builds are kept here, and taken from")] = None,
) -> None:
    with tempfile.TemporaryDirectory() as folder:

        def opened(name: str, method: dict[str, Any]) -> accel.CompiledModel:
            out = (keep or Path(folder)) / name.replace("/", "-").replace(" ", "")
            if not out.exists():
                recipe = {"depth": method} if method else "base"
                accel.optimize(
                    model, recipe, max_context=PROMPT + tokens, out=out, verify=False
                ).close()
            return accel.load(out, threads=threads, kernels=kernels)

        whole = opened("whole", {})
        count = whole.facts.num_layers
        assert whole.tokenizer is not None
        encode = whole.tokenizer.encode
        rows = texts(lambda text: encode(text, special=False), prompts, PROMPT)
        asked = [np.array([row[:PROMPT]]) for kind in rows.values() for row in kind[:prompts]]
        answers = [whole.generate(p, tokens, eos=[]).tokens[0] for p in asked]
        print(f"| method | layers or MLPs of {count} | agree | times as fast |\n|---|---|---|---|")
        for name, options in METHODS.items():
            if not name.startswith(only):
                continue
            method = dict(options)
            if method.get("by") == "meta":
                method["trained"] = part
            if method["use"] == "skipdecode":
                method |= {"min_layers": count * (3 if "3/4" in name else 2) // 4, "length": tokens}
            compiled = opened(name, method)
            report(name, whole, compiled, asked, answers, always(), told(compiled, tokens))
            if method["use"] == "skipdecode":
                falls = counts(count, method["min_layers"], tokens)
                every = opened("by-call", {"use": "by-call"})
                for seed in range(2):
                    plans = chance(count, falls, seed)
                    report(
                        f"… by chance, {seed}",
                        whole,
                        every,
                        asked,
                        answers,
                        plans,
                        f"{falls.mean():.1f}",
                    )
            if method["use"] == "ffn-skip":
                every = opened("by-branch", {"use": "by-branch"})
                for seed in range(2):
                    gone = round(count * method.get("share", 0.25))
                    plan = np.ones(count, bool)
                    plan[random.Random(seed).sample(range(4, count - 4), gone)] = False
                    report(
                        f"… by chance, {seed}",
                        whole,
                        every,
                        asked,
                        answers,
                        always(run_mlp=plan),
                        f"{count - gone}",
                    )


def told(compiled: accel.CompiledModel, tokens: int) -> str:
    """How much a token runs, by the plan or by what the build counted."""
    depth = compiled.facts.depth
    if depth is None or depth.threshold is not None:
        note = next(n for n in compiled.report["notes"] if n.startswith(("calm", "ffn-skip")))
        found = re.search(r"\d+% leave early|leave out \d+%", note)
        return f"all, {found[0]}" if found else "all: no exits"
    return f"{mean(sum(depth.plan_at(n)) for n in range(tokens)):.1f}"


def always(**controls: Any) -> Plans:
    """The same of every token."""
    return lambda _: controls


def chance(count: int, falls: Any, seed: int) -> Plans:
    """Layers that go one by one, in an order by chance."""
    order = random.Random(seed).sample(range(1, count - 1), count - 2)
    plans = [~np.isin(np.arange(count), order[: count - n]) for n in falls]
    return lambda step: {"run_layers": plans[min(step, len(plans) - 1)]}


def report(
    name: str,
    whole: accel.CompiledModel,
    other: accel.CompiledModel,
    asked: list[Any],
    answers: list[Any],
    plans: Plans,
    what: str,
) -> None:
    """Print a line of the table."""
    same, ratios = [], []
    for prompt, answer in zip(asked, answers, strict=True):
        runs = [over(whole, prompt, answer, always()), over(other, prompt, answer, plans)]
        times: list[list[float]] = [[], []]
        try:
            while True:
                for which, each in enumerate(runs):
                    token, seconds = next(each)
                    times[which].append(seconds)
                    if which:
                        same.append(token == answer[len(times[1])])
        except StopIteration:
            pass
        ratios.append(sum(times[0]) / sum(times[1]))
    low, middle, high = quantiles(ratios, n=4)
    print(
        f"| {name} | {what} | {mean(same):.1%} | {middle:.2f} ({low:.2f}..{high:.2f}) |", flush=True
    )


def over(
    model: accel.CompiledModel, prompt: Any, answer: Any, plans: Plans
) -> Iterator[tuple[int, float]]:
    """The likeliest token after each of an answer but the last, and the seconds that it took."""
    clock = time.thread_time if model.threads == 1 else time.perf_counter
    with model.session() as session:
        session.prompt(prompt)
        for step, token in enumerate(answer[:-1]):
            start = clock()
            logits = session.run(np.array([[token]]), **plans(step))
            yield int(logits[0, -1].argmax()), clock() - start


if __name__ == "__main__":
    typer.run(main)
