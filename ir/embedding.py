"""Models that give a vector for a text: what the runtime has to know of one."""

from __future__ import annotations

from dataclasses import dataclass

from accel.ir.fields import Fields, Positive

POOLINGS = ("mean", "cls", "last")  # of all tokens' vectors, or that of the first, or of the last


@dataclass(frozen=True)
class Embedding:
    """pooling: which of the tokens' vectors make that of the text. normalize: it is brought to length 1. width: numbers
    of a vector, which a step gives for each token in place of logits. both_ways: tokens see later ones.
    """

    pooling: str
    normalize: bool = True
    width: Positive = 1
    both_ways: bool = False

    def check(self, f: Fields) -> None:
        """Raises ArtifactError."""
        if self.pooling not in POOLINGS:
            raise f.wrong("pooling", self.pooling, f"one of {', '.join(POOLINGS)}")
