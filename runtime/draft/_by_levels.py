"""Trees that a draft model's session expands level by level, of all rows in one call."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from accel.runtime.call import Logits
from accel.runtime.draft import More
from accel.runtime.draft._beside import Beside
from accel.runtime.draft._levels import Levels
from accel.runtime.inputs.ints import Ints
from accel.runtime.sample import Distribution
from accel.runtime.session.core import CHUNK
from accel.runtime.tree import Guesses, Level, Tree, grown


class ByLevels(Beside):
    """A length is asked of the nodes that the tree goes on from, and only told of them where nodes that were drawn may
    be left out for later ones (`tree.Base.drops`). A tree ends where a call of it would have no room, or would say
    nothing.
    """

    def draft(self, limits: Mapping[int, int], more: More) -> Mapping[int, Tree]:
        self.begin(limits)
        sizes = {i: self._follower.most(self.size(i) + 1, limit) for i, limit in limits.items()}
        texts = {i: self.rows[i].seen for i, most in sizes.items() if most > 0}
        room = {i: self._follower.most(self.size(i) + 1, CHUNK) for i in texts}
        trees = self.levels(texts, room, sizes)
        said: dict[int, list[Logits]] = {}  # of each row, after each node that was expanded
        waiting: dict[int, list[Logits]] = {}  # after those of rows that wait

        def goes_on(i: int, level: Level) -> bool:
            if trees.wide(i, level) > room[i] or trees.depth(i, level) > self._follower.deepest:
                return False
            ends = not more.more(i, level, [said[i][parent] for parent in level.parents])
            return not ends or self._drops and self.draws[i] is not None

        def expand(levels: dict[int, Level]) -> dict[int, Guesses | Level]:
            if first := not said:
                said.update({i: [] for i in levels})
            going = {
                i: level
                for i, level in levels.items()
                if first or i not in waiting and goes_on(i, level)
            }
            if first:
                logits = self.follow(list(levels))[:, -1:]
            elif going:
                logits = trees.further(going)
            new = waiting | {
                i: [logits[i, n, : self._vocab] for n in range(level.tokens.size)]
                for i, level in going.items()
            }
            waiting.clear()
            found: dict[int, Guesses | Level] = {}
            for i in more.draws(new):
                number = len(said[i])
                said[i] += new[i]
                found[i] = [
                    self.law(i, line, trees.path(i, number + n)) for n, line in enumerate(new[i])
                ]
            if found:
                waiting.update((i, lines) for i, lines in new.items() if i not in found)
                found |= {i: levels[i] for i in waiting}
            return found

        self._trees = grown({i: self.grow(i, sizes[i]) for i in texts}, expand)
        return self._trees

    def levels(
        self, texts: Mapping[int, Ints], room: Mapping[int, int], sizes: Mapping[int, int]
    ) -> Levels:
        """What computes the trees behind the tokens [n] of rows: `room`, tokens that a call of a row may have; `sizes`,
        tokens of a row's tree.
        """
        return Levels(self._follower, texts)

    def said(self, row: int, logits: Logits, seen: Ints) -> Distribution:
        """As of ByModel; all that the model says where a greedy row's children are chosen."""
        if not self.rows[row].sampler.greedy:
            return super().said(row, logits, seen)
        scores = self.rows[row].sampler.scores(logits, seen)
        return Distribution(np.arange(scores.size), np.exp(scores - scores.max()))
