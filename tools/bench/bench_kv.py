"""Decode after a long prompt, and the prompt itself: the whole cache, methods of `kv.score` that keep 1024 tokens or
`--keep`, methods of `kv.select` of which each token reads 1024 or `--read`, and a window of 256; alternating.

    python tools/bench/bench_kv.py [--context 16384] [--rounds 7] [--kv-heads 16] [--threads 2] [--only whole,quest]
    python tools/bench/bench_kv.py --keep 16384 --only whole,snapkv,h2o,tova     # what a score costs where all stays
    python tools/bench/bench_kv.py --context 32768 --read 2048 --only whole,quest,tidaldecode,clusterkv
    python tools/bench/bench_kv.py --only whole,ada-kv,ada-kv:padded   # heads of unequal numbers, and padded ones
    python tools/bench/bench_kv.py --only whole,leoam,leoam:memory     # keys and values in files, and in memory

With one thread its own processor time counts, which others on the machine disturb less. Attention alone is a
call's time less that of a call after 300 tokens of the whole cache.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import accel
from accel.ir.axis import find_axes
from accel.passes.kv.select import Layout

VOCABULARY, CALLS, SETTLE = 8000, 45, 20  # calls of a round, the first of which are not counted


def recipe(name: str, options: argparse.Namespace) -> Any:
    """Of `whole`, `window`, or a method of `kv.score`, `kv.select` or, beside SnapKV's scores, `kv.budget`."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--kv-heads", type=int, default=16, help="for 16 query heads")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kernels", default="auto", help="the variant of the step")
    parser.add_argument("--keep", type=int, default=1024, help="tokens that a score keeps")
    parser.add_argument("--read", type=int, default=1024, help="tokens that a selection reads")
    parser.add_argument(
        "--only",
        default="whole,snapkv,quest,window",
        help="whole, window, or methods of kv.score, kv.select, kv.budget",
    )
    options = parser.parse_args()
    clock = time.process_time if options.threads == 1 else time.perf_counter
    torch.manual_seed(0)
    module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=1024, intermediate_size=2816, num_hidden_layers=2,
            num_attention_heads=16, num_key_value_heads=options.kv_heads,
            max_position_embeddings=options.context + 1024,
        )
    ).eval()  # fmt: skip
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
    open_, taken, prompts = {}, {}, {}
    for name, (model, held) in sessions.items():
        open_[name], taken[name] = model.session(), []
        tokens = np.random.default_rng(0).integers(3, VOCABULARY, (1, held))
        open_[name].run(tokens[:, :300], last_only=True)  # opens the graphs
        open_[name].rewind(0)
        start = clock()
        open_[name].run(tokens, last_only=True)
        open_[name].end_prompt()
        prompts[name] = clock() - start
    for _ in range(options.rounds):
        for name, session in open_.items():
            time.sleep(0.3)  # until the threads of the one before rest
            each = []
            for _ in range(CALLS):
                start = clock()
                session.run(np.full((1, 1), 5), last_only=True)
                each.append(clock() - start)
            taken[name].append(statistics.median(each[SETTLE:]))
    for name, session in open_.items():
        held = session.stats["kv_bytes"] / 1e6
        line = (
            f"{name:24} {statistics.median(taken[name]) * 1e3:6.2f} ms a token, {held:6.1f} MB of cache, "
            f"prompt {prompts[name]:6.2f} s"
        )
        if name in built and name != "whole":
            rows = list(zip(taken["whole"], taken[name], taken["whole after 300"], strict=True))
            step = statistics.median(whole / own for whole, own, _ in rows)
            alone = sorted((whole - few) / (own - few) for whole, own, few in rows if own > few)
            line += f", {step:.2f} times as fast"
            if alone:
                line += f"; attention alone {alone[0]:.1f} to {alone[-1]:.1f} times"
        if (other := taken.get(f"{name}:padded")) is not None:
            ratio = statistics.median(b / a for a, b in zip(taken[name], other, strict=True))
            line += f"; {ratio:.2f} times as fast as padded"
        if (other := taken.get(f"{name}:memory")) is not None:
            ratio = statistics.median(a / b for a, b in zip(taken[name], other, strict=True))
            mapped = session.stats["kv_mapped"] / 1e6
            share = mapped / held
            line += f"; {share:.0%} of it in files, {ratio:.2f} of the time in memory"
        print(line)


if __name__ == "__main__":
    main()
