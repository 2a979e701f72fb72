"""Budgets of their own for the prompt and for generated tokens, as in SCOPE (arXiv:2412.13649) and ShotKV
(arXiv:2502.01941).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from accel.ir.axis import option
from accel.ir.errors import RecipeError
from accel.runtime.kv.budget import Base
from accel.runtime.kv.budget._share import Share


@dataclass(frozen=True)
class Phases(Share, Base):
    """The prompt keeps `tokens_kept` tokens or, with `compression_ratio` r, the fraction 1 - r; generated tokens keep
    `decode_kept` beside them or, with `decode_ratio`, that fraction less (in thousandths).

    `longest`: tokens that will be generated; where it is set, what generated tokens keep grows evenly from `recent` to
    `decode_kept` until then (SCOPE's adaptive schedule). Evicting at each step (`kv.when.generated`, tokens = 1) is
    its slide or adaptive schedule, at each `step` tokens its discontinuous one.
    """

    decode_kept: int = option(1024, least=1)
    decode_ratio: float = option(0.0, least=0, below=1)
    recent: int = option(256, least=1)
    longest: int = option(0, least=0)
    small: ClassVar[Mapping[str, Any]] = {"tokens_kept": 17, "decode_kept": 6, "recent": 3}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recent > self.decode_kept:
            raise RecipeError(
                f"{self.full_name}: recent is {self.recent}, more than are kept; give at most decode_kept = "
                f"{self.decode_kept}"
            )
        if self.longest and self.decode_ratio:
            raise RecipeError(
                f"{self.full_name}: longest is {self.longest} and decode_ratio {self.decode_ratio}; give one of "
                "them"
            )

    @property
    def step(self) -> int:
        """Generated tokens after which they keep one more."""
        return max(1, (self.longest - self.recent) // max(1, self.decode_kept - self.recent))

    def tokens(self, seen: int, layer: int, layers: int, prompt: int | None = None) -> int:
        whole = seen if prompt is None else min(prompt, seen)
        kept: int = min(self.average(whole), whole) + self._generated(seen - whole)
        return max(1, kept)

    def heads(self, scores: Any, keep: Any, positions: Any, prompt: Any, seen: Any) -> Any:  # type: ignore[override]
        """A prompt that keeps less than its budget leaves no room to generated tokens."""
        new = self._generated((seen - prompt).clamp(min=0))
        there = ((positions >= 0) & (positions < prompt[:, None, None])).sum(2)
        both = there.minimum((keep - new)[:, None]) + new[:, None]
        return both.where((seen > prompt)[:, None], keep[:, None])

    def _generated(self, count: Any) -> Any:
        """What so many generated tokens keep; an int, or a tensor of them."""
        if self.decode_ratio:
            share = 1000 - round(1000 * self.decode_ratio)
            return (count * share + 999) // 1000
        if not self.longest:
            return _least(count, self.decode_kept)
        return _least(count, _least(self.recent + count // self.step, self.decode_kept))


def _least(a: Any, b: Any) -> Any:
    """The smaller, of ints and of tensors."""
    return a - (a - b) * (a > b)
