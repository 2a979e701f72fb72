"""Time to the first token of long prompts: the model as it is, and with each method of prefill; alternating.

python tools/bench/bench_prefill.py [--prompt 8192] [--rounds 5] [--layers 8] [--only minference pbs-attn]

The aim of `prefill.sparse` is of prompts of 32768 tokens: twice as fast as base.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import accel

VOCABULARY = 8000
RECIPES = [
    "gemfilter", "promptdistill", "critiprefill", "tri-shape", "minference", "flexprefill", "pbs-attn"
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--only", nargs="+", default=RECIPES, metavar="RECIPE")
    options = parser.parse_args()
    torch.manual_seed(0)
    module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=1024, intermediate_size=2816,
            num_hidden_layers=options.layers, num_attention_heads=16, num_key_value_heads=4,
            max_position_embeddings=options.prompt + 1024,
        )
    ).eval()  # fmt: skip
    built = {
        name: accel.optimize(module, name, max_context=options.prompt + 1024, verify=False)
        for name in ["base", *options.only]
    }
    tokens = np.random.default_rng(0).integers(3, VOCABULARY, (1, options.prompt))
    taken: dict[str, list[float]] = {name: [] for name in built}
    held = {}
    for number in range(options.rounds + 1):  # the first opens the graphs
        for name, model in built.items():
            with model.session() as session:
                start = time.perf_counter()
                session.prompt(tokens)
                spent = time.perf_counter() - start
                held[name] = session.stats["kv_bytes"] / 1e6
            if number:
                taken[name].append(spent)
    for name, seconds in taken.items():
        ratios = [b / s for b, s in zip(taken["base"], seconds, strict=True)]
        print(
            f"{name:14} {statistics.median(seconds):6.2f} s to the first token, "
            f"{statistics.median(ratios):5.2f} ({min(ratios):.2f} .. {max(ratios):.2f}) times base, "
            f"{held[name]:6.1f} MB of cache, {built[name].tuning.kernels}"
        )


if __name__ == "__main__":
    main()
