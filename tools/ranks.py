"""Search the slices of `kv-runahead` that give the first token soonest here, for prompts of some lengths.

    python tools/ranks.py ARTIFACT --tokens 1024 4096

ARTIFACT was built with `prefill.ranks = kv-runahead`. It prints `shares` for its recipe: a row for each length, between
which the method interpolates. A time is the least of `--rounds` prompts of random tokens. Times of processes that
share one machine's cores say nothing of several machines; run it where the ranks are.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace

import numpy as np

import accel
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.prefill.ranks.kv_runahead import KvRunahead, search
from accel.runtime.session.prompt.ranks import PromptRanks


def found(model: CompiledModel, tokens: int, rounds: int, grid: int) -> tuple[list[int], float]:
    """The ends of the best slices [ranks], and their seconds. Raises SystemExit where the model has none."""
    prompt = np.random.default_rng(0).integers(0, model.facts.vocab_size, (1, tokens))

    def seconds(ends: list[int]) -> float:
        times = []
        for _ in range(rounds):
            with model.session() as session:
                ranks = session.observer(PromptRanks)
                if ranks is None or not isinstance(ranks.method, KvRunahead):
                    raise SystemExit("build the artifact with prefill.ranks = kv-runahead")
                shares = np.diff([0, *ends]).tolist()
                ranks.method = replace(ranks.method, shares=shares, least=1)
                start = time.perf_counter()
                session.prompt(prompt)
                times.append(time.perf_counter() - start)
        return min(times)

    with model.session() as session:
        ranks = session.observer(PromptRanks)
        count = 1 if ranks is None else ranks.method.ranks
    seconds([tokens * (i + 1) // count for i in range(count)])  # processes start
    return search(seconds, tokens, count, grid)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("artifact")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--grid", type=int, default=4)
    given = parser.parse_args(arguments)
    rows = []
    with accel.load(given.artifact) as model:
        for tokens in sorted(given.tokens):
            ends, best = found(model, tokens, given.rounds, given.grid)
            rows.append([tokens, *np.diff([0, *ends]).tolist()])
            print(f"# {tokens} tokens: {best:.4g} s", file=sys.stderr)
    print(f"shares = {rows}")


if __name__ == "__main__":
    main(sys.argv[1:])
