"""Searches on a real model, beside greedy decoding of the same prompts: time, memory, likelihood, repetition.

    python tools/bench/bench_searches.py MODEL [--weights int8] [--new 64] [--questions 6] [--loop NAME] [--json FILE]
    python tools/bench/bench_searches.py MODEL --beams FOLDER    beam search beside transformers' with the same floats
    python tools/bench/bench_searches.py MODEL --ways 3072       the cache of several ways behind one prompt

MODEL: a chat model's folder or GGUF file. Each search answers each question alone, in turns with greedy decoding by a
build of the same weights without one. Told are medians over questions: time over greedy, the most bytes of cache over
greedy, mean log-probability of a token of the answer under the model, and the share of its runs of four tokens that it
had before. Loops that need a scorer, or text of a kind of their own, are left out.
--ways tells what the cache of 1 to 8 ways behind one prompt of so many tokens takes: each with a copy of the prompt,
and with `paged-prefix`, whose blocks they share.
"""

from __future__ import annotations

import argparse
import json
import sys
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
    "adaptive-bok": SAMPLED,
}
BEAMS = 4
WAYS = (1, 2, 4, 8)


def loops() -> list[str]:
    """Every search of causal models."""
    axis = find_axes()["loop"]
    return [name for name in axis.names() if axis.method(name).searches or name in REQUESTS]


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


def beside_transformers(model: str, folder: str, recipe: Any, new: int, count: int) -> None:
    """Print how beam search, and greedy decoding, compare with transformers' on a folder of floats."""
    import torch
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    head("beams", ">accel, s", ">transformers, s", ">share of its time", ">equal texts")
    for beams in (1, BEAMS):
        loop = {"loop": {"use": "beam-patience", "beams": beams}} if beams > 1 else {}
        with accel.optimize(model, {**loop, **recipe}, max_context=512, max_batch=1) as made:
            times: dict[str, list[float]] = {"accel": [], "transformers": [], "share": []}
            equal = 0
            for prompt in prompts_of(made)[:count]:
                ids = torch.tensor([prompt])

                def published(ids: Any = ids, beams: int = beams) -> list[int]:
                    out = module.generate(
                        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False,
                        num_beams=beams, early_stopping=beams > 1, eos_token_id=sorted(made.facts.eos),
                        pad_token_id=0,
                    )  # fmt: skip
                    found: list[int] = out[0, ids.shape[1] :].tolist()
                    return found

                made.generate(prompt, 4)
                start = time.perf_counter()
                own = made.generate(prompt, new).tokens[0]
                middle = time.perf_counter()
                other = published()
                end = time.perf_counter()
                times["accel"].append(middle - start)
                times["transformers"].append(end - middle)
                times["share"].append((middle - start) / len(own) / ((end - middle) / len(other)))
                equal += own == other
            cells = [f"{median(times[name]):.2f}" for name in ("accel", "transformers", "share")]
            row(beams, *cells, f"{equal} of {len(times['share'])}")


def ways(model: str, recipe: Any, long: int) -> None:
    """Print the cache's bytes of several ways behind one prompt of `long` tokens, each with a copy of it and with its
    blocks shared.
    """
    head("ways", ">copies, MB", ">over one way", ">shared blocks, MB", ">over one way")
    firsts: dict[str, int] = {}
    for count in WAYS:
        cells: list[str] = []
        for name, reuse in (("copies", {}), ("blocks", {"kv.reuse": {"use": "paged-prefix"}})):
            given = {"loop": {"use": "first-finish", "samples": count}, **reuse, **recipe}
            with accel.optimize(model, given, max_context=long + 256, max_batch=1) as made:
                prompt = (prompts_of(made)[0] * long)[:long]
                out = made.generate(prompt, 32, eos=[], **SAMPLED)
                held = out.stats["kv_bytes"] + (made.pool["bytes"] if made.pool else 0)
            first = firsts.setdefault(name, held)
            cells += [f"{held / 1e6:.1f}", f"{held / first:.2f}"]
        row(count, *cells)


def prompts_of(model: Any) -> list[list[int]]:
    """The questions in the model's chat template."""
    return [
        model.tokenizer.apply_chat_template([{"role": "user", "content": text}])
        for text in QUESTIONS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--weights", default="")
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--questions", type=int, default=len(QUESTIONS))
    parser.add_argument("--beams", metavar="FOLDER", help="of the model's floats")
    parser.add_argument("--ways", type=int, metavar="TOKENS", help="of the prompt")
    parser.add_argument("--loop", action="append", choices=loops(), help="default: all")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    weights = {"weights": {"use": given.weights}} if given.weights else {}
    if given.beams:
        return beside_transformers(given.model, given.beams, weights, given.new, given.questions)
    if given.ways:
        return ways(given.model, weights, given.ways)
    options = {"max_context": 512, "max_batch": 1}
    rows: dict[str, Any] = {}
    with accel.optimize(given.model, weights, **options) as plain:
        prompts = prompts_of(plain)[: given.questions]
        rows["greedy"] = measured(plain, plain, prompts, given.new, {})
        for name in given.loop or loops():
            try:
                with accel.optimize(
                    given.model, {"loop": {"use": name}, **weights}, **options
                ) as made:
                    rows[name] = measured(plain, made, prompts, given.new, REQUESTS.get(name, {}))
            except AccelError as error:
                print(f"{name}: left out: {error}", flush=True)
            else:
                told = f"{name}: {rows[name]['time']:.2f} times greedy's time"
                print(told, file=sys.stderr, flush=True)
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
