"""What the calls of an artifact cost on this machine: medians of calls as an engine makes them, and a fit."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
from simulation import Costs

from accel.runtime.decode.sampling_params import SamplingParams
from accel.runtime.serve.engine import Engine, Request

SIZES = (8, 64, 192)  # tokens of prompts that are measured
ROWS = (1, 2, 4, 8)


def fitted(features: Any, seconds: Any) -> Any:
    """Coefficients of 0 or more, by least squares of relative errors; a negative one is set to 0, and the rest anew."""
    weights = 1 / np.asarray(seconds, float)
    matrix = np.asarray(features, float) * weights[:, None]
    left = list(range(matrix.shape[1]))
    while left:
        found, *_ = np.linalg.lstsq(matrix[:, left], np.ones(len(weights)), rcond=None)
        if found.min() >= 0:
            break
        left.remove(left[int(found.argmin())])
    out = np.zeros(matrix.shape[1])
    out[left] = found if left else []
    return out


def measured(model: Any, repeats: int = 3) -> Costs:
    """The costs of a model's calls, medians, as an engine makes them: prompts into sessions of one row, and rounds of
    rows that joined.
    """
    size = model.facts.max_context
    rng = np.random.default_rng(0)

    def ids(n: int) -> Any:
        return rng.integers(1, model.facts.vocab_size, n)

    prompts: dict[tuple[int, int], list[float]] = {}
    rounds: dict[tuple[int, int], list[float]] = {}
    moves: dict[int, list[float]] = {}
    with Engine(model) as engine:  # kernels are chosen, and the code is warm
        list(engine.submit(Request(ids(8), SamplingParams(max_tokens=4))))
    for _ in range(repeats):
        for tokens in (n for n in SIZES if 2 * n + 8 < size):
            group = None
            for rows in range(1, model.facts.max_batch + 1):
                start = time.perf_counter()
                session = model.session()
                logits = session.prompt(ids(tokens)[None])
                logits[0, 0].argmax()
                prompts.setdefault((tokens, 0), []).append(time.perf_counter() - start)
                if group is None:
                    group = session
                    start = time.perf_counter()
                    data = session.export_row()
                    with model.import_row(data) as other:
                        moves.setdefault(tokens, []).append((time.perf_counter() - start) / 2)
                        start = time.perf_counter()
                        other.run(ids(tokens)[None], last_only=True)
                        spent = time.perf_counter() - start
                    prompts.setdefault((tokens, tokens), []).append(spent)
                else:
                    group.join(session)
                if rows in ROWS:
                    group.run(np.ones((rows, 1), np.int64))  # buffers are bound anew
                    for _ in range(4):
                        start = time.perf_counter()
                        logits = group.run(np.ones((rows, 1), np.int64))
                        [logits[i, 0].argmax() for i in range(rows)]
                        spent = time.perf_counter() - start
                        rounds.setdefault((rows, tokens), []).append(spent)
            group.close()
    call, token, pair = fitted(
        [(1, n, n * b + n * (n + 1) / 2) for n, b in prompts],
        list(map(np.median, prompts.values())),
    )
    each, row, slot = fitted(
        [(1, n, n * c) for n, c in rounds], list(map(np.median, rounds.values()))
    )
    move, byte = fitted([(1, n) for n in moves], list(map(np.median, moves.values())))
    costs = Costs(*map(float, (call, token, pair, each, row, slot, move, byte)))
    with Engine(model) as engine:  # what an iteration takes beside its calls
        ticket = engine.submit(Request(ids(8), SamplingParams(max_tokens=64, ignore_eos=True)))
        times = [time.perf_counter() for _ in ticket]
    return replace(costs, iteration=max(0.0, float(np.median(np.diff(times))) - costs.decode([40])))
