"""Calls of 1, 4 and 8 tokens after a long prompt, by how the cache is stored; alternating, each rewound.

python tools/bench/bench_codec.py [--context 16384] [--rounds 5] [--kv-heads 16] [--only kv-int8,gear]
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import accel

VOCABULARY, HEADS, SIZE, LAYERS = 8000, 16, 64, 2
CALLS, SETTLE = 16, 6  # of a round, the first of which are not counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kv-heads", type=int, default=HEADS)
    parser.add_argument("--only", default="kv-int8,kivi-4,kivi-2", help="recipes of codecs")
    options = parser.parse_args()
    recipes = {"float32": [], **{name: [name] for name in options.only.split(",")}}
    torch.manual_seed(0)
    longest = options.context + 1024
    module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=HEADS * SIZE, intermediate_size=2816, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=options.kv_heads, max_position_embeddings=longest,
        )
    ).eval()  # fmt: skip
    numbers = 2 * LAYERS * options.kv_heads * SIZE * options.context
    sessions = {}
    for name, codec in recipes.items():
        model = accel.optimize(module, ["int4", *codec], max_context=longest, verify=False)
        sessions[name] = model.session()
        tokens = np.random.default_rng(0).integers(3, VOCABULARY, (1, options.context))
        sessions[name].run(tokens, last_only=True)
        sessions[name].run(tokens[:, :1])  # so that buffers are as large as a token needs
        sessions[name].rewind(options.context)
        bits = 8 * sessions[name].stats["kv_bytes"] / numbers
        print(f"{name:8} {bits:6.2f} bits a number, all told", flush=True)
    for width in (1, 4, 8):
        taken: dict[str, list[float]] = {name: [] for name in sessions}
        for _ in range(options.rounds):
            for name, session in sessions.items():
                time.sleep(0.2)  # until the threads of the one before rest
                each = []
                for _ in range(CALLS):
                    start = time.perf_counter()
                    session.run(np.full((1, width), 5), last_only=True)
                    each.append(time.perf_counter() - start)
                    session.rewind(options.context)
                taken[name].append(statistics.median(each[SETTLE:]))
        whole = taken["float32"]
        for name, times in taken.items():
            ratio = statistics.median(a / b for a, b in zip(times, whole, strict=True))
            print(
                f"{width} tokens, {name:8} {statistics.median(times) * 1e3:7.2f} ms ({min(times) * 1e3:.2f} to "
                f"{max(times) * 1e3:.2f}), {ratio:.2f} of float32's", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
