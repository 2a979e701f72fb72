"""Samplers on a large vocabulary: processor time of one distribution, in turns with top-k of 50.

    python tools/bench/bench_samplers.py [--vocabulary 150000] [--pairs 15]

Prints milliseconds, the time over that of top-k, and, where transformers has the sampler, the time over that of its
processor and softmax on one thread, for normal logits of two spreads: an unsure and a sure model.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers
from turns import head, in_turns, ratios, row, seconds

from accel.ir.axis import find_axes
from accel.runtime.sample.standard import Standard

SPREADS = (2.0, 4.0)
MORE = [("bregman-topk", {"alpha": 1.0}), ("bregman-topk", {"dual": True})]  # than the defaults
REPEATS = 5
PEERS = {  # of transformers, by the option that both take
    "typical": (transformers.TypicalLogitsWarper, "mass"),
    "epsilon": (transformers.EpsilonLogitsWarper, "epsilon"),
    "eta": (transformers.EtaLogitsWarper, "epsilon"),
    "top-h": (transformers.TopHLogitsWarper, "share"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--pairs", type=int, default=15)
    given = parser.parse_args()
    top = Standard(1.0, top_k=50)
    axis, none = find_axes()["sample"], np.zeros(0, np.int64)
    torch.set_num_threads(1)
    cases: list[tuple[str, Any, Any]] = [
        ("top_k = 50", top, transformers.TopKLogitsWarper(50)),
        ("top_p = 0.9", Standard(1.0, top_p=0.9), transformers.TopPLogitsWarper(0.9)),
    ]
    for name, options in [*((name, {}) for name in axis.names()), *MORE]:
        told = ", ".join(f"{key} = {value}" for key, value in options.items())
        sampler = axis.build(name, temperature=1.0, **options)
        kind, option = PEERS.get(name, (None, ""))
        peer = kind(getattr(sampler, option)) if kind else None
        cases.append((f"{name} {told}".strip(), sampler, peer))

    def spent(sampler: Any, logits: Any) -> float:
        def several() -> None:
            for _ in range(REPEATS):
                sampler.distribution(logits, none)

        return 1e3 * seconds(several, time.process_time) / REPEATS

    def warped(processor: Any, logits: Any) -> float:
        scores = torch.from_numpy(logits)[None]
        ids = torch.zeros(1, 1, dtype=torch.long)

        def several() -> None:
            for _ in range(REPEATS):
                torch.softmax(processor(ids, scores), -1)

        return 1e3 * seconds(several, time.process_time) / REPEATS

    parts = ("ms", "over top_k = 50", "over transformers")
    head("sampler", *(f">{part}, spread {s:g}" for s in SPREADS for part in parts))
    for name, sampler, peer in cases:
        found = []
        for spread in SPREADS:
            rng = np.random.default_rng(0)
            logits = (rng.standard_normal(given.vocabulary) * spread).astype(np.float32)
            ways = {"top_k": partial(spent, top, logits), name: partial(spent, sampler, logits)}
            if peer is not None:
                ways["transformers"] = partial(warped, peer, logits)
            times = in_turns(ways, given.pairs, warm=2)
            found += [f"{median(times[name]):.2f}"]
            found += [f"{median(ratios(times[name], times['top_k'])):.2f}"]
            over = ratios(times[name], times["transformers"]) if peer is not None else []
            found += [f"{median(over):.2f}" if over else "–"]
        row(name, *found)


if __name__ == "__main__":
    main()
