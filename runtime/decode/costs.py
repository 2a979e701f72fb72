"""The verify-cost curve: what a call of T tokens costs, measured on the step itself on this machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from accel.ir.errors import InputError
from accel.ir.facts import Facts
from accel.runtime.backends import clock
from accel.runtime.backends.buffers import STEP
from accel.runtime.backends.onnx.machine import recall, remember
from accel.runtime.backends.protocol import BackendSession, whole_tiles
from accel.runtime.inputs.encoder_inputs import entry_inputs, shortest

TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
SLOTS = 512  # of the cache that the calls read, or as many as the model has
SECONDS = 1.0  # after a first round, at most about this
ROUNDS = 9
RUNS = 3  # measurements, by as many loads: what else the machine did then only adds to times


@dataclass(frozen=True)
class Costs:
    """tokens: of a call, from 1 up; seconds: what it takes, logits of every token included; runs: measurements of
    which these are the least.
    """

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    runs: int = 1

    @property
    def sure(self) -> bool:
        """Whether it need not be measured again."""
        return self.runs >= RUNS

    def ratio(self, tokens: int) -> float:
        """c(T)/c(1), between measured points by a straight line. Raises InputError beyond them."""
        if not 1 <= tokens <= self.tokens[-1]:
            raise InputError(
                f"costs are known for calls of 1..{self.tokens[-1]} tokens, not {tokens}"
            )
        return float(np.interp(tokens, self.tokens, self.seconds)) / self.seconds[0]

    @property
    def ratios(self) -> dict[int, float]:
        """The ratio at every measured point."""
        return {t: s / self.seconds[0] for t, s in zip(self.tokens, self.seconds, strict=True)}


def known(key: dict[str, Any] | None) -> Costs | None:
    """An earlier measurement, where it is whole."""
    value: Any = None if key is None else recall("costs", key)
    try:
        found = Costs(
            tuple(int(t) for t in value["tokens"]),
            tuple(float(s) for s in value["seconds"]),
            int(value["runs"]),
        )
    except (KeyError, TypeError, ValueError):
        return None
    usual = found.tokens and found.tokens == TOKENS[: len(found.tokens)]
    whole = usual and len(found.seconds) == len(found.tokens) and min(found.seconds) > 0
    return found if whole else None


def measured(backend: BackendSession, facts: Facts, key: dict[str, Any] | None) -> Costs:
    """Measure with a fresh backend session of one row, which is closed after; keep it under the key, together
    with what was measured before.
    """
    try:
        costs = _measure(backend, facts)
    finally:
        backend.close()
    before = known(key)
    if before is not None and before.tokens == costs.tokens:
        least = tuple(map(min, before.seconds, costs.seconds))
        costs = Costs(costs.tokens, least, before.runs + 1)
    if key is not None:
        remember("costs", key, asdict(costs))
    return costs


def _measure(backend: BackendSession, facts: Facts) -> Costs:
    tile = backend.tile
    if facts.encoder is not None:
        backend.encode(entry_inputs(shortest(facts.encoder), None, 1, facts.encoder))
    held = min(SLOTS, facts.max_context)
    backend.resize(-(-(held + tile) // STEP) * STEP)
    widths = [t for t in TOKENS if t <= held]
    taken: dict[int, list[float]] = {t: [] for t in widths}
    limit = float("inf")
    for done in range(ROUNDS + 1):
        if done > 1 and clock.now() > limit:
            break
        for width in widths:
            tokens = np.arange(width)[None] % facts.vocab_size
            at = held - width + np.arange(width)[None]
            rows = np.arange(width)[None]
            slots = at[:, 0]
            tokens, at, rows, *_ = whole_tiles(tile, tokens, at, rows, None, None)
            start = clock.now()
            backend.step(tokens, at, slots, rows)
            taken[width].append(clock.now() - start)
        if not done:
            limit = clock.now() + SECONDS
    best = np.array(
        [min(times[1:]) for times in taken.values()]
    )  # the first call of a shape makes its buffers
    best = np.minimum.accumulate(best[::-1])[
        ::-1
    ]  # a call could be padded to a wider one: what is more is noise
    return Costs(tuple(widths), tuple(best.tolist()))
