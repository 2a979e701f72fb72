"""NAME (paper, arXiv): what it does, in a sentence."""

from __future__ import annotations

from dataclasses import dataclass

from accel.runtime.verify import Base, Chance, Target, Verdict, match


@dataclass(frozen=True)
class Template(Base):
    """Which drafted tokens stand: here, those that a draw from the target gives."""

    grade = "lossless"
    reads_q = False

    def judge(self, target: Target, chance: Chance) -> Verdict:
        return match(target, chance)
