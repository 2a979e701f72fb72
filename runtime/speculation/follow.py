"""A draft model's session, whose rows follow those of the target."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from accel.ir.errors import InputError
from accel.ir.invariants import Method
from accel.runtime.call import Logits
from accel.runtime.decode.context import DecodeContext, Model
from accel.runtime.decode.row import Row
from accel.runtime.inputs.ints import Ints
from accel.runtime.inputs.text import same_tokens
from accel.runtime.session.observers.token_log import Log
from accel.runtime.session.session import Session
from accel.runtime.speculation.guard import steps_of

TAIL, BACK, WIDE = (
    16,
    16,
    64,
)  # to look back: tokens of a prompt that are read, new ones asked for, most of one call
WHOLE = (
    1 / 16
)  # of the plain steps that a row may still take: what reading the whole of its prompt may cost


def second(context: DecodeContext, loop: Method) -> Model:
    """The draft model of a loop that gives it the target's tokens. Raises InputError where there is none, or its tokens
    are others.
    """
    model = context.model
    if model is None or model.draft_model is None:
        raise InputError(
            f"loop.{loop.use}: this model was built without its draft model; build it again"
        )
    if not same_tokens(model.tokenizer, model.draft_model.tokenizer):
        raise InputError(
            f"loop.{loop.use}: the draft model has another tokenizer, and this loop exchanges tokens with it, not "
            "text; build with loop = speculative, or with a draft model of the same tokenizer"
        )
    return model.draft_model


def empty(model: Model, batch: int) -> Session:
    """An empty session of so many rows, more than `max_batch` where the target's are samples of one prompt."""
    session = model.session(min(batch, model.facts.max_batch))
    if session.batch < batch:
        session.select(np.arange(batch) % session.batch)
    return session


def opening(
    model: Model, context: DecodeContext, rows: Sequence[Row], most: int = 2 * TAIL
) -> float:
    """Plain steps that it takes to read these rows' prompts, of each `most` tokens at most (`Follower.opens`)."""
    if context.costs is None:
        return 0.0
    tokens = sum(min(row.prompt.size, most) for row in rows)
    return steps_of(model.costs, tokens, context.costs, len(rows))


def reads_whole(model: Model, context: DecodeContext, row: Row) -> bool:
    """Whether reading all of a row takes little beside the steps that are still to come."""
    if context.costs is None:
        return True
    each = steps_of(model.costs, model.costs.tokens[-1], context.costs, 1) / model.costs.tokens[-1]
    return row.seen.size * each < WHOLE * row.left


class Follower:
    """It holds a part of each row's committed tokens, and maybe a draft behind them that fell. Raises InputError where
    sessions of the model cannot take a draft back.

    opens: most tokens of a prompt that are read before anything is known of what drafts are worth.
    """

    opens: int = 2 * TAIL

    def __init__(self, model: Model, batch: int, trees: bool = False):
        self._session = empty(model, batch)
        self._log = Log(batch)  # what it holds
        self._sure = np.zeros(batch, np.int64)  # tokens of it that will not change
        self.cut = np.zeros(batch, np.int64)  # tokens at a row's beginning that it leaves out
        back = self._session.capabilities.back
        if back is not None and back < 1:
            self._session.close()
            raise InputError(
                "draft.model: sessions of the draft model cannot rewind (session.capabilities), but rejected "
                "drafts must be removed; build it without eviction during decoding"
            )
        if trees and not self._session.capabilities.trees:
            self._session.close()
            raise InputError(
                "draft.model: calls of the draft model take no draft trees, which this recipe's tree needs; "
                "build it with a recipe that drafts trees (such as token-recycling), or give its Hugging Face directory"
            )
        self._back = back

    @property
    def kv_bytes(self) -> int:
        """Most bytes of state that its session has held."""
        return self._session.kv_most

    @property
    def deepest(self) -> int:
        """Levels of a tree behind which it has something to say."""
        return sys.maxsize

    def most(self, size: int, limit: int) -> int:
        """Tokens that a row of `size` tokens may draft, of `limit`; the last is not run."""
        room = self._session.max_context - size + 1
        return min(limit, room if self._back is None else min(room, self._back))

    def follow(self, rows: Mapping[int, Ints], sure: Mapping[int, int] | None = None) -> Logits:
        """Let rows hold these tokens [n], n >= 1, and no others: the logits [B,1,V] after each. `sure`: of how many
        of them later calls will say the same; by default all.
        """
        rows = {i: ids[self.cut[i] :] for i, ids in rows.items()}
        keep = self._kept(rows)
        first = not keep.any()
        logits = self.run({i: ids[int(keep[i]) :] for i, ids in rows.items()}, prompt=first)
        for i, ids in rows.items():
            self._sure[i] = ids.size if sure is None else sure[i] - self.cut[i]
        return logits

    def probe(
        self, rows: Mapping[int, Ints], known: Mapping[int, int]
    ) -> dict[int, tuple[int, Logits]]:
        """Run tokens [n] of rows but for the last, n >= 2, and say of the newest that it had not yet read what it would
        have said: the number of the first, and logits [m,V] of that and those after it. A row begins with `known`
        tokens, its prompt, of which nothing is asked.
        """
        held = {i: ids[self.cut[i] : -1] for i, ids in rows.items()}
        keep, new = self._kept(held), not self._session.lengths.any()
        asked = {
            i: max(known[i], rows[i].size - BACK) - int(self.cut[i]) - 1 for i in rows
        }  # the last before
        starts = {i: int(keep[i]) for i in rows}
        if (
            max(ids.size - starts[i] for i, ids in held.items()) > WIDE
        ):  # all logits would take longer than a call
            asked = {i: max(start, starts[i]) for i, start in asked.items()}
            self.run({i: held[i][starts[i] : start] for i, start in asked.items()}, prompt=new)
            starts, new = asked, False  # the prompt has ended
        logits = self.run({i: ids[starts[i] :] for i, ids in held.items()}, last_only=False)
        if new:
            self._session.end_prompt()
        found = dict[int, tuple[int, Logits]]()
        for i, ids in held.items():
            self._sure[i], first = ids.size, max(asked[i], starts[i])
            found[i] = (
                int(self.cut[i]) + first + 1,
                logits[i, first - starts[i] : ids.size - starts[i]],
            )
        return found

    def ending(self, row: int, known: int) -> None:
        """Read a row that nothing was read of from near the end of its prompt on, which has `known` tokens."""
        if not self._session.lengths[row] and known > 2 * TAIL:
            self.cut[row] = known - TAIL

    def whole(self, row: int) -> None:
        """Read a row from its first token on the next time."""
        keep = self._session.lengths
        keep[row] = self._sure[row] = self.cut[row] = 0
        self._session.rewind(keep)

    def _kept(self, rows: Mapping[int, Ints]) -> Ints:
        """Take back what of rows is not of these tokens [n]: how many are held, fewer than n."""
        session, keep = self._session, self._session.lengths
        for i, ids in rows.items():
            start, end = min(int(self._sure[i]), ids.size - 1), min(int(keep[i]), ids.size - 1)
            differs = np.flatnonzero(self._log.ids[i, start:end] != ids[start:end])
            keep[i] = start + differs[0] if differs.size else end
        if (keep < session.lengths).any():
            session.rewind(keep)
        return keep

    def back(self, rows: Mapping[int, int]) -> None:
        """Hold so many tokens of rows at most, those that it leaves out included."""
        keep = self._session.lengths
        for i, count in rows.items():
            keep[i] = min(keep[i], count - self.cut[i])
        if (keep < self._session.lengths).any():
            self._session.rewind(keep)

    def run(self, rows: Mapping[int, Ints], prompt: bool = False, last_only: bool = True) -> Logits:
        """Append tokens [n] to rows: the logits [B,1,V] after each row's last, or after all."""
        session, held = self._session, self._session.lengths
        counts = np.zeros_like(held)
        for i, ids in rows.items():
            counts[i] = ids.size
        tokens = np.zeros((len(counts), int(counts.max())), np.int64)
        for i, ids in rows.items():
            self._log.put(i, int(held[i]), ids)
            tokens[i, : ids.size] = ids
        tokens[tokens >= session.token_ids] = 0  # ids that only the target has say nothing here
        lengths = None if (counts == tokens.shape[1]).all() else counts
        return (
            session.prompt(tokens, lengths)
            if prompt
            else session.run(tokens, lengths, last_only=last_only)
        )

    def guess(
        self, rows: Mapping[int, tuple[Ints, npt.NDArray[np.bool_]]], new: Mapping[int, int]
    ) -> Logits:
        """Run trees, tokens [n] and which of them each one sees [n,n], behind rows: the logits [B,N,V] after the last
        `new` of each. The next call drops them.
        """
        counts, wanted = np.zeros((2, self._session.batch), np.int64)
        for i, (ids, _) in rows.items():
            counts[i], wanted[i] = ids.size, new[i]
        width, most = int(counts.max()), int(wanted.max())
        columns = np.minimum((counts - wanted)[:, None] + np.arange(most), width - 1)
        tokens = np.zeros((counts.size, width), np.int64)
        tree = np.tile(np.eye(width, dtype=np.bool_), (counts.size, 1, 1))
        for i, (ids, mask) in rows.items():
            tokens[i, : ids.size], tree[i, : ids.size, : ids.size] = ids, mask
        tokens[tokens >= self._session.token_ids] = 0
        return self._session.guess(tokens, tree, counts, columns)

    @property
    def joins(self) -> bool:
        """Whether rows of another may join."""
        return self._session.capabilities.joins

    def join(self, other: Follower) -> None:
        """The rows of `other` go on behind these; its session is closed."""
        self._session.join(other._session)
        self._log = self._log.join(other._log)
        self._sure = np.concatenate([self._sure, other._sure])
        self.cut = np.concatenate([self.cut, other.cut])

    def leave(self, order: Ints) -> None:
        """Row i goes on as row order[i]; the others are dropped."""
        gone = np.setdiff1d(np.arange(self._session.batch), order)
        if not np.array_equal(self._session.leave(gone), order):
            raise AssertionError("rows of a draft and of its target leave in one order")
        self._log = self._log.select(order)
        self._sure, self.cut = self._sure[order], self.cut[order]

    def close(self) -> None:
        self._session.close()
