"""One conversation per row: a cache, how many tokens each row holds, and calls that add to them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np

from accel.ir.depth import Depth
from accel.ir.errors import InputError
from accel.ir.prefill import Prefill, Segments
from accel.runtime.blocks import keeper as keeper_of
from accel.runtime.depth import Plans
from accel.runtime.encode import Encoder, entry_inputs
from accel.runtime.given import call_tokens, check_no_plan, rewind_target
from accel.runtime.held import Held
from accel.runtime.ints import Ints
from accel.runtime.keeper import KvPlan
from accel.runtime.pages import Pages
from accel.runtime.prefill import Pruner, filtered, in_segments
from accel.runtime.stepper import Logits, Stepper, at_least

CHUNK = 512  # most tokens of one graph call, so that attention scores [.., T, C] stay bounded
STEP = 256  # the KV buffers grow by this many slots


class Session(Held):
    """A cache of B rows. `run` appends tokens, `rewind` forgets them, `fork` copies the whole.

    Rewinding is free where all state is a KV cache (`free_rewind`); recurrent state goes back to a
    copy taken on the way, and the next `run` first runs the tokens between again.
    A session of an encoder-decoder model begins with `encode`.

    One thread at a time may use a session; different sessions of one model may run in different
    threads.
    """

    def __init__(
        self,
        stepper: Stepper,
        batch: int,
        *,
        vocab_size: int,
        max_context: int,
        encoder: Encoder | None = None,
        depth: Depth | None = None,
        least: int = 1,
        kv: KvPlan | None = None,
        prefill: tuple[Prefill, Callable[[], Stepper]] | None = None,
        pages: Pages | None = None,
    ):
        """`least`: tokens of a graph call at least, and logits; padding is added to fewer. `kv`: how the cache is
        compressed. `prefill`: what is done to prompts, and where an empty cache comes from. `pages`: shared blocks.
        """
        super().__init__(stepper, batch, None if kv is None else keeper_of(kv, batch), pages)
        self._least = least
        self.vocab_size = vocab_size
        self.max_context = max_context
        self._encoder = encoder
        self._encoded = encoder is None
        self._prefill = prefill
        self._pruner = Pruner(prefill[0].stages, batch) if prefill and prefill[0].stages else None
        self._plans = None if depth is None else Plans(depth, batch)

    def encode(self, inputs: Any, lengths: Any = None) -> None:
        """Give the encoder its input, once for all steps: token ids [B,X] or features [B, ...].

        `lengths` [B], each 1..X: how many of a row's token ids are real; the rest, on the right, is
        padding. Tokens that the session held are forgotten. Raises InputError.
        """
        stepper = self._open()
        given = entry_inputs(inputs, lengths, self.batch, self._encoder)
        start = time.perf_counter()
        stepper.encode(given)
        self._seconds += time.perf_counter() - start
        self._calls += 1
        self._encoded = True
        self.rewind(0)

    def run(
        self,
        tokens: Any,
        lengths: Any = None,
        *,
        last_only: bool = False,
        run_layers: Any = None,
        threshold: float | None = None,
    ) -> Logits:
        """Append tokens [B,T] and return the logits after each, float32 [B,T,V].

        `lengths` [B], each 0..T: how many of a row's tokens are real; the rest, on the right, is
        padding, may hold anything, leaves no trace, and has logits 0. `last_only` gives [B,1,V]:
        the logits of each row's last real token, the others not computed. Long calls are cut into
        graph calls of at most CHUNK tokens. Raises InputError; a call that fails leaves the session
        as it was, or closes it where that cannot be: tokens of the call were compressed or counted.

        Of a model built with a depth method: `run_layers` [L] bools say which layers run (default:
        all for a prompt, the recipe's for single tokens after it), and `threshold` from which
        confidence on an exit is taken (default: none in a prompt, then the recipe's).
        """
        self._open()
        if not self._encoded:
            raise InputError("this model has an encoder: call session.encode(inputs) before run")
        return self._run(tokens, lengths, last_only, run_layers, threshold)

    def _run(
        self,
        tokens: Any,
        lengths: Any,
        last_only: bool,
        run_layers: Any = None,
        threshold: float | None = None,
        segments: Segments | None = None,
    ) -> Logits:
        """See `run`; `segments`: of a prompt that is run so."""
        stepper = self._open()
        ids, counts = call_tokens(tokens, lengths, self._lengths, self.vocab_size, self.max_context)
        after = self._lengths + (ids.shape[1] if counts is None else counts)
        if self._plans is None:
            check_no_plan(run_layers, threshold)
        else:
            self._plans.tell(stepper.control, run_layers, threshold, self._lengths, after)
        before, held = self._keeper and self._keeper.copy(), self._lengths
        try:
            self._catch_up(stepper)
            if last_only and self._pages is not None:
                ids, counts, found = self._pages.admit(stepper, ids, counts, held)
                self._lengths, self._room = held + found, [] if found.any() else self._room
            if counts is None and ids.shape[1] <= CHUNK and segments is None:
                logits = self._whole(stepper, ids, last_only)
            else:
                full = np.full(self.batch, ids.shape[1], np.int64) if counts is None else counts
                if segments is None or int(full.max()) <= segments.threshold:
                    logits = self._chunks(stepper, ids, full, self._lengths, last_only)
                else:
                    calls = partial(self._step, stepper), partial(self._sparse, stepper)
                    logits = in_segments(segments, ids, full, *calls)
            self._compress("call", after)
        except BaseException as error:
            self._undo(before, error)
            if self._pages is not None and self._pages.cut(stepper, held):
                self._room = []
            self._lengths = held
            raise
        if self._plans is not None:
            self._plans.ran(held, after)
        self._lengths = after
        return logits

    def prompt(self, tokens: Any, lengths: Any = None) -> Logits:
        """Append whole prompts [B,T], `lengths` [B] of them real, and return float32 [B,1,V]: the logits
        after each row's last token. What the recipe does to prompts is done, and `end_prompt`.

        Tokens are taken from the prompts of an empty session only; later ones are seen whole. Where a
        recipe filters them, what is left, at positions from 0 on, is what the session holds (`lengths`),
        counts towards max_context and can be rewound. Where deeper layers drop some, the session holds
        them all, and goes back to the prompt's end or to 0. Raises InputError, as `run`.
        """
        stepper = self._open()
        if self._prefill is not None and not self._lengths.any():
            ids, real = call_tokens(tokens, lengths, self._lengths, self.vocab_size, self.max_context)
            counts = np.full(self.batch, ids.shape[1], np.int64) if real is None else real
            (plan, spare), start = self._prefill, time.perf_counter()
            if self._pruner is not None and self._pruner.prunes(counts):
                self._need(stepper, self._pruner.room(counts))
                logits, calls = self._pruner.prompt(stepper, ids, counts, CHUNK)
                self._count(calls, int(counts.sum()), start)
                self._lengths = counts.copy()
                return logits
            if plan.filter is not None and int(counts.max()) > plan.filter.tokens:
                with closing(spare()) as other:
                    tokens, lengths, calls = filtered(plan.filter, other, ids, counts, CHUNK)
                self._count(calls, 0, start)
        first = self._prefill is not None and not self._lengths.any()
        segments = self._prefill[0].segments if self._prefill and first else None
        logits = self._run(tokens, lengths, True, segments=segments)
        self.end_prompt()
        return logits

    def end_prompt(self) -> None:
        """Say that a prompt is whole: what the recipe does then, as dropping tokens, is done now.

        Where that fails the session stays as it was.
        """
        stepper = self._open()
        if self._keeper is not None:
            self._catch_up(stepper)
            self._compress("prompt", self._lengths)
            self._keeper.end_prompt()
        if self._pages is not None and self._pages.file(stepper, self._lengths):
            self._room = []

    @property
    def held_from(self) -> Ints:
        """The position of each row [B] up to which it can be rewound; 0 where nothing was dropped."""
        if self._pruner is not None:
            return self._pruner.ends.copy()
        return np.zeros_like(self._lengths) if self._keeper is None else self._keeper.base.copy()

    def edit(self, start: int, stop: int, tokens: Any, row: int = 0) -> Logits:
        """See `accel.runtime.edits.EditableSession`, which a model built with `pie` opens. Raises InputError."""
        raise InputError("this model cannot edit what it holds; build it with kv.reuse = pie (recipe 'pie')")

    def rewind(self, length: Any) -> None:
        """Forget every token from `length` on: an int, or one per row [B]. Forward is an
        InputError.
        """
        self._open()
        wanted = rewind_target(length, self._lengths)
        if self._keeper is not None:
            anew = self._keeper.anew(wanted, self._lengths)
            self._open().forget(anew)
            self._keeper.forget(anew)
            self._keeper.rewound(wanted)
        if self._pruner is not None:
            self._pruner.rewind(wanted)
        if self._pages is not None and self._pages.cut(self._open(), wanted):
            self._room = []
        self._lengths = wanted
        if self._plans is not None:
            self._plans.forget(wanted)

    @property
    def free_rewind(self) -> bool:
        """Whether rewinding costs nothing; else the next call may run some tokens again."""
        return self._past is None

    @property
    def length(self) -> int | list[int]:
        """Tokens held: an int where all rows agree, else one per row."""
        held: list[int] = self._lengths.tolist()
        return held[0] if len(set(held)) == 1 else held

    @property
    def lengths(self) -> Ints:
        """Tokens held by each row, [B]; a copy."""
        return self._lengths.copy()

    @property
    def stats(self) -> dict[str, float]:
        """calls: graph calls; tokens: real ones run; reused: those that others had run; seconds in the
        graph; kv_bytes: state buffers now, without blocks that sessions share.
        """
        return {
            "calls": self._calls,
            "tokens": self._tokens,
            "reused": 0 if self._pages is None else self._pages.reused,
            "seconds": self._seconds,
            "kv_bytes": self._stepper.kv_bytes if self._stepper else 0,
        }

    def fork(self) -> Session:
        """An independent session that holds the same tokens; its stats start at 0."""
        other = type(self)(
            self._open().copy(),
            self.batch,
            vocab_size=self.vocab_size,
            max_context=self.max_context,
            encoder=self._encoder,
            depth=None if self._plans is None else self._plans.depth,
            least=self._least,
            prefill=self._prefill,
            pages=self._pages and self._pages.copy(),
        )
        other._keeper = self._keeper and self._keeper.copy()
        other._encoded = self._encoded
        other._room = list(self._room)
        other._pruner = self._pruner and self._pruner.copy()
        other._lengths = self._lengths.copy()
        other._past = self._past and self._past.copy()
        other._plans = self._plans and self._plans.copy()
        return other

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _whole(self, stepper: Stepper, ids: Ints, last_only: bool) -> Logits:
        """One graph call without padding."""
        width = ids.shape[1]
        if width == 1:  # a token: little else should be done besides the graph
            first = np.zeros((self.batch, 1), np.int64)
            return self._step(stepper, ids, self._lengths[:, None], self._lengths - self._base, first, ids.size)
        positions = self._lengths[:, None] + np.arange(width)
        rows = np.arange(width - 1 if last_only else 0, width)
        rows = np.broadcast_to(rows, (self.batch, rows.size))
        return self._step(stepper, ids, positions, self._lengths - self._base, rows, ids.size)

    def _catch_up(self, stepper: Stepper) -> None:
        """Run again what recurrent state lacks after a rewind. Those tokens were looked at before, and
        the cache holds them uncompressed.
        """
        if self._past is not None and (again := self._past.catch_up(stepper, self._lengths)):
            keeper, self._keeper = self._keeper, None
            ids, counts, first = again
            base = 0 if keeper is None else keeper.base
            try:
                self._chunks(stepper, ids, counts, first, True, base)
            finally:
                self._keeper = keeper

    def _chunks(
        self, stepper: Stepper, ids: Ints, counts: Ints, first: Ints, last_only: bool, base: Any = None
    ) -> Logits:
        """Graph calls of at most CHUNK columns, from position `first` [B] on; a row's padding gets
        position -1 and writes no KV that is seen. `base`: the position of slot 0, by default what is known.
        """
        shape = (self.batch, 1 if last_only else ids.shape[1], self.vocab_size)
        out = np.zeros(shape, np.float32)
        for start in range(0, int(counts.max()), CHUNK):
            part = ids[:, start : min(start + CHUNK, int(counts.max()))]
            columns = np.arange(part.shape[1])
            left = counts - start
            held = first + np.minimum(counts, start)
            if start and self._keeper is not None:
                self._compress("part", held)
            slots = held - (self._base if base is None else base)
            real = columns < left[:, None]
            positions = np.where(real, held[:, None] + columns, -1)
            ends = (left > 0) & (left <= part.shape[1])  # rows whose last token is in this chunk
            rows = np.where(ends, left - 1, 0)[:, None] if last_only else np.broadcast_to(columns, part.shape)
            logits = self._step(stepper, part, positions, slots, rows, int(real.sum()))
            if last_only:
                out[ends] = logits[ends]
            else:
                np.copyto(out[:, start : start + part.shape[1]], logits, where=real[:, :, None])
        return out

    def _step(
        self, stepper: Stepper, tokens: Ints, positions: Ints, slots: Ints, rows: Ints, real: int
    ) -> Logits:
        """One graph call, after making room for every slot that it writes, padding included."""
        wanted = rows.shape[1]
        if self._least > 1:
            tokens, positions, rows = at_least(self._least, tokens, positions, rows)
        ends = slots + tokens.shape[1]
        self._need(stepper, [int(ends.max()), *(self._pruner.slots(ends) if self._pruner else ())])
        start = time.perf_counter()
        if self._past is not None:
            self._past.before(stepper, tokens.shape[1])
        observe = self._keeper is not None and self._keeper.observes(tokens.shape[1])
        logits = stepper.step(tokens, positions, slots, rows, observe)
        if observe and self._keeper is not None:
            self._keeper.observe(stepper.observed, positions)
        if self._past is not None:
            self._past.after(tokens, positions)
        if self._pages is not None:
            self._pages.log.note(tokens, positions)
        self._count(1, real, start)
        return logits if wanted == rows.shape[1] else logits[:, :wanted]

    def _need(self, stepper: Stepper, slots: list[int]) -> None:
        """Make room for so many slots, and in layers that see prompts pruned."""
        if not self._room or any(n > have for n, have in zip(slots, self._room, strict=True)):
            had = self._room or [0] * len(slots)
            room = [max(have, -(-n // STEP) * STEP) for n, have in zip(slots, had, strict=True)]
            stepper.resize(*room)
            self._room = room

    def _sparse(
        self, stepper: Stepper, tokens: Ints, positions: Ints, slots: Ints, real: int
    ) -> None:
        """A segment of a prompt that reads some of the keys before it."""
        self._need(stepper, [int(slots.max()) + tokens.shape[1]])
        start = time.perf_counter()
        rows = np.zeros((self.batch, 1), np.int64)
        given = {"tokens": tokens, "positions": positions, "slots": slots, "rows": rows}
        queries = stepper.part("sparse", given)
        if self._keeper is not None and queries:
            self._keeper.observe(queries, positions)
        self._count(1, real, start)
