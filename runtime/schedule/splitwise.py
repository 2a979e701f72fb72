"""Splitwise (arXiv:2311.18677): prompts run in some processes and are decoded in others; the cache moves between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from accel.ir.axis import option
from accel.ir.errors import RecipeError
from accel.runtime.schedule import (
    MIXED,
    PROMPT,
    TOKEN,
    Base,
    Limits,
    Place,
    Plan,
    Route,
    State,
)
from accel.runtime.schedule._queue import served

MOST = 64  # processes of a kind


@dataclass(frozen=True)
class Splitwise(Base):
    """`prompt`, `token`, `mixed`: processes that run prompts, that decode, and that do both. A request is given both of
    its processes when it comes. `queue`: tokens of prompts beyond which a process that has some is given no more, as
    long as another one is left.

    A process whose home is one phase takes requests of the other where no process of that phase can; until they are
    through it counts as mixed. Where none can, one process does both, and nothing moves. Each process plans as
    `continuous-batching` does, so that one process in all is that.
    """

    prompt: int = option(1, least=0, most=MOST)
    token: int = option(1, least=0, most=MOST)
    mixed: int = option(0, least=0, most=MOST)
    queue: int = option(8192, least=1)

    lacks = "sending a cache layer by layer while a prompt runs"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.mixed and not (self.prompt and self.token):
            raise RecipeError(
                f"{self.full_name}: {self.prompt} prompt and {self.token} token processes cannot serve both phases; "
                "give one of each, or a mixed one"
            )

    @property
    def homes(self) -> Sequence[str]:
        return (PROMPT,) * self.prompt + (TOKEN,) * self.token + (MIXED,) * self.mixed

    def plan(self, state: State, limits: Limits) -> Plan:
        return served(state, limits, None)

    def route(self, places: Sequence[Place], prompt: int, most: int) -> Route:
        def begins(place: Place) -> bool:
            return not place.pending or place.pending + prompt <= self.queue

        def holds(place: Place) -> bool:
            return place.reserved + most <= place.capacity

        first = _least(places, (PROMPT, MIXED, TOKEN), begins, lambda place: place.pending)
        then = _least(places, (TOKEN, MIXED, PROMPT), holds, lambda place: place.reserved)
        if first is None or then is None:
            both = min(range(len(places)), key=lambda i: places[i].pending)
            return Route(both, both)
        return Route(first, then)


def _least(
    places: Sequence[Place],
    pools: Sequence[str],
    can: Callable[[Place], bool],
    load: Callable[[Place], int],
) -> int | None:
    """The place with the least load of those that can, in the first pool that has one; None: none can."""
    for pool in pools:
        found = [i for i, place in enumerate(places) if place.role == pool and can(place)]
        if found:
            return min(found, key=lambda i: load(places[i]))
    return None
