"""No verification (VITA-Audio, arXiv:2505.03739): what is drafted stands, whatever the target says of it."""

from __future__ import annotations

from dataclasses import dataclass

from accel.runtime.tree import ROOT
from accel.runtime.verify import Base, Chance, Target, Verdict


@dataclass(frozen=True)
class Unverified(Base):
    """Chains. Each drafted token is taken, and the target's own follows. So the drafter decides the text, and how much
    it drafts: choose its length with care (`interleave`). Drafts are never shortened or paused for speed.
    """

    grade = "approximate"
    branches = False
    instead = "sample-match"
    tolerant = True
    verifies = False

    def judge(self, target: Target, chance: Chance) -> Verdict:
        last = len(target.tree) - 1 if len(target.tree) else ROOT
        return Verdict(target.tree.path(last), chance.draw(target.law(last)))
