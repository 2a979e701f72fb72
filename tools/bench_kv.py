"""Decode after a long prompt: the whole cache, 1024 tokens that SnapKV kept, a window of 256; alternating.

    python tools/bench_kv.py [--context 16384] [--rounds 7]
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import accel

VOCABULARY, CALLS, SETTLE = 8000, 45, 20  # calls of a round, the first of which are not counted


def recipe(score: str, tokens: int, when: dict[str, Any]) -> dict[str, Any]:
    budget = {"use": "uniform", "tokens_kept": tokens}
    kv = {"score": {"use": score}, "budget": budget, "when": when}
    return {"weights": {"use": "int4"}, "kv": kv}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.manual_seed(0)
    module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=1024, intermediate_size=2816, num_hidden_layers=2,
            num_attention_heads=16, num_key_value_heads=16, max_position_embeddings=options.context + 1024,
        )
    ).eval()  # fmt: skip
    made = {
        "whole": "int4",
        "snapkv": recipe("snapkv", 1024, {"use": "prompt"}),
        "window": recipe("streaming-llm", 256, {"use": "every", "tokens": 64}),
    }
    built = {
        name: accel.optimize(module, given, max_context=options.context + 1024, verify=False)
        for name, given in made.items()
    }
    sessions = {f"{name} after {options.context}": (b, options.context) for name, b in built.items()}
    sessions["whole after 300"] = built["whole"], 300
    open_, taken = {}, {}
    for name, (model, held) in sessions.items():
        open_[name], taken[name] = model.session(), []
        tokens = np.random.default_rng(0).integers(3, VOCABULARY, (1, held))
        open_[name].run(tokens, last_only=True)
        open_[name].end_prompt()
    for _ in range(options.rounds):
        for name, session in open_.items():
            time.sleep(0.3)  # until the threads of the one before rest
            each = []
            for _ in range(CALLS):
                start = time.perf_counter()
                session.run(np.full((1, 1), 5), last_only=True)
                each.append(time.perf_counter() - start)
            taken[name].append(statistics.median(each[SETTLE:]))
    for name, session in open_.items():
        held = session.stats["kv_bytes"] / 1e6
        print(f"{name:24} {statistics.median(taken[name]) * 1e3:6.2f} ms a token, {held:6.1f} MB of cache")


if __name__ == "__main__":
    main()
