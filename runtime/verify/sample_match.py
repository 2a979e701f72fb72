"""Sample from the target, follow if proposed: what prompt lookup does in transformers, and MCSD's baseline
(arXiv:2401.06706).
"""

from __future__ import annotations

from dataclasses import dataclass

from accel.runtime.verify import Base, Chance, Target, Verdict, match


@dataclass(frozen=True)
class SampleMatch(Base):
    """Trees of any origin; q is not read. It takes one random number for each token that comes out, as
    plain sampling does, so the same generator gives the same tokens whatever is drafted.
    """

    grade = "bit-exact"
    reads_q = False

    def judge(self, target: Target, chance: Chance) -> Verdict:
        return match(target, chance)
