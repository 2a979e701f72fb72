"""One engine in a process of its own, timed on command; run by tools/bench.py in that engine's environment.

    python tools/bench_worker.py ENGINE MODEL THREADS

Reads lines `PROMPT_TOKENS NEW_TOKENS`, answers each with one JSON line: seconds of the prefill, and of
every decode step. Imports nothing but the engine, so that it runs in an environment without accel.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable

VOCABULARY = 32000
Times = tuple[float, list[float]]


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def tokens(count: int) -> list[int]:
    return [random.randrange(300, VOCABULARY) for _ in range(count)]


def accel_engine(path: str, threads: int) -> Callable[[int, int], Times]:
    import numpy as np

    import accel

    model = accel.load(path, threads=threads)

    def run(prompt: int, new: int) -> Times:
        with model.session() as session:
            ids = np.array([tokens(prompt)])
            prefill = timed(lambda: session.run(ids, last_only=True))
            return prefill, [timed(lambda: session.run(np.array([tokens(1)]))) for _ in range(new)]

    return run


def transformers_engine(path: str, threads: int) -> Callable[[int, int], Times]:
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    @torch.no_grad()
    def run(prompt: int, new: int) -> Times:
        cache = DynamicCache(config=model.config)

        def call(ids: list[int]) -> object:
            return model(
                torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1
            )

        prefill = timed(lambda: call(tokens(prompt)))
        return prefill, [timed(lambda: call(tokens(1))) for _ in range(new)]

    return run


def llama_engine(path: str, threads: int) -> Callable[[int, int], Times]:
    from llama_cpp import Llama

    model = Llama(
        path, n_ctx=4096, n_threads=threads, n_threads_batch=threads, verbose=False, n_batch=512
    )

    def run(prompt: int, new: int) -> Times:
        model.reset()
        prefill = timed(lambda: model.eval(tokens(prompt)))
        return prefill, [timed(lambda: model.eval(tokens(1))) for _ in range(new)]

    return run


ENGINES = {"accel": accel_engine, "transformers": transformers_engine, "llama.cpp": llama_engine}


def main() -> None:
    engine, path, threads = sys.argv[1:4]
    run = ENGINES[engine](path, int(threads))
    run(8, 2)
    print("ready", flush=True)
    for line in sys.stdin:
        prompt, new = map(int, line.split())
        prefill, steps = run(prompt, new)
        print(json.dumps({"prefill": prefill, "steps": steps}), flush=True)


if __name__ == "__main__":
    main()
