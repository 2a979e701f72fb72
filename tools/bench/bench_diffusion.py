"""Loops that fill masks, on the bundled masked-diffusion model or the block-diffusion one: calls, tokens per second,
exact answers.

    python tools/bench/bench_diffusion.py [--model FOLDER] [--prompts N] [--new N] [--block K] [--loops NAME …]
        [--merge-adapter FOLDER] [--json FILE]
    python tools/bench/bench_diffusion.py --learn FILE     prompts of the same tasks, for accel-compile train --tasks

Every loop decodes every prompt, one after the other, so that whatever else runs on the machine meets all alike. Of each
prompt the speed is compared with that of one token per call; the median of those ratios is told, with calls, exact
answers, the share of answers that are, token by token, those of one token per call, and the share of the canvas that
calls compute.
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
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "train"))
from reference_data import REFERENCE, tasks
from turns import head, row

import accel
from accel.ir.axis import find_axes, host_method
from accel.ir.picks import CHOSEN
from accel.runtime.session.session import Session

PLAIN, PLAIN_OF_BLOCKS = "dllm-lowconf", "autoregressive"
DUAL = {"use": "dllm-blockcache"}
Tables = tuple[dict[str, Any], dict[str, Any]]  # of the loop, and of the canvas
VARIED: dict[str, Tables] = {  # loops with other options than their defaults
    "dllm-threshold, factor 1": ({"use": "dllm-threshold", "factor": 1.0}, {}),
    "dllm-threshold, prefix": ({"use": "dllm-threshold"}, {**DUAL, "cache": "prefix"}),
    "freedave, dual": ({"use": "freedave"}, DUAL),
    "localleap, dual": ({"use": "localleap"}, DUAL),
    "dllm-entropy, one block": ({"use": "dllm-entropy", "block": 1 << 20}, {}),
    "dllm-lowconf, featcache, prompt 7": (
        {"use": "dllm-lowconf"},
        {"use": "dllm-featcache", "prompt": 7},
    ),
    "dllm-lowconf, featcache, answer 2": (
        {"use": "dllm-lowconf"},
        {"use": "dllm-featcache", "answer": 2},
    ),
    "dllm-threshold, elastic, one block": (
        {"use": "dllm-threshold", "block": 1 << 20},
        {"use": "elastic-cache"},
    ),
    "dllm-lowconf, elastic, threshold 0.5": (
        {"use": "dllm-lowconf"},
        {"use": "elastic-cache", "threshold": 0.5},
    ),
    "dllm-lowconf, elastic, threshold 0.99": (
        {"use": "dllm-lowconf"},
        {"use": "elastic-cache", "threshold": 0.99},
    ),
    "learn2pd, end filled": ({"use": "learn2pd", "end": "filled"}, {}),
    "learn2pd, end guessed": ({"use": "learn2pd", "end": "guessed"}, {}),
    "apd, recompute-window": ({"use": "apd"}, {"use": "recompute-window"}),
    "apd, mixture 0.9": ({"use": "apd", "mixture": 0.9}, {}),
    "apd, mixture 0.3": ({"use": "apd", "mixture": 0.3}, {}),
}
VARIED_OF_BLOCKS: dict[str, Tables] = {
    f"{name}, {option} {value:g}": ({"use": name, option: value}, {})
    for name, option, values in (
        ("nbdiff", "threshold", (0.5, 0.99)),
        ("sbd", "gamma", (0.01, 1.0)),
        ("sdlm", "threshold", (0.5, 0.99)),
        ("lud", "threshold", (0.5, 0.99)),
    )
    for value in values
} | {"sdlm, checks": ({"use": "sdlm", "checks": True}, {})}
CACHED = ("dllm-lowconf", "dllm-threshold")  # loops that are tried with every method of `canvas`
TASKS = ("key_value", "copy", "rest")


def loops(blocks: bool, block: int, only: list[str] | None = None) -> dict[str, Tables]:
    """Every loop that fills masks, of blocks behind a causal cache or of a whole answer, in blocks of so many slots;
    the one that all are compared with first, and some with what their calls compute. `only`: those of these names, and
    the first.
    """
    axis, canvas = find_axes()["loop"], find_axes()["canvas"]
    kinds = {name: axis.method(name) for name in axis.names()}
    fills = [n for n, kind in kinds.items() if (kind.blocks if blocks else "canvas" in kind.asks)]
    tables: dict[str, Tables] = {n: ({"use": n}, {}) for n in fills}
    for loop in () if blocks else CACHED:
        others = [name for name in canvas.names() if name != "whole"]
        tables |= {f"{loop}, {name}": ({"use": loop}, {"use": name}) for name in others}
    tables |= VARIED_OF_BLOCKS if blocks else VARIED
    sized = {n: ({"block": block, **loop}, held) for n, (loop, held) in tables.items()}
    first: dict[str, Tables] = (
        {PLAIN_OF_BLOCKS: ({"use": PLAIN_OF_BLOCKS}, {})} if blocks else {PLAIN: sized[PLAIN]}
    )
    found = {**first, **sized}
    return found if only is None else {n: t for n, t in found.items() if n in (*first, *only)}


def rewriting(given: Any) -> dict[str, Any]:
    """A recipe for each table of `canvas`, among the loops that are measured, whose method changes the graph."""
    tables = {str(canvas): canvas for _, canvas in loops(False, 1, given.loops).values() if canvas}
    made = {key: host_method({"canvas": one}, "canvas", "whole") for key, one in tables.items()}
    loop = {"loop": {"use": PLAIN}}
    return {key: {**loop, "canvas": tables[key]} for key, one in made.items() if one.steps()}


def questions(
    task: str, count: int, tokens: int, new: int, use: str = "diffusion"
) -> Iterator[tuple[str, str]]:
    """Prompts of about `tokens` tokens that no training seed gave, and their answers, of at most `new` tokens. use:
    other prompts for another.
    """
    fours = max(1, new // (4 * tasks.TOKENS_PER_LINE["copy"]))  # of lines, of `rest`
    rng = random.Random(f"{use} {task} {tokens}")
    for _ in range(count):
        if task != "rest":
            yield tasks.make(task, rng, tokens)
            continue
        pieces = tasks.rest(rng, tasks.lines_for("copy", tokens), fours)
        yield "".join(text for text, _ in pieces[:-2]), pieces[-2][0]


def streams(session: Session) -> list[Any]:
    """A copy of the stream behind each layer, where the session keeps it."""
    buffers = session._core.backend.buffers() if session._core.backend else {}
    return [a.copy() for n, a in buffers.items() if n.endswith(".stream")]


def measure(models: dict[str, Any], given: Any) -> list[dict[str, Any]]:
    """A line for each loop, task and prompt. models: by the table of `canvas` that they were built with, `whole` for
    those that change no graph.
    """
    found, shares, aside = [], list[float](), list[float]()
    own, model = Session.write, models["whole"]

    def write(
        session: Session, tokens: Any, at: Any, lengths: Any, rows: Any, picks: Any = None
    ) -> Any:
        start = time.perf_counter()
        before = streams(session)
        called = time.perf_counter()
        logits = own(session, tokens, at, lengths, rows, picks)
        aside.append(called - start - time.perf_counter())
        computed = lengths.max()
        if picks is not None and before:  # layers choose how many
            pairs = zip(before, streams(session), strict=True)
            computed = statistics.mean(int((old != new).any((0, 1, 3)).sum()) for old, new in pairs)
        elif picks is not None:  # by the mean layer, of which the lowest compute all that is given
            first = model.facts.picks.first / model.facts.num_layers
            computed = first * computed + (1 - first) * (picks >= CHOSEN).sum()
        shares.append(float(computed / max(session.lengths)))
        aside[-1] += time.perf_counter()
        return logits

    Session.write = write  # type: ignore[method-assign]
    for task in given.tasks:
        for number, (prompt, answer) in enumerate(
            questions(task, given.prompts, given.tokens, given.new)
        ):
            every = loops(model.facts.blocks is not None, given.block, given.loops)
            for name, (table, canvas) in every.items():
                tables = {"loop": table, "canvas": canvas}
                model = models.get(str(canvas), models["whole"])
                model._loop = host_method(tables, "loop", PLAIN)
                model._methods = {
                    **model._methods,
                    "canvas": host_method(tables, "canvas", "whole"),
                }
                shares.clear()
                aside.clear()
                start = time.perf_counter()
                out = model.generate(prompt, max_new_tokens=given.new)
                seconds = time.perf_counter() - start - sum(aside)
                right = out.text[0].removesuffix("<|eos|>") == answer
                one = {"task": task, "prompt": number, "loop": name, "right": right}
                one |= {"calls": out.stats["calls"], "tokens": len(out.tokens[0])}
                one["share"] = statistics.mean(shares) if shares else None
                found.append(one | {"seconds": seconds, "ids": out.tokens[0]})
    return found


def table(lines: list[dict[str, Any]]) -> None:
    """Markdown: a row for each task and loop."""
    names = list(dict.fromkeys(x["loop"] for x in lines))
    plain = {(x["task"], x["prompt"]): x for x in lines if x["loop"] == names[0]}
    plainly = ("as one token per call", "tokens per call", "calls, of one token per call")
    computed = "slots computed per call"
    figures = ("exact answers", *plainly, computed, "tokens/s", "of one token per call")
    head("task", "loop", *(f">{name}" for name in figures))
    for task in dict.fromkeys(x["task"] for x in lines):
        for name in names:
            some = [x for x in lines if x["task"] == task and x["loop"] == name]
            base = [plain[task, x["prompt"]] for x in some]
            pairs = list(zip(some, base, strict=True))
            calls, tokens = sum(x["calls"] for x in some), sum(x["tokens"] for x in some)
            ratios = [(x["tokens"] / x["seconds"]) / (b["tokens"] / b["seconds"]) for x, b in pairs]
            speed = statistics.median(x["tokens"] / x["seconds"] for x in some)
            right = statistics.mean(x["right"] for x in some)
            same = statistics.mean(x["ids"] == b["ids"] for x, b in pairs)
            fewer = sum(b["calls"] for b in base) / calls
            share = "-"  # of blocks behind a causal cache, which calls compute alone
            if some[0]["share"] is not None:
                share = f"{sum(x['share'] * x['calls'] for x in some) / calls:.0%}"
            of = (f"{tokens / calls:.2f}", f"1/{fewer:.1f}", share, f"{speed:.0f}")
            gain = f"{statistics.median(ratios):.2f}"
            row(f"`{task}`", name, f"{right:.0%}", f"{same:.0%}", *of, gain)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=REFERENCE / "diffusion")
    parser.add_argument("--second", type=Path, default=REFERENCE, help="the causal model of `apd`")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument(
        "--loops",
        nargs="+",
        choices=[*loops(False, 1), *loops(True, 1)],
        help="those alone, and the first",
    )
    parser.add_argument("--prompts", type=int, default=20, help="of each task")
    parser.add_argument("--tokens", type=int, default=100, help="of a prompt, about")
    parser.add_argument("--new", type=int, default=64, help="tokens that there is room for")
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--json", type=Path, help="write every line there")
    parser.add_argument("--merge-adapter", type=Path, help="of the model, such as dparallel's")
    parser.add_argument("--learn", type=Path, help="write prompts and answers there, and stop")
    given = parser.parse_args()
    if given.learn is not None:
        size = given.prompts, given.tokens, given.new, "learn"
        pairs = [pair for task in given.tasks for pair in questions(task, *size)]
        lines = (json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in pairs)
        given.learn.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return
    warnings.filterwarnings("ignore")
    blocks = json.loads((given.model / "config.json").read_text()).get("block_size")
    draft = {"use": "model", "path": str(given.second), "weights": ""}
    recipe = "sdlm" if blocks else {"loop": {"use": "apd"}, "draft": draft}
    with ExitStack() as stack:
        models = {
            use: stack.enter_context(
                accel.optimize(
                    given.model,
                    one,
                    max_context=512,
                    verify=False,
                    merge_adapter=given.merge_adapter,
                )
            )
            for use, one in {"whole": recipe, **rewriting(given)}.items()
        }
        for model in models.values():
            model.generate("x", max_new_tokens=4)  # chooses kernels
        lines = measure(models, given)
    if given.json:
        given.json.write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    table(lines)


if __name__ == "__main__":
    main()
