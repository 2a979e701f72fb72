"""Loops that fill masks, on the bundled masked-diffusion model: calls, tokens per second, exact answers.

    python tools/bench/bench_diffusion.py [--model FOLDER] [--loops NAME …] [--prompts N] [--block K] [--json FILE]

Every loop decodes every prompt, one after the other, so that whatever else runs on the machine meets all alike. Of each
prompt the speed is compared with that of one token per call; the median of those ratios is told, with calls, exact
answers, and the share of answers that are, token by token, those of one token per call.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "train"))
from reference_data import REFERENCE, tasks
from turns import head, row

import accel
from accel.ir.axis import find_axes, host_method

PLAIN = "dllm-lowconf"
VARIED: dict[
    str, dict[str, Any]
] = {  # name -> loop table, of loops with other options than their defaults
    "dllm-threshold, factor 1": {"use": "dllm-threshold", "factor": 1.0},
    "dllm-blockcache, prefix": {"use": "dllm-blockcache", "cache": "prefix"},
    "dllm-lowconf, dual": {"use": "dllm-lowconf", "cache": "dual"},
    "freedave, dual": {"use": "freedave", "cache": "dual"},
    "localleap, dual": {"use": "localleap", "cache": "dual"},
    "learn2pd, end filled": {"use": "learn2pd", "end": "filled"},
    "learn2pd, end guessed": {"use": "learn2pd", "end": "guessed"},
    "dllm-entropy, one block": {"use": "dllm-entropy", "block": 1 << 20},
}
TASKS = ("key_value", "copy", "rest")


def loops() -> dict[str, dict[str, Any]]:
    """Every loop that fills masks, the one that all are compared with first: name -> loop table."""
    axis = find_axes()["loop"]
    fills = [name for name in axis.names() if axis.method(name).masked_diffusion]
    return {name: {"use": name} for name in (PLAIN, *fills)} | VARIED


def chosen(given: Any) -> dict[str, dict[str, Any]]:
    """Those of `loops` that are asked for, and the one that they are compared with."""
    return {n: t for n, t in loops().items() if not given.loops or n in (PLAIN, *given.loops)}


def questions(task: str, count: int, tokens: int, new: int) -> Iterator[tuple[str, str]]:
    """Prompts of about `tokens` tokens that no training seed gave, and their answers, of at most `new` tokens."""
    fours = max(1, new // (4 * tasks.TOKENS_PER_LINE["copy"]))  # of lines, of `rest`
    rng = random.Random(f"diffusion {task} {tokens}")
    for _ in range(count):
        if task != "rest":
            yield tasks.make(task, rng, tokens)
            continue
        pieces = tasks.rest(rng, tasks.lines_for("copy", tokens), fours)
        yield "".join(text for text, _ in pieces[:-2]), pieces[-2][0]


def measure(model: Any, given: Any) -> list[dict[str, Any]]:
    """A line for each loop, task and prompt."""
    found = []
    for task in given.tasks:
        for number, (prompt, answer) in enumerate(
            questions(task, given.prompts, given.tokens, given.new)
        ):
            for name, table in chosen(given).items():
                model._loop = host_method({"loop": {"block": given.block, **table}}, "loop", PLAIN)
                start = time.perf_counter()
                out = model.generate(prompt, max_new_tokens=given.new)
                seconds = time.perf_counter() - start
                right = out.text[0].removesuffix("<|eos|>") == answer
                one = {"task": task, "prompt": number, "loop": name, "right": right}
                one |= {"calls": out.stats["calls"], "tokens": len(out.tokens[0])}
                found.append(one | {"seconds": seconds, "ids": out.tokens[0]})
    return found


def table(lines: list[dict[str, Any]]) -> None:
    """Markdown: a row for each task and loop."""
    plain = {(x["task"], x["prompt"]): x for x in lines if x["loop"] == PLAIN}
    plainly = ("as one token per call", "tokens per call", "calls, of one token per call")
    figures = ("exact answers", *plainly, "tokens/s", "of one token per call")
    head("task", "loop", *(f">{name}" for name in figures))
    for task in dict.fromkeys(x["task"] for x in lines):
        for name in dict.fromkeys(x["loop"] for x in lines):
            some = [x for x in lines if x["task"] == task and x["loop"] == name]
            base = [plain[task, x["prompt"]] for x in some]
            pairs = list(zip(some, base, strict=True))
            calls, tokens = sum(x["calls"] for x in some), sum(x["tokens"] for x in some)
            ratios = [(x["tokens"] / x["seconds"]) / (b["tokens"] / b["seconds"]) for x, b in pairs]
            speed = statistics.median(x["tokens"] / x["seconds"] for x in some)
            right = statistics.mean(x["right"] for x in some)
            same = statistics.mean(x["ids"] == b["ids"] for x, b in pairs)
            fewer = sum(b["calls"] for b in base) / calls
            of = (f"{tokens / calls:.2f}", f"1/{fewer:.1f}", f"{speed:.0f}")
            gain = f"{statistics.median(ratios):.2f}"
            row(f"`{task}`", name, f"{right:.0%}", f"{same:.0%}", *of, gain)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=REFERENCE / "diffusion")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--loops", nargs="+", default=[], help="only these beside the plain one")
    parser.add_argument("--prompts", type=int, default=20, help="of each task")
    parser.add_argument("--tokens", type=int, default=100, help="of a prompt, about")
    parser.add_argument("--new", type=int, default=64, help="tokens that there is room for")
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--json", type=Path, help="write every line there")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    model = accel.optimize(given.model, "freedave", max_context=512, verify=False)
    with model:
        model.generate("x", max_new_tokens=4)  # chooses kernels
        lines = measure(model, given)
    if given.json:
        given.json.write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    table(lines)


if __name__ == "__main__":
    main()
