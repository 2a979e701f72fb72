"""A draft model with another tokenizer ("universal assisted generation" of transformers): texts go from one to the
other, and back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np

from accel.runtime.decode.context import Model
from accel.runtime.decode.rounds import picked
from accel.runtime.decode.row import Row
from accel.runtime.draft import Drafters, More
from accel.runtime.inputs.ints import Ints
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.speculation.follow import Follower
from accel.runtime.tree import Level, Tree

LOOK = 16  # newest tokens whose text is always encoded again: what follows may join them
UNSURE = "�"  # part of a character


class ByText(Drafters):
    """The likeliest tokens are drafted and, as text, encoded by the target's tokenizer: they are chosen, so that every
    rule stays exact, without probabilities of the target's tokens. A draft ends where the draft model ends its text.
    """

    def __init__(
        self,
        draft_model: Model,
        rows: Sequence[Row],
        target_tokenizer: Tokenizer,
        draft_tokenizer: Tokenizer,
        draft_cost: float,
        opening: float = 0.0,
    ):
        self.draft_cost, self.opening = draft_cost, opening
        self._rows = rows
        self._follower = Follower(draft_model, len(rows))
        self._ends = draft_tokenizer.special | set(draft_model.facts.eos)
        self._draft_tokenizer = draft_tokenizer
        self._texts = [_Text(target_tokenizer, draft_tokenizer) for _ in rows]

    @property
    def joins(self) -> bool:
        return self._follower.joins

    def join(self, other: Self) -> None:
        self._follower.join(other._follower)
        self._texts += other._texts

    def leave(self, order: Ints) -> None:
        self._follower.leave(order)
        self._texts = picked(self._texts, order)

    @property
    def kv_bytes(self) -> int:
        return self._follower.kv_bytes

    def draft(self, limits: Mapping[int, int], more: More) -> Mapping[int, Tree]:
        heads, left = dict[int, Ints](), dict[int, int]()
        for i, limit in limits.items():
            ids = self._texts[i].read(self._rows[i].text)
            most = 0 if ids is None else self._follower.most(ids.size, limit)
            if ids is not None and ids.size and most > 0:
                heads[i], left[i] = ids, most
        if not heads:
            return {}
        drafted: dict[int, list[int]] = {i: [] for i in heads}
        logits = self._follower.follow(heads, {i: self._texts[i].sure for i in heads})
        said = {i: [logits[i, -1]] for i in left}  # of the next token of each that goes on
        while said:
            fresh: dict[int, Ints] = {}
            drawing = list(more.draws(said))
            for i in drawing:
                (line,) = said.pop(i)
                token = int(line.argmax())
                if token in self._ends:
                    continue
                level = Level(np.array([token]), np.array([len(drafted[i])]))
                drafted[i].append(token)
                if more.more(i, level, [line]) and len(drafted[i]) < left[i]:
                    fresh[i] = np.array([token])
            if not drawing:
                break
            if fresh:
                logits = self._follower.run(fresh)
                said |= {i: [logits[i, -1]] for i in fresh}
        return {
            i: Tree.chain(self._texts[i].back(heads[i], tokens)[: limits[i]])
            for i, tokens in drafted.items()
        }

    def close(self) -> None:
        self._follower.close()


class _Text:
    """One row's text in both tokenizers. Up to an anchor, where both have a token end, it is encoded once."""

    def __init__(self, target_tokenizer: Tokenizer, draft_tokenizer: Tokenizer):
        self._target_tokenizer, self._draft_tokenizer = target_tokenizer, draft_tokenizer
        self._seen, self._tail = np.zeros(0, np.int64), ""
        self._anchor = 0  # tokens of the target before it
        self._fixed: list[int] = []  # the draft model's

    @property
    def sure(self) -> int:
        """How many of the draft model's tokens stay as they are."""
        return len(self._fixed)

    def read(self, seen: Ints) -> Ints | None:
        """The draft model's tokens of what the target has; None where the text breaks off within a character."""
        self._seen = seen[self._anchor :]
        self._tail = self._target_tokenizer.decode(self._seen)
        if self._tail.endswith(UNSURE):
            return None
        ids = self._draft_tokenizer.encode(self._tail, special=not self._anchor)
        if self._seen.size >= 2 * LOOK:
            ids = self._move(ids)
        return np.array([*self._fixed, *ids], np.int64)

    def _move(self, ids: list[int]) -> list[int]:
        """Move the anchor on where the texts and tokens before and after it are those of the whole; what is left."""
        for cut in range(self._seen.size - LOOK, self._seen.size - LOOK - 4, -1):
            head, rest = (
                self._target_tokenizer.decode(part) for part in (self._seen[:cut], self._seen[cut:])
            )
            first = self._draft_tokenizer.encode(head, special=not self._anchor)
            last = self._draft_tokenizer.encode(rest, special=False)
            if head + rest == self._tail and first + last == ids:
                self._fixed += first
                self._anchor += cut
                self._seen, self._tail = self._seen[cut:], rest
                return last
        return ids

    def back(self, ids: Ints, drafted: list[int]) -> list[int]:
        """The target's tokens of what the draft model said after `ids`."""
        before = self._draft_tokenizer.decode(ids[-LOOK:])
        whole = self._draft_tokenizer.decode([*ids[-LOOK:], *drafted]).rstrip(UNSURE)
        if not whole.startswith(before) or UNSURE in whole[len(before) :]:
            return []
        text = whole[len(before) :]
        plain = [t for t in self._seen.tolist() if t not in self._target_tokenizer.special]
        joined = self._target_tokenizer.encode(self._tail + text, special=False)
        if joined[: len(plain)] == plain:
            return joined[len(plain) :]
        return self._target_tokenizer.encode(
            text, special=False
        )  # it would have joined what is committed
