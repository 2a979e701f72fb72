"""Staged speculative decoding (arXiv:2308.04623): the draft model decodes speculatively, too; n-grams of the text are
its drafts. Its tokens, of a chain or a tree, are those that it would draw alone, in fewer calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.ir.axis import option
from accel.runtime.call import Logits
from accel.runtime.draft import Drafters, More
from accel.runtime.draft._by_levels import ByLevels
from accel.runtime.draft._levels import Levels
from accel.runtime.draft.model import Chains, Model
from accel.runtime.draft.prompt_lookup import PromptLookup
from accel.runtime.inputs.ints import Ints
from accel.runtime.speculation.follow import Follower
from accel.runtime.tree import Level, Tree

Path = tuple[int, ...]  # tokens from the last committed one, without it, to a node


@dataclass(frozen=True)
class StagedSpec(Model):
    """`path` and `weights` as of `model`. `ahead`: tokens that a call of the draft model checks behind each one that it
    runs, those that followed an earlier occurrence of the newest `ngram` tokens, or of fewer. What is drawn decides at
    each place, so the target knows what each token was drawn from. The axis `tree` gives the shape: of a tree each
    node of a level is looked up by its own path, and a level of which all nodes were looked up takes no call.
    """

    ngram: int = option(2, least=1, most=64)
    ahead: int = option(3, least=0, most=64)

    def _drafter(self, branches: bool, *args: Any) -> Drafters:
        return (_StagedTrees if branches else _Staged)(*args, method=self)


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


class _StagedTrees(ByLevels):
    """Trees whose levels are computed ahead where look-ups say what they will be."""

    def __init__(self, *args: Any, method: StagedSpec):
        super().__init__(*args)
        self._method = method

    def levels(
        self, texts: Mapping[int, Ints], room: Mapping[int, int], sizes: Mapping[int, int]
    ) -> Levels:
        return _StagedLevels(self._follower, texts, room, sizes, self._method)


class _StagedLevels(Levels):
    """`room`: tokens that a call of each row may have; `sizes`: tokens of each row's tree."""

    def __init__(
        self,
        follower: Follower,
        texts: Mapping[int, Ints],
        room: Mapping[int, int],
        sizes: Mapping[int, int],
        method: StagedSpec,
    ):
        super().__init__(follower, texts)
        self._room, self._deepest = room, {i: size - 1 for i, size in sizes.items()}
        self._lookup, self._ahead = PromptLookup(method.ngram), method.ahead
        self._known: dict[int, dict[Path, Logits]] = {i: {} for i in texts}  # logits [V] after each

    def further(self, levels: Mapping[int, Level]) -> Logits:
        paths = {i: self._paths(i, level) for i, level in levels.items()}
        calls = {i: call for i, these in paths.items() if (call := self._call(i, these))}
        if calls:
            trees = {i: _masked(*call) for i, call in calls.items()}
            logits = self._follower.guess(trees, {i: len(new) for i, (_, new) in calls.items()})
            for i, (_, new) in calls.items():
                self._known[i].update(zip(new, logits[i], strict=False))
        first = next(iter(paths))
        width = self._known[first][paths[first][0]].size
        out = np.zeros((1 + max(levels), max(map(len, paths.values())), width), np.float32)
        for i, these in paths.items():
            out[i, : len(these)] = [self._known[i][path] for path in these]
        return out

    def _paths(self, i: int, level: Level) -> list[Path]:
        """Add a level: the tokens from the root to each of its nodes."""
        nodes = self._nodes[i]
        first, start = len(nodes.tokens), nodes.seen.size
        nodes.add(level)
        return [tuple(nodes.path(first + n)[start:].tolist()) for n in range(level.tokens.size)]

    def _call(self, i: int, paths: Sequence[Path]) -> tuple[list[Path], list[Path]] | None:
        """What leads to the nodes of a level that nothing is known of, and these with what was looked up behind them;
        None where all are known.
        """
        new = [path for path in paths if path not in self._known[i]]
        if not new:
            return None
        above = dict.fromkeys(path[:n] for path in new for n in range(1, len(path)))
        left = self._room[i] - len(above) - len(new)
        ahead = list[Path]()
        for path in new:
            text = np.concatenate([self._nodes[i].seen, path]).astype(np.int64)
            most = min(self._ahead, left - len(ahead), self._deepest[i] - len(path))
            if most > 0:
                found = self._lookup.draft(text, most).tokens.tolist()
                ahead += [(*path, *found[: n + 1]) for n in range(len(found))]
        return list(above), new + ahead


def _masked(above: Sequence[Path], new: Sequence[Path]) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """The last token of each path [n], each behind those that lead to it, and which of them each one sees [n,n]."""
    place = {path: n for n, path in enumerate([*above, *new])}
    mask = np.eye(len(place), dtype=np.bool_)
    for path, n in place.items():
        if len(path) > 1:
            mask[n] |= mask[place[path[:-1]]]
    return np.array([path[-1] for path in place], np.int64), mask
