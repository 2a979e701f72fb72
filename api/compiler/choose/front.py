"""The Pareto front of speed, memory and loss, with the spread of what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, log10
from statistics import median

EXACT = 1e-6  # nats per token: less is rounding of float32
_MEMORY, _LOSS = 3, 2  # significant digits that count


@dataclass(frozen=True)
class Spread:
    """Median, least and most of rounds."""

    median: float
    least: float
    most: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return Spread(median(values), min(values), max(values))

    def times(self, other: Spread) -> Spread:
        return Spread(self.median * other.median, self.least * other.least, self.most * other.most)

    def overlaps(self, other: Spread) -> bool:
        return self.least <= other.most and other.least <= self.most


@dataclass(frozen=True)
class Stage:
    """What was found with so many prompts and rounds. loss: KL, nats per token. speed: times base's."""

    loss: float
    speed: Spread


@dataclass(frozen=True)
class Point:
    """methods: how many recipes were merged, 0 for base. memory: bytes. stages: from few prompts to many."""

    name: str
    methods: int
    memory: int
    stages: tuple[Stage, ...]

    @property
    def loss(self) -> float:
        return self.stages[-1].loss

    @property
    def speed(self) -> Spread:
        return self.stages[-1].speed


def _costs(point: Point, stage: Stage) -> tuple[float, float]:
    """Memory and loss, as far as they tell points apart."""
    loss = 0.0 if stage.loss < EXACT else _rounded(stage.loss, _LOSS)
    return _rounded(point.memory, _MEMORY), loss


def _rounded(value: float, digits: int) -> float:
    return round(value, digits - 1 - floor(log10(value))) if value > 0 else 0.0


def _together(a: Point, b: Point) -> tuple[Stage, Stage]:
    """Both at the last stage that both reached: of the same prompts."""
    last = min(len(a.stages), len(b.stages)) - 1
    return a.stages[last], b.stages[last]


def dominates(a: Point, b: Point) -> bool:
    """Whether a is nowhere worse and somewhere better. A speed is better where the spreads do not overlap."""
    one, two = _together(a, b)
    (memory, loss), (other, lost) = _costs(a, one), _costs(b, two)
    if memory > other or loss > lost or two.speed.least > one.speed.most:
        return False
    return memory < other or loss < lost or one.speed.least > two.speed.most


def alike(a: Point, b: Point) -> bool:
    """Whether nothing that was measured tells them apart."""
    one, two = _together(a, b)
    return _costs(a, one) == _costs(b, two) and one.speed.overlaps(two.speed)


def _best(points: Sequence[Point]) -> list[Point]:
    """Those that no other dominates. There is one at each stage; where stages differ, a circle is left whole."""
    return [p for p in points if not any(dominates(q, p) for q in points)] or list(points)


def front(points: Sequence[Point]) -> list[Point]:
    """The points that no other dominates; of those that are alike the simplest. Empty only where `points` is."""
    found: list[Point] = []
    for point in sorted(_best(points), key=lambda p: (p.methods, -p.speed.median, p.name)):
        if not any(alike(point, other) for other in found):
            found.append(point)
    return found


def survivors(points: Sequence[Point]) -> list[Point]:
    """The better half: the front, then the front of the rest, and so on; within one, the faster first."""
    left, found = list(points), list[Point]()
    while left:
        best = _best(left)
        found += sorted(best, key=lambda p: -p.speed.median)
        left = [p for p in left if p not in best]
    return found[: max(1, (len(points) + 1) // 2)]
