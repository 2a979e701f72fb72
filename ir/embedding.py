"""Models that give a vector for a text: what the runtime has to know of one."""

from __future__ import annotations

from dataclasses import dataclass

from accel.ir.fields import Fields, Positive

POOLINGS = ("mean", "cls", "last")  # of all tokens' vectors, or that of the first, or of the last


@dataclass(frozen=True)
class Pairs:
    """Of a cross-encoder, which gives one number for two texts. offset: the ids of the second text and of what the
    tokenizer puts behind it are higher by this, in place of the token types of BERT (arXiv:1810.04805). sigmoid: the
    number is brought between 0 and 1.
    """

    offset: Positive
    sigmoid: bool = True


@dataclass(frozen=True)
class Embedding:
    """pooling: which of the tokens' vectors make that of the text. normalize: it is brought to length 1. width: numbers
    of a vector, which a step gives for each token in place of logits. both_ways: tokens see later ones. pairs: it
    compares two texts, and the vector is one number.
    """

    pooling: str
    normalize: bool = True
    width: Positive = 1
    both_ways: bool = False
    pairs: Pairs | None = None

    def check(self, f: Fields) -> None:
        """Raises ArtifactError."""
        if self.pooling not in POOLINGS:
            raise f.wrong("pooling", self.pooling, f"one of {', '.join(POOLINGS)}")
