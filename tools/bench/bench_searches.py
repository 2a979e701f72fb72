"""Searches on a real model, beside greedy decoding of the same prompts: time, memory, likelihood, repetition.

    python tools/bench/bench_searches.py MODEL [--weights int8] [--new 64] [--loop NAME] [--json FILE]

MODEL: a chat model's folder or GGUF file. Each search answers each question alone, in turns with greedy decoding by a
build of the same weights without one. Told are medians over questions: time over greedy, the most bytes of cache over
greedy, mean log-probability of a token of the answer under the model, and the share of its runs of four tokens that it
had before. Loops that need a scorer, or text of a kind of their own, are left out.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from turns import head, row

import accel
from accel.ir.axis import find_axes
from accel.ir.errors import AccelError

QUESTIONS = (
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Explain how a bicycle stays upright.",
    "List ten things to do on a rainy day, with a sentence about each.",
    "Describe the water cycle to a child.",
    "What makes bread rise?",
)
SAMPLED = {"temperature": 0.7, "seed": 1}
REQUESTS: dict[str, dict[str, Any]] = {  # of loops that draw
    "first-finish": SAMPLED,
    "phi-decoding": SAMPLED,
}


def loops() -> list[str]:
    """Every search of causal models."""
    axis = find_axes()["loop"]
    return [name for name in axis.names() if axis.method(name).searches]


def repeated(tokens: list[int]) -> float:
    """The share of runs of four tokens that came before."""
    runs = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def likelihood(model: Any, prompt: list[int], answer: list[int]) -> float:
    """Mean log-probability of an answer's tokens."""
    with model.session() as session:
        lines = session.run([[*prompt, *answer]])[0, len(prompt) - 1 : -1].astype(np.float64)
    top = lines.max(1)
    logs = lines[np.arange(len(answer)), answer] - top
    return float(np.mean(logs - np.log(np.exp(lines - top[:, None]).sum(1))))


def measured(
    plain: Any, made: Any, prompts: list[list[int]], new: int, request: Any
) -> dict[str, Any]:
    """Figures of one search."""
    found: dict[str, list[float]] = {
        "time": [],
        "memory": [],
        "likelihood": [],
        "repeated": [],
        "tokens": [],
    }
    for prompt in prompts:
        spent: dict[str, list[float]] = {"plain": [], "made": []}
        for _ in range(2):
            for name, model in (("plain", plain), ("made", made)):
                start = time.perf_counter()
                out = model.generate(prompt, new, **(request if name == "made" else {}))
                spent[name].append(time.perf_counter() - start)
                if name == "plain":
                    base = out
        answer = out.tokens[0]
        found["time"].append(
            min(spent["made"]) / min(spent["plain"]) * len(base.tokens[0]) / len(answer)
        )
        found["memory"].append(out.stats["kv_bytes"] / base.stats["kv_bytes"])
        found["likelihood"].append(likelihood(plain, prompt, answer))
        found["repeated"].append(repeated(answer))
        found["tokens"].append(len(answer))
    return {name: median(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--weights", default="")
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--loop", action="append", choices=loops(), help="default: all")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    weights = {"weights": {"use": given.weights}} if given.weights else {}
    options = {"max_context": 512, "max_batch": 1}
    rows: dict[str, Any] = {}
    with accel.optimize(given.model, weights, **options) as plain:
        prompts = [
            plain.tokenizer.apply_chat_template([{"role": "user", "content": text}])
            for text in QUESTIONS
        ]
        rows["greedy"] = measured(plain, plain, prompts, given.new, {})
        for name in given.loop or loops():
            try:
                with accel.optimize(
                    given.model, {"loop": {"use": name}, **weights}, **options
                ) as made:
                    rows[name] = measured(plain, made, prompts, given.new, REQUESTS.get(name, {}))
            except AccelError as error:
                print(f"{name}: left out: {error}")
    head(
        "loop",
        ">time a token over greedy",
        ">cache over greedy",
        ">log-probability",
        ">repeated",
        ">tokens",
    )
    for name, one in rows.items():
        row(
            name,
            f"{one['time']:.2f}",
            f"{one['memory']:.2f}",
            f"{one['likelihood']:.2f}",
            f"{one['repeated']:.2f}",
            f"{one['tokens']:.0f}",
        )
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
