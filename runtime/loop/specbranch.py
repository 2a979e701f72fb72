"""SpecBranch (arXiv:2506.01979): draft model and target model run in parallel, and where the draft model is unsure it
drafts on from several tokens at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from accel.ir.axis import option
from accel.runtime.call import Logits
from accel.runtime.draft._levels import Levels
from accel.runtime.inputs.ints import Ints
from accel.runtime.loop._parallel import Ahead, Parallel
from accel.runtime.session.core import CHUNK
from accel.runtime.speculation.follow import Follower
from accel.runtime.tree import Level
from accel.runtime.tree._nodes import top


@dataclass(frozen=True)
class Specbranch(Parallel):
    """While a call verifies a draft, the draft model drafts what would follow: `branches` tokens that may come next,
    and up to `ahead` - 1 tokens after each, fewer where the likeliest one has a probability of at most `threshold`: the
    next branches are to begin there. If the draft is fully accepted and the next token is one of the branches', the
    next call verifies what follows it. The output is that of plain decoding, also when sampling.
    """

    branches: int = option(3, least=1, most=16)
    ahead: int = option(6, least=1, most=32)
    threshold: float = option(0.4, least=0, below=1)

    lacks = "the optional predictor that reads hidden states"
    grows = True

    def drafted(
        self, follower: Follower, texts: Mapping[int, Ints], sure: Mapping[int, int]
    ) -> Mapping[int, Ahead]:
        """See Parallel. The branches of a row are a tree of the draft model's session."""
        room = {i: follower.most(text.size + 1, CHUNK) for i, text in texts.items()}
        said = follower.follow(texts, sure)[:, 0]
        rows = {i: _Branches(top(said[i][None], self.branches)[0]) for i in texts}
        trees, step = Levels(follower, texts), 1  # tokens of each branch that goes on
        levels = {i: row.level() for i, row in rows.items()}
        while step < self.ahead:
            levels = {
                i: level
                for i, level in levels.items()
                if level.tokens.size and rows[i].count + level.tokens.size <= room[i]
            }
            if not levels:
                break
            logits = trees.further(levels)
            for i, level in levels.items():
                rows[i].extend(logits[i, : level.tokens.size], self.threshold)
            levels = {i: rows[i].level() for i in levels}
            step += 1
        return {
            i: {first: np.array(rest, np.int64) for first, *rest in row.tokens}
            for i, row in rows.items()
        }


@dataclass
class _Branches:
    """Of one row, each with its first token so far."""

    firsts: Ints
    tokens: list[list[int]] = field(init=False)
    count: int = 0  # nodes that ran

    def __post_init__(self) -> None:
        self.tokens = [[int(token)] for token in self.firsts]
        self._nodes = [0] * len(
            self.tokens
        )  # the number of each one's last node that ran; the root's
        self._open = list(range(len(self.tokens)))

    def level(self) -> Level:
        """The newest token of each that goes on."""
        tokens = [self.tokens[b][-1] for b in self._open]
        parents = [self._nodes[b] for b in self._open]
        return Level(np.array(tokens, np.int64), np.array(parents, np.int64))

    def extend(self, logits: Logits, threshold: float) -> None:
        """By what is said [n,V] after each of those, which ran: where it is unsure a branch ends."""
        going = list[int]()
        for branch, line in zip(self._open, logits, strict=True):
            self.count += 1
            self._nodes[branch] = self.count
            best = int(line.argmax())
            with np.errstate(over="ignore"):
                sure = float(1 / np.exp(line - line[best]).sum())
            if sure > threshold:
                self.tokens[branch].append(best)
                going.append(branch)
        self._open = going
