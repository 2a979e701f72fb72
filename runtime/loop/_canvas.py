"""What the loops that fill masks share: canvases of prompt and masks, and what calls say of the masks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cached_property
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.ir.errors import AccelError, InputError
from accel.ir.picks import CHOSEN, NONE
from accel.runtime.canvas import Base, Mask, Part, Sheet
from accel.runtime.decode.row import Row
from accel.runtime.inputs.ints import Ints
from accel.runtime.session.modes.canvas import CanvasState
from accel.runtime.session.session import Session

Floats = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, eq=False)
class Guess:
    """What a call says of the open slots of one row.

    Attributes: `slots` [n], rising; `tokens` [n], what each would hold; `logits` [n,V], the model's, -inf of the mask.
    Of all that the model gives, whatever the sampler does: `sure` [n], the token's probability; `lead` [n], by how much
    the best logit is above the second; `entropy` [n], in nats.
    """

    slots: Ints
    tokens: Ints
    logits: Floats
    sure: Floats
    lead: Floats
    entropy: Floats

    @classmethod
    def of(cls, slots: Ints, tokens: Ints, logits: Floats) -> Guess:
        """All that logits say."""
        best = np.partition(logits, -2, axis=1)[:, -2:]
        behind = logits - best[:, 1:]  # by how much each logit is below the best
        parts = np.exp(behind)
        mass = parts.sum(axis=1, dtype=np.float64)
        sure = np.exp(behind[np.arange(len(slots)), tokens]) / mass
        parts *= np.where(parts > 0, behind, 0)
        entropy = np.log(mass) - parts.sum(axis=1, dtype=np.float64) / mass
        return cls(slots, tokens, logits, sure, best[:, 1] - best[:, 0], entropy)

    def __len__(self) -> int:
        return self.slots.size

    @cached_property
    def probabilities(self) -> Floats:
        """The model's probabilities [n,V], in double precision."""
        weights = np.exp(self.logits.astype(np.float64) - self.logits.max(axis=1, keepdims=True))
        found: Floats = weights / weights.sum(axis=1, keepdims=True)
        return found

    def before(self, end: int) -> Guess:
        """Of the slots before `end` alone."""
        n = int(self.slots.searchsorted(end))
        return Guess(*(getattr(self, field.name)[:n] for field in fields(self)))

    def first(self, count: int) -> Ints:
        """The places, in `slots`, of the `count` surest; the lowest slot of equals."""
        return np.argsort(-self.sure, kind="stable")[:count]


@dataclass(frozen=True)
class Place:
    """Where a row is before a call says something of it.

    Attributes: `step`: calls of its block before; `total`: masks that the block had then; `open` [n]: which of the
    block's slots are masks, the first of them being slot `first`; `before`: slots of the answer before the block;
    `answer`: of all of it; `memory`: what the loop's `begin` gave for the row; `rng`: the row's own.
    """

    step: int
    total: int
    open: Mask
    first: int
    before: int
    answer: int
    memory: Any
    rng: np.random.Generator


class Canvas:
    """One group of rows: each is its prompt and as many masks as it may take tokens, and goes from block to block.

    `method`: which slots calls compute. `branches`: rows that the session then has for each, which may hold different
    tokens of the block. `memory`: what the loop keeps of each row.
    """

    def __init__(
        self,
        session: Session,
        rows: list[Row],
        block: int,
        method: Base,
        branches: int = 1,
        memory: Sequence[Any] = (),
    ):
        canvas = session.observer(CanvasState)
        if canvas is None or canvas.diffusion is None or canvas.mask is None:
            raise InputError(
                "this loop needs a masked-diffusion model, but the model decodes token by token; "
                "build it with loop = autoregressive"
            )
        self.session, self.rows, self._block, self._method = session, rows, block, method
        self._mask, self._shift = canvas.mask, int(canvas.diffusion.shift)
        self._never = np.array([self._mask])  # tokens that no slot gets
        self.branches, self._memory = branches, memory
        if branches > 1:
            session.select(np.repeat(np.arange(len(rows)), branches))
        self.ends = np.array([0 if row.finish else row.prompt.size + row.left for row in rows])
        self.first = np.array([row.prompt.size for row in rows])
        self.last = self.first.copy()
        self.ids = np.full((len(rows), branches, int(self.ends.max())), self._mask)
        self.open = np.zeros(self.ids.shape[::2], np.bool_)  # which slots are masks, [B,W]
        for row, ids, hidden, end in zip(rows, self.ids, self.open, self.ends, strict=True):
            row.began = perf_counter()  # a prompt runs with its masks, in every call
            ids[:, : row.prompt.size] = row.prompt[: ids.shape[1]]
            hidden[row.prompt.size : end] = True
        self._step = 0  # calls of this block
        self._age = np.zeros(self.open.shape, np.int64)
        self._calls = np.zeros(len(rows), np.int64)

    def advance(self) -> bool:
        """Go to the next block; whether any row has one."""
        self.first, self._step = self.last, 0
        self.last = np.minimum(self.first + self._block, self.ends)
        return bool(self.live.any())

    @property
    def sight(self) -> Ints:
        """Up to which slot, excluded, calls of each row see, [B]: masks behind it are in no call."""
        return self.ends

    @property
    def live(self) -> Mask:
        """Rows that run, [B]."""
        return np.array([not row.finish for row in self.rows])

    @property
    def waiting(self) -> Mask:
        """Rows that run and whose block has masks, [B]."""
        return self.live & (self.counts > 0)

    @property
    def counts(self) -> Ints:
        """Masks of each row's block, [B]."""
        spans = zip(self.open, self.first, self.last, strict=True)
        return np.array([int(row[first:last].sum()) for row, first, last in spans])

    def place(self, i: int, step: int, total: int) -> Place:
        """Where a row is, of whose block so many masks were there `step` calls before."""
        row, first, last = self.rows[i], int(self.first[i]), int(self.last[i])
        start, end = row.prompt.size, int(self.ends[i])
        hidden = self.open[i, first:last].copy()
        return Place(
            step, total, hidden, first, first - start, end - start, self._memory[i], row.rng
        )

    def look(self, rest: bool = False) -> dict[int, Guess]:
        """One call; what it says of the masks in the block of each row that waits for some (`rest`: and of those
        behind it) and that it computes.
        """
        found = self.branch_out(self.waiting.astype(np.int64), self.open[:, None], rest)
        return {i: guesses[0] for i, guesses in found.items()}

    def branch_out(self, counts: Ints, hidden: Mask, rest: bool = False) -> dict[int, list[Guess]]:
        """One call of the first `counts` [B] branches of each row; what it says of the slots that are `hidden`
        [B,branches,W] in each, and which tokens a branch holds, its `ids` say. It computes the slots that the method
        names; logits of a slot may be those of the slot before it.
        """
        fed, asked, parts = {}, {}, {}
        for i in np.flatnonzero(counts).tolist():
            end = int(self.sight[i])
            sheet = self._sheet(i)
            missing = sheet.at >= end - sheet.new
            fed[i] = self._method.feeds(sheet) | missing
            if (some := self._method.part(sheet)) is not None:
                parts[i] = Part((some.slots | missing) & fed[i], some.more)
            slots = sheet.at[self.first[i] : end if rest else self.last[i]]
            slots = slots[hidden[i, : counts[i], slots].any(axis=1)]
            slots = slots[fed[i][np.maximum(slots - self._shift, 0)]]
            seen = self._method.says(sheet)
            asked[i] = slots if seen is None else slots[seen[slots]]
            if not (asked[i] < self.last[i]).any():
                raise AccelError(
                    f"{self._method.full_name} computes no mask of the block that row {i} is at (call {self._step} of "
                    "it); let feeds name one or more (Sheet.asked)"
                )
        logits = self._called(counts, fed, asked, parts)
        self._step += 1
        for i in fed:
            self._calls[i] += 1
            self._age[i] = np.where(self.open[i], 0, self._age[i] + 1)
        found: dict[int, list[Guess]] = {}
        for i, slots in asked.items():
            part = logits[i * self.branches :, : slots.size]
            found[i] = [
                self._guess(i, self.ids[i, j], hidden[i, j], slots, part[j])
                for j in range(counts[i])
            ]
        return found

    def _sheet(self, i: int) -> Sheet:
        """A row as the method sees it."""
        end = int(self.sight[i])
        place = self._step, int(self.first[i]), int(self.last[i])
        new = max(0, end - int(self.session.lengths[i * self.branches]))
        row = self.rows[i].prompt.size, int(self._calls[i]), new
        return Sheet(*place, self.open[i, :end], self._age[i, :end], self._shift, *row)

    def _called(
        self,
        counts: Ints,
        fed: dict[int, Mask],
        asked: dict[int, Ints],
        parts: dict[int, Part],
    ) -> Floats:
        """Write the slots that are `fed` [W] of the first `counts` branches of each row, or of all branches where later
        calls of these may read them; logits [B,N,V] of the slots that are `asked` [N]. `parts`: what layers compute,
        of rows whose layers do not compute all that is fed.
        """
        later = self.branches > 1 and self._method.reads and not self._step
        sizes = np.zeros((len(self.rows), self.branches), np.int64)
        places = np.zeros((*sizes.shape, max(int(one.sum()) for one in fed.values())), np.int64)
        columns = np.zeros((*sizes.shape, max(one.size for one in asked.values())), np.int64)
        for i, one in fed.items():
            slots = np.flatnonzero(one)
            sizes[i, : None if later else counts[i]] = slots.size
            places[i, :, : slots.size] = slots
            columns[i, :, : asked[i].size] = slots.searchsorted(
                np.maximum(asked[i] - self._shift, 0)
            )
        tokens = np.take_along_axis(self.ids, places, 2)
        ids, at, rows = (part.reshape(-1, part.shape[2]) for part in (tokens, places, columns))
        picks = self._picks(fed, parts) if parts else None
        return self.session.write(ids, at, sizes.reshape(-1), rows, picks)

    def _picks(self, fed: dict[int, Mask], parts: dict[int, Part]) -> Ints:
        """What the layers of a call compute (`Session.write`), [B,K]."""
        found = [np.zeros(0, np.int64)] * len(self.rows) * self.branches
        for i, one in fed.items():
            part = parts.get(i, Part(one))
            columns = np.flatnonzero(part.slots[one])
            more = min(part.more, int(one.sum()) - columns.size)
            found[i * self.branches] = np.concatenate([np.full(more, CHOSEN), columns])
        picks = np.full((len(found), max(1, *(own.size for own in found))), NONE)
        for row, own in zip(picks, found, strict=True):
            row[: own.size] = own
        return picks

    def _guess(self, i: int, ids: Ints, hidden: Mask, slots: Ints, logits: Floats) -> Guess:
        """What logits [n,V] of slots [n] say of those that are `hidden` [W] of a row that holds `ids` [W]. No guess is
        the mask, and samplers see the tokens up to the block's first slot that is hidden.
        """
        first = int(self.first[i])
        slots, scores = slots[hidden[slots]], logits[hidden[slots]]
        scores[:, self._never] = -np.inf
        tokens = self.rows[i].sampler.choices(scores)
        if tokens is None:
            tokens = self._drawn(i, scores, ids[: first + int(hidden[first:].argmax())])
        return Guess.of(slots, tokens, scores)

    def _drawn(self, i: int, scores: Floats, seen: Ints) -> Ints:
        """The tokens [n] that a row's sampler draws from logits [n,V]; it sees the tokens `seen`."""
        row = self.rows[i]
        return np.array([row.sampler(one, seen, row.rng) for one in scores], np.int64)

    def commit(self, i: int, guess: Guess, places: Any) -> None:
        """Let these of a guess's slots (by their place in it) hold its tokens for good."""
        slots = guess.slots[places]
        self.ids[i][:, slots] = guess.tokens[places]
        self.open[i, slots] = False

    def cut(self, i: int, end: int) -> None:
        """Let a row have no slots from `end` on."""
        self.open[i, end:] = False
        self.ends[i], self.last[i] = end, min(int(self.last[i]), end)
        held = self.session.lengths
        first = i * self.branches
        held[first : first + self.branches] = np.minimum(held[first : first + self.branches], end)
        self.session.rewind(held)

    def clear(self, i: int) -> None:
        """Let no branch of a row hold more than the row."""
        self.ids[i][:, self.open[i]] = self._mask

    def take(self) -> Iterator[tuple[int, int]]:
        """Let rows accept what is whole up to the first mask: (row, token) of each, until a row ends."""
        for i in np.flatnonzero(self.live):
            row = self.rows[i]
            while not row.finish and not self.open[i, at := row.prompt.size + len(row.tokens)]:
                row.accept(int(self.ids[i, 0, at]), None)
                yield int(i), row.tokens[-1]

    def close(self) -> None:
        """Let the session hold what the rows have, but for the last token."""
        wanted = np.array([row.prompt.size + max(0, len(row.tokens) - 1) for row in self.rows])
        with suppress(InputError):  # of a session that a failed call closed
            self.session.select(np.arange(len(self.rows)) * self.branches)
            self.session.rewind(np.minimum(wanted, self.session.lengths))
