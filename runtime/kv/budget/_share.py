"""The two ways in which a budget is given."""

from __future__ import annotations

from dataclasses import dataclass

from accel.ir.axis import option


@dataclass(frozen=True)
class Share:
    """`tokens_kept`: tokens of a row; or, where it is set, `compression_ratio`: the share of the tokens
    seen that goes (kvpress' meaning), at least one token stays.
    """

    tokens_kept: int = option(1024, least=1)
    compression_ratio: float = option(0.0, least=0, below=1)

    def average(self, seen: int) -> int:
        """Tokens per head, over all layers."""
        return max(1, int(self.mean(seen)))

    def mean(self, seen: int) -> float:
        """The same before rounding."""
        return seen * (1 - self.compression_ratio) if self.compression_ratio else self.tokens_kept
