"""Which variant of a step a target uses on this machine, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Cost:
    """Seconds that attention and products with weights of few bits take in one call, and its other nodes by their
    number, by variant.
    """

    tokens: int
    context: int
    seconds: dict[str, float]


@dataclass(frozen=True)
class Tuning:
    """The variant chosen, and why: asked for, measured, or the only one.

    refused: variants that onnxruntime does not open here, and its reason. seconds: spent measuring
    now; 0 where an earlier measurement was found.
    """

    kernels: str
    why: str
    costs: tuple[Cost, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
