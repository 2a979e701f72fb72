"""Sample from the target and accept the draft while it matches, as transformers does for prompt lookup; the baseline of
MCSD (arXiv:2401.06706).
"""

from __future__ import annotations

from dataclasses import dataclass

from accel.runtime.verify import Base, Chance, Target, Verdict, match


@dataclass(frozen=True)
class SampleMatch(Base):
    """Trees of any origin; q is not read. It uses one random number per emitted token, as plain sampling
    does, so the same generator gives the same tokens for every draft.
    """

    grade = "lossless"
    reads_q = False

    def judge(self, target: Target, chance: Chance) -> Verdict:
        return match(target, chance)
