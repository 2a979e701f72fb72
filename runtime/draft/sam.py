"""SAM decoding (arXiv:2411.10666): draft the tokens after the longest match of the newest ones, found by a suffix
automaton of the request, more of them the longer the match is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from accel.ir.axis import option
from accel.ir.facts import Facts
from accel.runtime.draft import Base, Drafter
from accel.runtime.draft._automaton import ROOT, Automaton
from accel.runtime.inputs.ints import Ints
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.speculation.texts import GAP, SIZE, Texts, TextStore, check_room, matches
from accel.runtime.tree import NONE, Tree

TAIL = 64  # tokens of a match in a store, at most


@dataclass(frozen=True)
class Sam(Base):
    """After a match of m tokens, at its first occurrence, 1 + `growth` m tokens are drafted, at most `most`.

    `shared`: the outputs of a loaded model's earlier requests are searched too, in up to `bytes` (a token takes 4); the
    oldest are dropped. Such a match is taken where it is longer by more than `bias`. The paper has a second automaton
    of a fixed corpus; the store is scanned.
    """

    growth: int = option(4, least=0, most=64)
    most: int = option(40, least=1, most=512)
    bias: int = option(5, least=0, most=64)
    shared: bool = False
    bytes: int = option(4 << 20, least=0)
    lacks = "an automaton of a fixed corpus (a store of texts is scanned)"

    def store(self, facts: Facts, tokenizer: Tokenizer | None) -> TextStore | None:
        if not self.shared:
            return None
        check_room("sam", self.bytes, SIZE, facts.max_context)
        return TextStore(self.bytes)

    def begin(self, prompt: Ints, store: Any = None) -> Drafter:
        return _Row(self, prompt.size, store)


@dataclass
class _Row(Drafter):
    """`state`, `size`: the longest match of the newest tokens with an earlier occurrence."""

    of: Sam
    prompt: int
    store: TextStore | None
    automaton: Automaton = field(default_factory=Automaton)
    state: int = ROOT
    size: int = 0

    def draft(self, seen: Ints, limit: int) -> Tree:
        self._take(seen[len(self.automaton.text) :].tolist())
        size = self.size
        after: Texts = self._after()
        if self.store is not None:
            texts = self.store.tokens
            other, first = _longest(texts, seen[-TAIL:])
            if other - self.of.bias > size:
                size, after = other, texts[first : first + self.of.most]
        if not size:
            return NONE
        gaps = np.flatnonzero(after == GAP)
        end = int(gaps[0]) if gaps.size else after.size
        return Tree.chain(after[: min(end, limit, self.of.most, 1 + self.of.growth * size)])

    def end(self, seen: Ints) -> None:
        if self.store is not None and seen.size > self.prompt:
            self.store.add(seen[max(0, self.prompt - TAIL) :])

    def _take(self, tokens: list[int]) -> None:
        """The match moves before the automaton grows, so that it is with an earlier occurrence."""
        automaton, state, size = self.automaton, self.state, self.size
        for token in tokens:
            state, size = automaton.follow(state, size, token)
            automaton.append(token)
        self.state, self.size = state, size

    def _after(self) -> Ints:
        """The tokens after the match's first occurrence."""
        start = self.automaton.first[self.state] + 1
        return np.array(self.automaton.text[start : start + self.of.most], np.int64)


def _longest(texts: Any, tail: Ints) -> tuple[int, int]:
    """The size of the longest match in texts that goes on, and the place behind its first occurrence."""
    ends, lengths = matches(texts, tail)
    go_on = ends < texts.size
    go_on[go_on] = texts[ends[go_on]] != GAP
    if not go_on.any():
        return 0, 0
    best = int((lengths * go_on).argmax())
    return int(lengths[best]), int(ends[best])
