"""STAND (arXiv:2506.04708): draft trees from a memory of what the target said after each n-gram, as probabilities, so
that drafted tokens can be drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from threading import Lock
from typing import Self

import numpy as np

from accel.ir.axis import option
from accel.ir.errors import RecipeError
from accel.ir.facts import Facts
from accel.ir.invariants import Invariant
from accel.runtime.call import Logits
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.rounds import picked
from accel.runtime.decode.row import Row
from accel.runtime.draft import Base, Drafters, More
from accel.runtime.draft._by_logits import ByModel
from accel.runtime.inputs.ints import Ints
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.sample import Distribution
from accel.runtime.session.session import Session
from accel.runtime.speculation.texts import check_room
from accel.runtime.tree import ROOT, Guesses, Level, Tree, grown
from accel.runtime.tree._nodes import likeliest
from accel.runtime.verify import Verdict

SIZES = (4, 3, 2)  # tokens of an n-gram, the longest first
LONGEST = max(SIZES)
ENTRY = 240  # bytes of an n-gram beside its tokens, at most: Python's own
Grams = list[int]  # the keys of a context by `SIZES`
Found = tuple[list[int], list[float]]


@dataclass(frozen=True)
class Stand(Base):
    """The mean of the target's distributions after each n-gram of 4, 3 and 2 tokens, of which the `kept` likeliest
    tokens stay. A node's children are drawn from what follows the longest n-gram that is known, without replacement, as
    its tree asks (by default `stand`, the paper's template).

    A request begins with what first followed in its prompt, as certain until the target was heard there. `shared`: with
    what earlier requests of a loaded model left, too. A memory has up to `bytes`; the oldest n-grams are given up.
    """

    kept: int = option(10, least=1, most=64)
    shared: bool = False
    bytes: int = 16 << 20

    provides = frozenset({Invariant.PROBABILITIES})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bytes < (least := _entry(self.kept)):
            raise RecipeError(f"{self.full_name}: bytes is {self.bytes}; give at least {least}")

    @property
    def asks(self) -> Mapping[str, str]:
        return {"tree": "stand"}

    def store(self, facts: Facts, tokenizer: Tokenizer | None) -> Memory | None:
        if not self.shared:
            return None
        check_room("stand", self.bytes, len(SIZES) * _entry(self.kept), facts.max_context)
        return Memory(self.bytes, self.kept)

    def open(self, session: Session, rows: Sequence[Row], context: DecodeContext) -> Drafters:
        return _Stand(self, rows, context, session.vocab_size)


class Memory:
    """n-gram -> how often it was seen, and the mean of the distributions after it: tokens [most,kept] and their
    probabilities, the likeliest first, in as many slots as there is room for, which are taken in turn.
    """

    def __init__(self, most: int, per_ngram: int):
        self._most, self._kept, self._entry = (
            most // _entry(per_ngram),
            per_ngram,
            _entry(per_ngram),
        )
        self._lock = Lock()
        self._slots = dict[int, int]()
        self._keys: list[int] = []  # of each slot
        self._next = 0
        self._seen = np.zeros(0, np.int64)
        self._tokens = np.zeros((0, per_ngram), np.int32)
        self._chances = np.zeros((0, per_ngram), np.float32)

    @property
    def bytes(self) -> int:
        return len(self._slots) * self._entry

    def find(self, keys: Grams) -> Found | None:
        """What follows the first of these n-grams that is known."""
        with self._lock:
            for key in keys:
                if (slot := self._slots.get(key)) is not None:
                    return self._read(slot)
        return None

    def add(self, keys: Grams, tokens: list[int], chances: list[float]) -> None:
        """Take a distribution after all of these n-grams: P <- k/(k+1) P + 1/(k+1) P_new."""
        with self._lock:
            for key in keys:
                slot = self._slots.get(key)
                if slot is None:
                    slot, seen, mean = self._new(key), 0, dict[int, float]()
                else:
                    seen = int(self._seen[slot])
                    mean = {
                        t: p * seen / (seen + 1) for t, p in zip(*self._read(slot), strict=True)
                    }
                for token, chance in zip(tokens, chances, strict=True):
                    mean[token] = mean.get(token, 0.0) + chance / (seen + 1)
                best = nlargest(self._kept, mean.items(), key=lambda one: one[1])
                self._seen[slot] = seen + 1
                self._chances[slot] = 0
                self._tokens[slot, : len(best)] = [token for token, _ in best]
                self._chances[slot, : len(best)] = [chance for _, chance in best]

    def suppose(self, keys: Grams, token: int) -> None:
        """Take a token as certain after those of these n-grams of which nothing is known, until more is."""
        with self._lock:
            for key in keys:
                if key not in self._slots:
                    slot = self._new(key)
                    self._seen[slot], self._chances[slot] = 0, 0
                    self._tokens[slot, 0], self._chances[slot, 0] = token, 1

    def _read(self, slot: int) -> Found:
        chances = self._chances[slot]
        few = int((chances > 0).sum())
        return self._tokens[slot, :few].tolist(), chances[:few].tolist()

    def _new(self, key: int) -> int:
        """A slot for an n-gram: a free one, or that of the oldest."""
        slot = self._next
        self._next = (slot + 1) % self._most
        if slot < len(self._keys):
            del self._slots[self._keys[slot]]
            self._keys[slot] = key
        else:
            self._keys.append(key)
            if slot == self._seen.size:
                room = min(self._most, max(2 * slot, 64)) - slot
                self._seen = np.pad(self._seen, (0, room))
                self._tokens = np.pad(self._tokens, ((0, room), (0, 0)))
                self._chances = np.pad(self._chances, ((0, room), (0, 0)))
        self._slots[key] = slot
        return slot


class _Stand(ByModel):
    joins = True

    def __init__(self, of: Stand, rows: Sequence[Row], context: DecodeContext, vocab_size: int):
        super().__init__(rows, context, vocab_size, 0.0)
        self.free = all(row.sampler.greedy for row in rows)  # else it draws tokens
        self._kept = of.kept
        self._memories: list[Memory] = [
            Memory(of.bytes, of.kept) if context.store is None else context.store for _ in rows
        ]
        for row, memory in zip(rows, self._memories, strict=True):
            prompt = row.prompt_text.tolist()
            for end in range(2, len(prompt)):
                memory.suppose(grams(prompt[max(0, end - LONGEST) : end]), prompt[end])

    def join(self, other: Self) -> None:
        super().join(other)
        self._memories += other._memories

    def leave(self, order: Ints) -> None:
        super().leave(order)
        self._memories = picked(self._memories, order)

    def draft(self, limits: Mapping[int, int], more: More) -> Mapping[int, Tree]:
        ends = {i: self.rows[i].text[-LONGEST:].tolist() for i in limits}
        known: dict[int, list[list[int]]] = {i: [] for i in limits}

        def expand(levels: dict[int, Level]) -> dict[int, Guesses]:
            guesses: dict[int, Guesses] = {}
            for i, level in levels.items():
                pairs = zip(level.tokens.tolist(), level.parents.tolist(), strict=True)
                new = [
                    ends[i] if token == ROOT else [*known[i][parent], token][-LONGEST:]
                    for token, parent in pairs
                ]
                known[i] += new
                guesses[i] = [self._law(i, one) for one in new]
            return guesses

        growths = {i: self.grow(i, limit) for i, limit in limits.items()}
        self._trees = grown(growths, expand)
        return self._trees

    def observe(self, row: int, tree: Tree, verdict: Verdict, logits: Logits) -> None:
        super().observe(row, tree, verdict, logits)
        seen = self.rows[row].text
        for depth, node in enumerate((ROOT, *verdict.path)):
            before = (
                np.concatenate([seen, tree.tokens[list(verdict.path[:depth])]]) if depth else seen
            )
            tokens, chances = self._told(row, logits[node + 1, : self._vocab], before)
            self._memories[row].add(grams(before[-LONGEST:].tolist()), tokens, chances)

    def _told(self, i: int, logits: Logits, seen: Ints) -> tuple[list[int], list[float]]:
        """The likeliest tokens after `seen`, by the row's sampler or, of a greedy row, by the logits."""
        sampler = self.rows[i].sampler
        if sampler.greedy:
            scores = sampler.scores(logits, seen)
            law = Distribution(np.arange(scores.size), np.exp(scores - scores.max()))
        else:
            law = sampler.distribution(logits, seen)
        tokens, chances = likeliest(law, self._kept)
        return tokens, chances.tolist()

    def _law(self, i: int, context: list[int]) -> Distribution | None:
        """What may follow a context, of tokens of the target's vocabulary."""
        found = self._memories[i].find(grams(context))
        if found is None:
            return None
        order = np.argsort(found[0])
        return Distribution(
            np.array(found[0], np.int64)[order], np.array(found[1], np.float64)[order]
        )


def grams(context: list[int]) -> Grams:
    """The keys of the n-grams that a context ends with, the longest first."""
    keys = []
    for size in SIZES:
        if size <= len(context):
            key = size
            for token in context[-size:]:
                key = key << 24 | token
            keys.append(key)
    return keys


def _entry(per_ngram: int) -> int:
    """The bytes of an n-gram."""
    return ENTRY + 8 * per_ngram
