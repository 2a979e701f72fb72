"""Time to the first token of long prompts: the model as it is, and with each method of prefill; alternating.

python tools/bench/bench_prefill.py [--prompt 8192] [--rounds 5] [--layers 8] [--only minference pbs-attn]

The aim of `prefill.sparse` is of prompts of 32768 tokens: twice as fast as base.
"""

from __future__ import annotations

import argparse
from functools import partial
from statistics import median

import numpy as np
from turns import VOCABULARY, in_turns, llama, median_range, ratios, seconds

import accel

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
    longest = options.prompt + 1024
    module = llama(longest, num_hidden_layers=options.layers, num_key_value_heads=4)
    built = {
        name: accel.optimize(module, name, max_context=longest, verify=False)
        for name in ["base", *options.only]
    }
    tokens = np.random.default_rng(0).integers(3, VOCABULARY, (1, options.prompt))
    held = {}

    def first(name: str) -> float:
        """Seconds to the first token."""
        with built[name].session() as session:
            spent = seconds(lambda: session.prompt(tokens))
            held[name] = session.stats["kv_bytes"] / 1e6
        return spent

    taken = in_turns({name: partial(first, name) for name in built}, options.rounds, warm=1)
    for name, spent in taken.items():
        print(
            f"{name:14} {median(spent):6.2f} s to the first token, "
            f"{median_range(ratios(taken['base'], spent))} times base, "
            f"{held[name]:6.1f} MB of cache, {built[name].tuning.kernels}"
        )


if __name__ == "__main__":
    main()
