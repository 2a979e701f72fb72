"""Staged speculative decoding (arXiv:2308.04623): the draft model decodes speculatively, too; n-grams of the text are
its drafts. Its tokens are those that it would draw alone, in fewer calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from accel.ir.axis import option
from accel.ir.invariants import Invariant
from accel.runtime.call import Logits
from accel.runtime.draft import Drafters, More
from accel.runtime.draft.model import Chains, Model
from accel.runtime.draft.prompt_lookup import PromptLookup
from accel.runtime.inputs.ints import Ints
from accel.runtime.tree import Tree


@dataclass(frozen=True)
class StagedSpec(Model):
    """`path` and `weights` as of `model`. `ahead`: tokens that a call of the draft model checks beside the newest one,
    those that followed an earlier occurrence of the newest `ngram` tokens, or of fewer. Its draw decides at each place,
    so the target knows what each token was drawn from. Chains only; the paper's trees are not built.
    """

    ngram: int = option(2, least=1, most=64)
    ahead: int = option(3, least=0, most=64)

    lacks = "trees of drafts"
    relies = frozenset({Invariant.CHAINS})

    def _chains(self, *args: Any) -> Drafters:
        return _Staged(*args, method=self)


class _Staged(Chains):
    """Logits that were computed ahead are used while what is drawn is what was looked up."""

    def __init__(self, *args: Any, method: StagedSpec):
        super().__init__(*args)
        self._lookup, self._ahead = PromptLookup(method.ngram), method.ahead
        self._limits: dict[int, int] = {}
        self._texts: dict[int, Ints] = {}  # committed and drafted, but for what was only looked up
        self._known: dict[int, list[tuple[int, Logits]]] = {}  # token, logits [V] after it

    def draft(self, limits: Mapping[int, int], more: More) -> Mapping[int, Tree]:
        self.begin(limits)
        self._limits = {i: self.most(i, limit) for i, limit in limits.items()}
        return super().draft(limits, more)

    def first(self, rows: list[int]) -> Logits:
        self._texts = {i: self.rows[i].seen for i in rows}
        self._known = {i: [] for i in rows}
        return super().first(rows)

    def further(self, tokens: dict[int, int]) -> Logits:
        found, calls = dict[int, Logits](), dict[int, Ints]()
        for i, token in tokens.items():
            known = self._known[i]
            self._texts[i] = np.append(self._texts[i], token)
            if known and known[0][0] == token:
                found[i] = known.pop(0)[1]
            else:
                calls[i] = np.array([token, *self._looked_up(i)])
        if calls:
            self._follower.back({i: self._texts[i].size - 1 for i in calls})
            logits = self._follower.run(calls, last_only=False)
            for i, call in calls.items():
                found[i] = logits[i, 0]
                self._known[i] = [(int(t), logits[i, n]) for n, t in enumerate(call[1:], 1)]
        width = next(iter(found.values())).size
        out = np.zeros((len(self.rows), 1, width), np.float32)
        for i, line in found.items():
            out[i, 0] = line
        return out

    def _looked_up(self, i: int) -> Ints:
        """What may follow, no more than the draft has room for before its last token, which is not run."""
        text = self._texts[i]
        left = self._limits[i] - (text.size - self.rows[i].seen.size) - 1
        most = min(self._ahead, left)
        return self._lookup.draft(text, most).tokens if most > 0 else np.zeros(0, np.int64)
