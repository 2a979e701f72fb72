"""One conversation per row: a cache, how many tokens each row holds, and calls that add to them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np

from accel.ir.depth import Depth
from accel.ir.errors import InputError
from accel.ir.facts import EncoderFacts
from accel.ir.prefill import Prefill, Segments
from accel.runtime.backends.protocol import Bools, Logits, Stepper
from accel.runtime.inputs.encoder_inputs import entry_inputs
from accel.runtime.inputs.ints import Ints
from accel.runtime.session.core import Held
from accel.runtime.session.observers.all import companions
from accel.runtime.session.observers.eviction import KvPlan
from accel.runtime.session.observers.prefix_cache import Pages
from accel.runtime.session.observers.pruning import filtered, in_segments
from accel.runtime.session.rows import Kin, wanted_rows
from accel.runtime.session.validate import (
    call_tokens,
    check_no_plan,
    columns_of,
    path_of,
    rewind_target,
    tree_of,
)

CHUNK = 512  # most tokens of one graph call, so that attention scores [.., T, C] stay bounded


@dataclass(frozen=True, eq=False)
class _Guessed:
    """Guesses that may be kept: tokens [B,T], what each sees of them, and how many of a row are real [B]."""

    tokens: Ints
    tree: Bools
    counts: Ints


class Session(Held):
    """A cache of B rows. `run` appends tokens, `rewind` forgets them, `fork` copies the whole.

    What a recipe makes of the cache, observers of the session know (`runtime/session/observers`), and `capabilities`
    says what follows for a caller: whether rewinding is free, how far back it goes, how wide a call may be.
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
        encoder: EncoderFacts | None = None,
        depth: Depth | None = None,
        tile: int = 1,
        kv: KvPlan | None = None,
        prefill: tuple[Prefill, Callable[[int], Stepper]] | None = None,
        pages: Pages | None = None,
    ):
        """`tile`: a graph call has a multiple of so many tokens, and of logits; padding is added. `kv`: how the cache
        is compressed. `prefill`: what is done to prompts, and where an empty cache of so many rows comes from. `pages`:
        shared blocks.
        """
        plan = None if prefill is None else prefill[0]
        super().__init__(stepper, batch, companions(stepper, batch, depth, kv, plan, pages), tile)
        self.vocab_size = vocab_size
        self.max_context = max_context
        self._encoder = encoder
        self._encoded = encoder is None
        self._prefill = prefill
        self._guessed: _Guessed | None = None
        self._steered = any(one.steers for one in self._companions)

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
        self._drop()
        ids, counts = call_tokens(tokens, lengths, self._lengths, self.vocab_size, self.max_context)
        after = self._lengths + (ids.shape[1] if counts is None else counts)
        if not self._steered:
            check_no_plan(run_layers, threshold)
        held = self._lengths
        for one in self._companions:
            one.begin(stepper, held, after, run_layers, threshold)
        try:
            self._catch_up(stepper)
            if last_only:
                for one in self._companions:
                    if (left := one.admit(stepper, ids, counts, held)) is not None:
                        ids, counts, found = left
                        self._lengths, self._room = held + found, []
            if counts is None and ids.shape[1] <= CHUNK and segments is None:
                logits = self._whole(stepper, ids, last_only)
            else:
                full = np.full(self.batch, ids.shape[1], np.int64) if counts is None else counts
                if segments is None or int(full.max()) <= segments.threshold:
                    logits = self._chunks(stepper, ids, full, self._lengths, last_only)
                else:
                    calls = partial(self._step, stepper), partial(self._sparse, stepper)
                    logits = in_segments(segments, ids, full, *calls)
            self._settle(stepper, "call", after)
        except BaseException as error:
            self._undo(stepper, held, error)
            raise
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
        self._drop()
        first = None if self._lengths.any() else self._prefill
        if first is not None:
            plan, spare = first
            ids, real = call_tokens(
                tokens, lengths, self._lengths, self.vocab_size, self.max_context
            )
            counts = np.full(self.batch, ids.shape[1], np.int64) if real is None else real
            start = time.perf_counter()
            for one in self._companions:
                if (found := one.prompt(stepper, ids, counts, CHUNK, self._need)) is not None:
                    self._count(found[1], int(counts.sum()), start)
                    self._lengths = counts.copy()
                    return found[0]
            if plan.filter is not None and int(counts.max()) > plan.filter.tokens:
                with closing(spare(self.batch)) as other:
                    tokens, lengths, calls = filtered(plan.filter, other, ids, counts, CHUNK)
                self._count(calls, 0, start)
        logits = self._run(
            tokens, lengths, True, segments=None if first is None else first[0].segments
        )
        self.end_prompt()
        return logits

    def end_prompt(self) -> None:
        """Say that a prompt is whole: what the recipe does then, as dropping tokens, is done now.

        Where that fails the session stays as it was.
        """
        stepper = self._open()
        self._drop()
        if any(
            one.base is not None for one in self._companions
        ):  # what is compressed cannot be run again later
            self._catch_up(stepper)
        self._settle(stepper, "prompt", self._lengths)

    def guess(self, tokens: Any, tree: Any, lengths: Any = None, columns: Any = None) -> Logits:
        """Run a tree of guesses, tokens [B,T] behind what each row holds, and return the logits after each, float32
        [B,T,V]. `tree` [B,T,T] bools: which tokens of the call each one sees, itself and its ancestors. `columns`
        [B,N]: after which of them logits are wanted, [B,N,V]; others are not computed.

        Nothing of it is held until `keep` says which path stands; any other call drops it. `lengths` as in `run`.
        One graph call, so T is at most `CHUNK` and `capabilities.width`. Raises InputError, and where the model was
        built without trees (`capabilities.trees`).
        """
        stepper = self._open()
        if not self.capabilities.trees:
            raise InputError(
                "this model takes no trees of guesses; build it with a recipe that drafts them (as token-recycling)"
            )
        self._drop()
        ids, counts = call_tokens(tokens, lengths, self._lengths, self.vocab_size, self.max_context)
        seen, rows, held = tree_of(tree, ids.shape), columns_of(columns, ids.shape), self._lengths
        if ids.shape[1] > CHUNK:
            raise InputError(f"a tree of {ids.shape[1]} tokens is too large; give at most {CHUNK}")
        full = np.full(self.batch, ids.shape[1], np.int64) if counts is None else counts
        real = np.arange(ids.shape[1]) < full[:, None]
        positions = np.where(real, held[:, None] + seen.sum(2) - 1, -1)
        for one in self._companions:
            one.begin(stepper, held, held + full, None, None)
        try:
            self._catch_up(stepper)
            self._guessed = _Guessed(ids, seen, full)
            return self._step(
                stepper, ids, positions, held - self._base, rows, int(full.sum()), seen
            )
        except BaseException as error:
            self._undo(stepper, held, error)
            raise

    def keep(self, paths: Any) -> None:
        """Hold of the last `guess`, for each row, the tokens in these columns [n]: a path from the root on, or none.

        Raises InputError, and then nothing has changed.
        """
        stepper, made = self._open(), self._guessed
        if made is None:
            raise InputError("there are no guesses to keep; call session.guess first")
        if len(paths) != self.batch:
            raise InputError(f"there are {len(paths)} paths; give one for each row, {self.batch}")
        chosen = [path_of(p, made.tree, b, int(made.counts[b])) for b, p in enumerate(paths)]
        width, held = made.tokens.shape[1], self._lengths
        path = np.tile(np.arange(width), (self.batch, 1))
        positions = np.full((self.batch, width), -1, np.int64)
        tokens = np.zeros((self.batch, max(1, *(c.size for c in chosen))), np.int64)
        for b, columns in enumerate(chosen):
            path[b, : columns.size] = columns
            positions[b, : columns.size] = held[b] + np.arange(columns.size)
            tokens[b, : columns.size] = made.tokens[b, columns]
        start = time.perf_counter()
        stepper.part("commit", {"slots": held - self._base, "path": path, "positions": positions})
        self._count(0, 0, start)
        self._guessed = None
        for one in self._companions:
            one.after(tokens, positions[:, : tokens.shape[1]], {})
        self._lengths = held + np.array([c.size for c in chosen], np.int64)
        self._settle(stepper, "call", self._lengths)

    def _drop(self) -> None:
        """Forget guesses of which nothing was kept."""
        if self._guessed is not None:
            self.keep([()] * self.batch)

    def edit(self, start: int, stop: int, tokens: Any, row: int = 0) -> Logits:
        """See `session.edits.EditableSession`, which a model built with `pie` opens. Raises InputError."""
        raise InputError(
            "this model cannot edit what it holds; build it with kv.reuse = pie (recipe 'pie')"
        )

    def rewind(self, length: Any) -> None:
        """Forget every token from `length` on: an int, or one per row [B]. Forward is an
        InputError.
        """
        stepper = self._open()
        self._drop()
        wanted = rewind_target(length, self._lengths)
        for one in self._companions:
            one.check(wanted, self._lengths)
        for one in self._companions:
            if one.rewind(stepper, wanted, self._lengths):
                self._room = []
        self._lengths, self._kin = wanted, self._kin.rewound(wanted)

    def select(self, rows: Any) -> None:
        """Let row i go on as what row rows[i] was: `rows` [n], any number of them, each any row or several times
        the same. Of what rows that began as copies of one still share, nothing is copied. Raises InputError.
        """
        stepper = self._open()
        self._drop()
        chosen = wanted_rows(rows, self.batch)
        if np.array_equal(chosen, np.arange(self.batch)):
            return
        self._drop()
        if chosen.size != self.batch:
            self._kv_most = self.kv_most
            slots, self._stepper = None, stepper.copy(chosen)
            stepper.close()
        else:
            slots = self._kin.slots(chosen, self._lengths, self._base)
            stepper.move(chosen, slots)
        for one in self._companions:
            one.select(chosen)
        self.batch, self._lengths = chosen.size, self._lengths[chosen]
        if slots is None:
            self._kin = Kin.copies(chosen, self._lengths)

    @property
    def length(self) -> int | list[int]:
        """Tokens held: an int where all rows agree, else one per row."""
        held: list[int] = self._lengths.tolist()
        return held[0] if len(set(held)) == 1 else held

    @property
    def lengths(self) -> Ints:
        """Tokens held by each row, [B]; a copy."""
        return self._lengths.copy()

    def fork(self) -> Self:
        """An independent session that holds the same tokens; its stats start at 0."""
        self._drop()
        other = copy(self)
        other._stepper = self._open().copy()
        other._companions = tuple(one.copy() for one in self._companions)
        other._lengths, other._room = self._lengths.copy(), list(self._room)
        other._start_figures()
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
            return self._step(
                stepper, ids, self._lengths[:, None], self._lengths - self._base, first, ids.size
            )
        positions = self._lengths[:, None] + np.arange(width)
        rows = np.arange(width - 1 if last_only else 0, width)
        rows = np.broadcast_to(rows, (self.batch, rows.size))
        return self._step(stepper, ids, positions, self._lengths - self._base, rows, ids.size)

    def _catch_up(self, stepper: Stepper) -> None:
        """Run again what a companion lacks after a rewind. The others saw those tokens, whose slots the cache
        still holds.
        """
        for one in self._companions:
            if again := one.catch_up(stepper, self._lengths):
                everyone, base = self._companions, self._base
                self._companions = (one,)
                try:
                    self._chunks(stepper, *again, True, base)
                finally:
                    self._companions = everyone

    def _chunks(
        self,
        stepper: Stepper,
        ids: Ints,
        counts: Ints,
        first: Ints,
        last_only: bool,
        base: Any = None,
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
            if start:
                self._settle(stepper, "part", held)
            slots = held - (self._base if base is None else base)
            real = columns < left[:, None]
            positions = np.where(real, held[:, None] + columns, -1)
            ends = (left > 0) & (left <= part.shape[1])  # rows whose last token is in this chunk
            rows = (
                np.where(ends, left - 1, 0)[:, None]
                if last_only
                else np.broadcast_to(columns, part.shape)
            )
            logits = self._step(stepper, part, positions, slots, rows, int(real.sum()))
            if last_only:
                out[ends] = logits[ends]
            else:
                np.copyto(out[:, start : start + part.shape[1]], logits, where=real[:, :, None])
        return out
