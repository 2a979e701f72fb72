"""What a round of drafting costs, in plain steps."""

from __future__ import annotations

from collections.abc import Callable

RoundCost = Callable[
    [int], float
]  # tokens drafted -> what the round costs, in plain steps, as far as it is known by then


def unmeasured_cost(drafted: int) -> float:
    """Where nothing was measured: a call of several tokens for one of one."""
    return 1.0
