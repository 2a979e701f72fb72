"""The two ways in which a budget is given."""

from __future__ import annotations

from dataclasses import dataclass

from accel.ir.errors import RecipeError


@dataclass(frozen=True)
class Share:
    """`tokens_kept`: tokens of a row; or, where it is set, `compression_ratio`: the share of the tokens
    seen that goes (kvpress' meaning), at least one token stays.
    """

    tokens_kept: int = 1024
    compression_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.tokens_kept < 1:
            raise RecipeError(f"kv.budget: tokens_kept is {self.tokens_kept}; give at least 1")
        if not 0 <= self.compression_ratio < 1:
            raise RecipeError(
                f"kv.budget: compression_ratio is {self.compression_ratio}; give the fraction of "
                "tokens to evict, at least 0 and below 1"
            )

    def average(self, seen: int) -> int:
        """Tokens per head, over all layers."""
        return max(1, int(self.mean(seen)))

    def mean(self, seen: int) -> float:
        """The same before rounding."""
        return seen * (1 - self.compression_ratio) if self.compression_ratio else self.tokens_kept
