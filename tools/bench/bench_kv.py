"""Calls after a long prompt, and the prompt itself: the whole cache, methods of `kv.score` that keep 1024 tokens or
`--keep`, methods of `kv.select` of which each token reads 1024 or `--read`, a window of 256, and recipes of codecs;
alternating.

    python tools/bench/bench_kv.py [--context 16384] [--rounds 7] [--kv-heads 16] [--threads 2] [--only whole,quest]
    python tools/bench/bench_kv.py --keep 16384 --only whole,snapkv,h2o,tova     # what a score costs where all stays
    python tools/bench/bench_kv.py --context 32768 --read 2048 --only whole,quest,tidaldecode,clusterkv
    python tools/bench/bench_kv.py --only whole,ada-kv,ada-kv:padded   # heads of unequal numbers, and padded ones
    python tools/bench/bench_kv.py --only whole,leoam,leoam:memory     # keys and values in files, and in memory
    python tools/bench/bench_kv.py --only whole,kv-int8,kivi-2 --tokens 1,4,8   # calls of several tokens, rewound

With one thread its own processor time counts, which others on the machine disturb less. Attention alone is a
call's time less that of a call after 300 tokens of the whole cache.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
from turns import VOCABULARY, Clock, in_turns, llama, median_range, ratios, seconds

import accel
from accel.ir.axis import find_axes
from accel.passes.kv.select import Layout

CALLS, SETTLE = 45, 20  # calls of a round, the first of which are not counted
HEADS, SIZE = 16, 64


def recipe(name: str, options: argparse.Namespace) -> Any:
    """`whole`, `window`, a method of `kv.score`, `kv.select` or, beside SnapKV's scores, `kv.budget`; or a recipe."""
    weights, axes = {"use": "int4"}, find_axes()
    if name == "whole":
        return "int4"
    if name in axes["kv.select"].names():
        read = {"use": name, "dense_layers": 0, "tokens_read": options.read}
        return {"weights": weights, "kv": {"select": read}}
    score, tokens, when = name, options.keep, {"use": "prompt"}
    if name == "window":
        score, tokens, when = "streaming-llm", 256, {"use": "every", "tokens": 64}
    budget = {"use": "uniform", "tokens_kept": tokens}
    if name in axes["kv.budget"].names():
        score, budget["use"] = "snapkv", name
    if score not in axes["kv.score"].names():
        return ["int4", name]
    return {"weights": weights, "kv": {"score": {"use": score}, "budget": budget, "when": when}}


def compiled_of(name: str, module: Any, options: argparse.Namespace) -> Any:
    """Of a recipe; of `NAME:padded` with as many kept slots of each head as the largest has, of `NAME:memory` with all
    state in memory.
    """
    name, _, form = name.partition(":")
    with ExitStack() as stack:
        if form == "memory":
            select = find_axes()["kv.select"].method(name)
            stack.enter_context(mock.patch.object(select, "layout", Layout()))
        elif form:
            budget = find_axes()["kv.budget"].method(name)
            stack.enter_context(mock.patch.object(budget, "level", True))
        return accel.optimize(
            module, recipe(name, options), max_context=options.context + 1024, verify=False
        )


def prompted(model: Any, held: int, clock: Clock) -> tuple[Any, float]:
    """A session after a prompt of so many tokens, and the seconds that it took."""
    session = model.session()
    tokens = np.random.default_rng(0).integers(3, VOCABULARY, (1, held))
    session.run(tokens[:, :300], last_only=True)  # opens the graphs
    session.rewind(0)
    start = clock()
    session.run(tokens, last_only=True)
    session.end_prompt()
    return session, clock() - start


def called(session: Any, width: int, rewound: bool, clock: Clock) -> float:
    """Seconds of a call, each after the one before or, rewound, after the prompt."""
    each = []
    for _ in range(CALLS):
        each.append(seconds(lambda: session.run(np.full((1, width), 5), last_only=True), clock))
        if rewound:
            session.rewind(session.lengths - width)
    return median(each[SETTLE:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--kv-heads", type=int, default=HEADS, help="for 16 query heads")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kernels", default="auto", help="the variant of the step")
    parser.add_argument("--keep", type=int, default=1024, help="tokens that a score keeps")
    parser.add_argument("--read", type=int, default=1024, help="tokens that a selection reads")
    parser.add_argument("--tokens", help="of calls, each rewound, as 1,4,8; else one after another")
    parser.add_argument(
        "--only",
        default="whole,snapkv,quest,window",
        help="whole, window, methods of kv.score, kv.select, kv.budget, or recipes of codecs",
    )
    options = parser.parse_args()
    clock = time.process_time if options.threads == 1 else time.perf_counter
    module = llama(options.context + 1024, num_key_value_heads=options.kv_heads)
    compiled, built = [], {}
    for name in options.only.split(","):
        compiled.append(compiled_of(name, module, options))
        built[name] = accel.load(
            compiled[-1].artifact.path, threads=options.threads, kernels=options.kernels
        )
    sessions = {name: (b, options.context) for name, b in built.items()}
    sessions |= {
        f"{name} after 300": (built[name], 300)
        for name in built
        if name == "whole" or name in find_axes()["kv.select"].names()
    }
    open_ = {name: prompted(model, held, clock) for name, (model, held) in sessions.items()}
    numbers = 2 * 2 * options.kv_heads * SIZE * options.context
    rewound = options.tokens is not None
    for width in map(int, (options.tokens or "1").split(",")):
        ways = {
            name: partial(called, session, width, rewound, clock)
            for name, (session, _) in open_.items()
        }
        taken = in_turns(ways, options.rounds, quiet=0.3)
        for name, (session, prompt) in open_.items():
            held = session.stats["kv_bytes"]
            line = (
                f"{name:24} {median_range(taken[name], scale=1e3)} ms a call of {width}, "
                f"{held / 1e6:6.1f} MB of cache, prompt {prompt:6.2f} s"
            )
            if name in built:
                line += f", {8 * held / numbers:.2f} bits of cache for each number of all tokens"
            if name in built and name != "whole" and "whole" in taken:
                rows = zip(taken["whole"], taken[name], taken["whole after 300"], strict=True)
                alone = sorted((whole - few) / (own - few) for whole, own, few in rows if own > few)
                line += f", {median(ratios(taken['whole'], taken[name])):.2f} times as fast"
                if alone:
                    line += f"; attention alone {alone[0]:.1f} to {alone[-1]:.1f} times"
            if (other := taken.get(f"{name}:padded")) is not None:
                line += f"; {median(ratios(other, taken[name])):.2f} times as fast as padded"
            if (other := taken.get(f"{name}:memory")) is not None:
                share = session.stats["kv_mapped"] / held
                line += f"; {share:.0%} of it in files, {median(ratios(taken[name], other)):.2f} of the time in memory"
            print(line, flush=True)


if __name__ == "__main__":
    main()
