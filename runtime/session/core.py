"""What a session holds between its graph calls, and how it makes them."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from accel.ir.errors import AccelError, InputError
from accel.ir.taps import is_tap
from accel.runtime.backends.buffers import STEP
from accel.runtime.backends.protocol import BackendSession, whole_tiles
from accel.runtime.call import Arrays, Call, Logits, Outputs
from accel.runtime.inputs.calls import call_tokens, row_parts
from accel.runtime.inputs.distant import Distant
from accel.runtime.inputs.ints import Bools, Ints
from accel.runtime.session.extra import Extra, check_names
from accel.runtime.session.flat import flat_call, pays
from accel.runtime.session.observers import observer_classes
from accel.runtime.session.observers.observer import (
    CallWatcher,
    EmbedsGiver,
    PromptRunner,
    SessionObserver,
)
from accel.runtime.session.rows import Kin, wanted_rows

CHUNK = 512  # most tokens of one graph call, so that attention scores [.., T, C] stay bounded
LOST = (
    "a call failed ({}) after some of its tokens had been evicted or counted, which cannot be undone; "
    "this session is closed, open another with model.session()"
)
NONE: Mapping[str, Any] = MappingProxyType({})
_NOTHING: Arrays = {}
_Kind = TypeVar("_Kind")


class LaidAdapter(Protocol):
    """An adapter that a session opened with. `number`: no other of the model has it. `digest`: of its arrays."""

    @property
    def name(self) -> str: ...
    @property
    def number(self) -> int: ...
    @property
    def digest(self) -> str: ...


def of_kind(observers: Sequence[object], kind: type[_Kind]) -> tuple[_Kind, ...]:
    """Those of a class, in their order."""
    return tuple(one for one in observers if isinstance(one, kind))


class SessionCore:
    """A backend session, how many tokens each row holds, and the observers that follow its calls."""

    def __init__(
        self,
        backend: BackendSession,
        batch: int,
        observers: Sequence[SessionObserver],
        vocab_size: int,
        max_context: int,
        origin: Any = None,
        width: int | None = None,
        token_ids: int | None = None,
    ):
        """`origin`: of which model it is (`session.saved.Origin`). `width`: numbers that a step gives for a token;
        None: its logits. `token_ids`: how many ids it reads; None: those of its tokens.
        """
        self.origin = origin
        self.adapters: list[str | None] = [None] * batch  # the name of each row's
        self.laid: tuple[LaidAdapter, ...] = ()  # those of the backend session, in their order
        self.batch = batch
        self.vocab_size = vocab_size
        self.width = vocab_size if width is None else width
        self.token_ids = vocab_size if token_ids is None else token_ids
        self.max_context = max_context
        self.observers = tuple(observers)
        self.lengths: Ints = np.zeros(
            batch, np.int64
        )  # tokens of each row; replaced, never written
        self.kin = Kin(np.arange(batch), self.lengths)
        self.calls = 0
        self.tokens = 0
        self.seconds = 0.0
        self._backend: BackendSession | None = backend
        self._tile = backend.tile
        self.room: list[int] = []  # slots of the buffers; none where they are new
        self._most = 0  # bytes of state that there were before rows were let go
        self._gone: Ints = np.zeros(
            batch, np.int64
        )  # tokens of a call's rows whose places others took
        self.watchers: tuple[CallWatcher, ...] = of_kind(self.observers, CallWatcher)
        self.runners = of_kind(self.observers, PromptRunner)
        self._listeners: tuple[CallWatcher, ...] = ()  # which are a caller's
        self._hearing = self.watchers  # of the steps of a call
        self._giver = next(iter(of_kind(self.observers, EmbedsGiver)), None)
        self.tree_extra = _NOTHING  # what the last tree's step gave for listeners
        self._stays = not any(one.moves_slots for one in self.watchers)
        self._controls = {name for one in self.watchers for name in one.controls}

    @property
    def backend(self) -> BackendSession:
        """Raises InputError where the session is closed."""
        if self._backend is None:
            raise InputError("this session is closed; open another with model.session()")
        return self._backend

    @property
    def chunk(self) -> int:
        """Most columns of one graph call."""
        return CHUNK

    @property
    def base(self) -> Ints | int:
        """The position of slot 0 of each row [B]."""
        for one in self.watchers:
            if one.base is not None:
                return one.base
        return 0

    @property
    def kv_bytes(self) -> int:
        """Bytes of the state buffers now."""
        return self._backend.kv_bytes if self._backend else 0

    @property
    def kv_mapped(self) -> int:
        """How many of them lie in mapped files."""
        return self._backend.kv_mapped if self._backend else 0

    @property
    def kv_most(self) -> int:
        """Most bytes of state buffers: now, or when rows were let go (`select`)."""
        return max(self._most, self.kv_bytes)

    def close(self) -> None:
        """Free the cache. Closing twice is harmless."""
        if self._backend is not None:
            for one in self.observers:
                one.close(self._backend, self.lengths)
            self._backend.close()
            self._backend = None

    def fork(self) -> SessionCore:
        """An independent one that holds the same tokens; its figures start at 0."""
        copies = tuple(one.copy() for one in self.observers)
        other = SessionCore(
            *(self.backend.copy(), self.batch, copies, self.vocab_size, self.max_context),
            self.origin,
            self.width,
            self.token_ids,
        )
        other.adapters, other.laid = self.adapters, self.laid
        other.lengths, other.kin, other.room = self.lengths.copy(), self.kin, list(self.room)
        return other

    def of_rows(self, rows: Ints) -> SessionCore:
        """An independent one of these rows [n]."""
        copies = tuple(one.copy() for one in self.observers)
        for one in copies:
            one.select(rows)
        other = SessionCore(
            *(self.backend.copy(rows), rows.size, copies, self.vocab_size, self.max_context),
            self.origin,
            self.width,
            self.token_ids,
        )
        other.adapters, other.laid = [self.adapters[row] for row in rows], self.laid
        other.lengths, other.room = self.lengths[rows], list(self.room)
        other.kin = Kin.copies(rows, other.lengths)
        return other

    def call(
        self,
        tokens: Any,
        lengths: Any,
        last_only: bool,
        want: Collection[str],
        controls: Mapping[str, Any],
    ) -> Outputs:
        """See `Session.step`."""
        if not want:
            return Outputs(self.run(tokens, lengths, last_only, controls), {})
        check_names("output", want, self.backend.extra)
        before, extra = self.lengths, Extra(want, self.batch, last_only)
        ids, counts = call_tokens(tokens, lengths, before, self.token_ids, self.max_context)
        self._hearing = (*self._hearing, extra)
        try:
            logits = self.run(ids, counts, last_only, controls)
        finally:
            self._hearing = (*self.watchers, *self._listeners)
        if extra.missed(np.full(self.batch, ids.shape[1]) if counts is None else counts):
            self.back(before)
            raise InputError(
                f"{', '.join(want)}: this model's recipe runs tokens of the call without its step, which gives them; "
                "run fewer tokens in a call, or build with another recipe"
            )
        return Outputs(logits, extra.outputs())

    def listen(self, listeners: tuple[CallWatcher, ...]) -> None:
        """See `Session.listen`."""
        self._listeners = listeners
        self._hearing = (*self.watchers, *listeners)

    @property
    def listeners(self) -> tuple[CallWatcher, ...]:
        """Those of `listen`."""
        return self._listeners

    def run(
        self,
        tokens: Any,
        lengths: Any,
        last_only: bool,
        controls: Mapping[str, Any] = NONE,
        prompt: bool = False,
    ) -> Logits:
        """See `Session.run`; `prompt`: a prompt ends with these tokens."""
        backend, before = self.backend, self.lengths
        ids, counts = call_tokens(tokens, lengths, before, self.token_ids, self.max_context)
        self._gone = np.zeros_like(before)
        call = Call(ids, counts, before, prompt, self._checked(controls) if controls else NONE)
        for one in self.watchers:
            one.begin(backend, call)
        try:
            self.catch_up()
            if last_only:
                ids, counts = self._admit(ids, counts)
            logits = self._ran(ids, counts, last_only, prompt and not before.any())
            after = self._settle("call", call.after - self._gone, self.watchers)
        except BaseException as error:
            self.undo(before, error)
            raise
        self.lengths = after
        return logits

    def reuse(self, tokens: Any, lengths: Any) -> Ints:
        """See `Session.reuse`."""
        before = self.lengths
        self._admit(*call_tokens(tokens, lengths, before, self.token_ids, self.max_context))
        return self.lengths - before

    def _admit(self, ids: Ints, counts: Ints | None) -> tuple[Ints, Ints | None]:
        """Of tokens [B,T], `counts` of them real (None: all), rows hold from here on what is known: what is left."""
        before = self.lengths
        for one in self.runners:
            if (left := one.admit(self.backend, ids, counts, before)) is not None:
                columns = np.arange(int(left[2].max()))
                positions = np.where(columns < left[2][:, None], before[:, None] + columns, -1)
                for other in self.watchers:
                    if id(other) != id(one):
                        other.after(ids[:, : columns.size], positions, _NOTHING)
                ids, counts, found = left
                self.lengths, self.room = before + found, []
        return ids, counts

    def end_prompt(self) -> None:
        """See `Session.end_prompt`."""
        if any(one.base is not None for one in self.watchers):
            self.catch_up()  # what is compressed cannot be run again later
        for one in self.watchers:
            one.rehearse(self, "prompt", self.lengths)
        self.lengths = self._settle("prompt", self.lengths, self.watchers)

    def rewind(self, new_lengths: Ints) -> None:
        """Let rows hold no more than `new_lengths` [B] tokens."""
        backend = self.backend
        for one in self.observers:
            one.check(new_lengths, self.lengths)
        for one in self.observers:
            if one.rewind(backend, new_lengths, self.lengths):
                self.room = []
        self.lengths, self.kin = new_lengths, self.kin.rewound(new_lengths)

    def select(self, rows: Any) -> None:
        """See `Session.select`."""
        backend, chosen = self.backend, wanted_rows(rows, self.batch)
        if np.array_equal(chosen, np.arange(self.batch)):
            return
        if any(one.rewrites for one in self.observers):
            self.kin = Kin.copies(np.arange(self.batch), self.lengths)
        if chosen.size != self.batch:
            self._most = self.kv_most
            slots, self._backend = None, backend.copy(chosen)
            backend.close()
        else:
            slots = self.kin.slots(chosen, self.lengths, self.base)
            backend.move(chosen, slots)
        for one in self.observers:
            one.select(chosen)
        self.batch, self.lengths = chosen.size, self.lengths[chosen]
        self.adapters = [self.adapters[row] for row in chosen]
        self._gone = np.zeros(self.batch, np.int64)
        if slots is None:
            self.kin = Kin.copies(chosen, self.lengths)
        else:
            self.kin = self.kin.of(chosen)

    def join(self, other: SessionCore) -> None:
        """See Session.join."""
        self._check_join(other)
        for one in (self, other):
            one.catch_up()
        ends = [core.lengths - core.base for core in (self, other)]
        slots = [max(int(end.max()) for end in ends)]
        for watcher, its in zip(self.watchers, other.watchers, strict=True):
            pairs = zip(watcher.slots(ends[0]), its.slots(ends[1]), strict=True)
            slots += [max(pair) for pair in pairs]
        room = [max(pair) for pair in zip(self.room or slots, other.room or slots, strict=True)]
        for one in (self, other):
            one.need([max(pair) for pair in zip(room, slots, strict=True)])
        room = self.room
        self.backend.join(other.backend)
        other._backend = None
        for mine, theirs in zip(self.observers, other.observers, strict=True):
            mine.join(self.backend, theirs)
        group = np.concatenate([self.kin.group, other.kin.group + 1 + self.kin.group.max()])
        self.kin = Kin(group, np.concatenate([self.kin.upto, other.kin.upto]))
        self.lengths = np.concatenate([self.lengths, other.lengths])
        self.adapters = [*self.adapters, *other.adapters]
        self.batch += other.batch
        self._gone = np.zeros(self.batch, np.int64)
        self.backend.resize(*room)

    def _check_join(self, other: SessionCore) -> None:
        """Raise InputError where rows of `other` cannot join."""
        if other is self or self.origin is None or other.origin is not self.origin:
            raise InputError(
                "join takes another session of the same loaded model; open both with model.session()"
            )
        for core in (self, other):
            _ = core.backend
        if (both := self.batch + other.batch) > self.origin.max_batch:
            raise InputError(
                f"{both} rows are more than max_batch = {self.origin.max_batch}; build with more: max_batch=…, or let "
                "rows leave first"
            )
        for one in self.observers:
            if not one.capabilities.joins:
                raise InputError(
                    f"rows cannot join sessions of this model ({type(one).__name__}): each would not go on as it does "
                    "alone (session.capabilities.joins); run them in sessions of their own"
                )
        mine, its = ([(one.name, one.number) for one in core.laid] for core in (self, other))
        if mine != its:
            names = [[name for name, _ in pairs] for pairs in (mine, its)]
            why = "" if names[0] != names[1] else ", one of which was replaced between"
            raise InputError(
                f"this session opened with adapters {names[0]}, and the one that joins with {names[1]}{why}; rows join "
                "where both opened with the same ones, in the same order"
            )

    def leave(self, rows: Ints) -> Ints:
        """See Session.leave."""
        for one in self.observers:
            one.leaving(self.backend, rows, self.lengths)
        staying = np.setdiff1d(np.arange(self.batch), rows)
        count = staying.size
        order = np.arange(count)
        order[np.setdiff1d(order, staying)] = staying[staying >= count]
        if any(one.rewrites for one in self.observers):
            self.kin = Kin.copies(np.arange(self.batch), self.lengths)
        self._most = self.kv_most
        self.backend.leave(order)
        for one in self.observers:
            one.select(order)
        self.kin = self.kin.of(order)
        self.batch, self.lengths = count, self.lengths[order]
        self.adapters = [self.adapters[row] for row in order]
        self._gone = np.zeros(count, np.int64)
        if self.room:
            self.backend.resize(*self.room)
        return order

    def set_length(self, row: int, length: int) -> None:
        """Let a row hold so many tokens, whose slots the caller has written."""
        self.lengths = self.lengths.copy()
        self.lengths[row] = length
        self.kin = self.kin.rewound(self.lengths)

    def put(self, arrays: Arrays) -> None:
        """See `Calls`."""
        self.backend.put(arrays)
        self.room = []  # buffers are bound when room is made

    def aside(
        self,
        tokens: Ints,
        counts: Ints,
        first: Ints,
        listeners: tuple[CallWatcher, ...] = (),
    ) -> Logits:
        """See `Calls`."""
        return self._chunks(tokens, counts, first, True, listeners)

    @contextmanager
    def whole_prompt(self, tokens: Ints, counts: Ints) -> Iterator[None]:
        """See `Calls`."""
        before = self.lengths
        call = Call(tokens, counts, before, prompt=True)
        for one in self.watchers:
            one.begin(self.backend, call)
        try:
            yield
        except BaseException as error:
            self.undo(before, error)
            raise

    def begin_tree(self, tokens: Ints, counts: Ints, controls: Mapping[str, Any] = NONE) -> None:
        """A call of tokens [B,T] comes that may be given up again, `counts` [B] of them real."""
        controls = self._checked(controls) if controls else NONE
        call = Call(tokens, counts, self.lengths, controls=controls)
        for one in self.watchers:
            one.begin(self.backend, call)

    def end_tree(self, tokens: Ints, positions: Ints, columns: Ints, after: Ints) -> None:
        """Of that call rows keep tokens [B,n] at these positions, which were its `columns` [B,n], and then hold `after`
        of them.
        """
        for one in self.watchers:
            one.after(tokens, positions, _NOTHING)
        rows = np.arange(self.batch)[:, None]
        kept = {name: array[rows, columns] for name, array in self.tree_extra.items()}
        for one in self._listeners:
            one.after(tokens, positions, kept)
        self.tree_extra = _NOTHING
        self.lengths = after
        self.lengths = self._settle("call", after, self.watchers)

    def catch_up(self) -> None:
        """Run again what an observer lacks after a rewind. The others saw those tokens, whose slots the cache
        still holds.
        """
        backend = self.backend
        for one in self.watchers:
            if again := one.catch_up(backend, self.lengths):
                for other in self.runners:
                    if other.reopen(backend, again[2]):
                        self.room = []
                self._chunks(*again, True, (one,))

    def step(
        self,
        tokens: Ints,
        positions: Ints,
        slots: Ints,
        rows: Ints,
        real: int,
        tree: Bools | None = None,
        watchers: tuple[CallWatcher, ...] | None = None,
        again: Bools | None = None,
    ) -> Logits:
        """One graph call, after making room for every slot that it writes, padding included; a flat one where that
        pays. `watchers` (None: all) hear of its tokens, but for those that run `again` [B,T]; of those of a `tree` all
        do when a path of it is kept.
        """
        backend, width = self.backend, rows.shape[1]
        giver = self._giver
        embeds = None if giver is None else giver.embeds(positions, tree is not None)
        if self._tile > 1:
            tokens, positions, rows, tree, embeds = whole_tiles(
                self._tile, tokens, positions, rows, tree, embeds
            )
        self.make_room(slots, tokens.shape[1])
        hearing = self._hearing if watchers is None else watchers
        listeners = hearing if tree is None else ()
        asking = listeners if tree is None else self._listeners
        start = time.perf_counter()
        want = dict.fromkeys(n for one in asking for n in one.before(backend, tokens.shape[1]))
        plain = tree is None and embeds is None and all(map(is_tap, want))
        extra: Arrays
        if backend.flat and plain and pays(real, tokens.size):
            logits, extra = flat_call(backend, tokens, positions, slots, rows, self.width, want)
        else:
            out = backend.step(tokens, positions, slots, rows, want, tree, embeds)
            logits, extra = out.logits, out.extra
        if tree is not None:
            self.tree_extra = extra
        if again is not None:
            positions = np.where(
                np.pad(again, ((0, 0), (0, positions.shape[1] - again.shape[1]))), -1, positions
            )
        for one in listeners:
            one.after(tokens, positions, extra)
        self.count(1, real, start)
        return logits if width == rows.shape[1] else logits[:, :width]

    def part(self, entry: str, tokens: Ints, positions: Ints, slots: Ints, real: int) -> None:
        """A call of an entry that takes what a step takes and gives no logits."""
        self.make_room(slots, tokens.shape[1])
        start = time.perf_counter()
        for one in self._hearing:
            one.before(self.backend, tokens.shape[1])
        rows = np.zeros((self.batch, 1), np.int64)
        inputs = {"tokens": tokens, "positions": positions, "slots": slots, "rows": rows}
        extra = self.backend.part(entry, inputs)
        for one in self._hearing:
            one.after(tokens, positions, extra)
        self.count(1, real, start)

    def observe(self, queries: Arrays, positions: Ints) -> None:
        """Some layers ran a part of a prompt and gave these queries."""
        for one in self.watchers:
            one.observe(queries, positions)

    def heard(self, tokens: Ints, positions: Ints) -> None:
        """See `Calls`."""
        for one in self._hearing:
            one.after(tokens, positions, _NOTHING)

    def make_room(self, slots: Ints, width: int) -> None:
        """For a graph call of `width` columns from these slots [B] on, and what pads them to whole tiles."""
        width = -(-width // self._tile) * self._tile
        ends = slots + width
        room = [int(ends.max())]
        for one in self.watchers:
            one.make_room(self.backend, slots, width)
            room += one.slots(ends)
        self.need(room)

    def need(self, slots: list[int]) -> None:
        """Make room for so many slots, and in layers that see prompts pruned. An eighth more is made where some are
        too few, in whole steps: so a token's share of the copies does not grow with the context. What is not written
        takes no memory.
        """
        if not self.room or any(n > have for n, have in zip(slots, self.room, strict=True)):
            had = self.room or [0] * len(slots)
            room = [
                have if n <= have else (-(-n // STEP) + n // (8 * STEP)) * STEP
                for n, have in zip(slots, had, strict=True)
            ]
            self.backend.resize(*room)
            self.room = room

    def count(self, calls: int, tokens: int, start: float) -> None:
        """Add graph calls and real tokens to the figures, and the seconds since `start`."""
        self.calls += calls
        self.tokens += tokens
        self.seconds += time.perf_counter() - start

    def undo(self, before: Ints, error: BaseException) -> None:
        """After a call that failed: rows hold `before` [B] tokens as before, or the session closes."""
        self.lengths = before
        if any(one.lost() for one in self.watchers):
            self.close()
            if isinstance(error, Exception):
                raise AccelError(LOST.format(f"{type(error).__name__}: {error}")) from error
            return
        backend = self.backend
        for one in self.watchers:
            if one.undo(backend, before):
                self.room = []

    def back(self, before: Ints) -> None:
        """After a prompt that failed: rows hold `before` [B] tokens again, where the session is open and they can."""
        if self._backend is None or (before > self.lengths).any():
            return
        # an empty session may have noted some of the prompt
        if before.any() and np.array_equal(before, self.lengths):
            return
        try:
            self.rewind(before)
        except InputError:  # some were evicted
            return

    def _ran(self, ids: Ints, counts: Ints | None, last_only: bool, prompt: bool) -> Logits:
        """The graph calls of a call."""
        for one in self.runners:
            if (found := one.run(self, ids, counts, last_only, prompt)) is not None:
                return found
        width = ids.shape[1]
        if counts is None and width == 1:
            return self._whole(ids, last_only)
        full = np.full(self.batch, width, np.int64) if counts is None else counts
        if counts is None and width <= CHUNK and self._stops(self.lengths, full) is None:
            return self._whole(ids, last_only)
        return self._chunks(ids, full, self.lengths, last_only, self._hearing)

    def _checked(self, controls: Mapping[str, Any]) -> dict[str, Any]:
        """Those that were given a value. Raises InputError where no observer of the session takes one."""
        found = {name: value for name, value in controls.items() if value is not None}
        for name in found.keys() - self._controls:
            watching = (kind for kind in observer_classes() if issubclass(kind, CallWatcher))
            declared = {n: lacks for kind in watching for n, lacks in kind.controls.items()}
            check_names("control of a call", [name], declared)
            raise InputError(declared[name])
        return found

    def _stops(self, first: Ints, counts: Ints) -> Ints | None:
        """See `PromptRunner.stops`: the first observer's that has any."""
        found = (one.stops(first, counts) for one in self.runners)
        return next((stops for stops in found if stops is not None), None)

    def _whole(self, ids: Ints, last_only: bool) -> Logits:
        """One graph call without padding."""
        width, slots = ids.shape[1], self.lengths - self.base
        if width == 1:  # a token: little else should be done besides the graph
            first = np.zeros((self.batch, 1), np.int64)
            return self.step(ids, self.lengths[:, None], slots, first, ids.size)
        positions = self.lengths[:, None] + np.arange(width)
        rows = np.arange(width - 1 if last_only else 0, width)
        rows = np.broadcast_to(rows, (self.batch, rows.size))
        return self.step(ids, positions, slots, rows, ids.size)

    def _chunks(
        self,
        ids: Ints,
        counts: Ints,
        first: Ints,
        last_only: bool,
        watchers: tuple[CallWatcher, ...],
    ) -> Logits:
        """Graph calls of at most CHUNK columns, from position `first` [B] on, of which `watchers` hear; a row's
        padding gets position -1 and writes no KV that is seen.
        """
        shape = (self.batch, 1 if last_only else ids.shape[1], self.width)
        out = np.zeros(shape, np.float32)
        gone = np.zeros_like(counts)
        if self._stays:  # buffers grow once, not with each part
            self.need([int((first - self.base + counts).max())])
        for start, end in row_parts(counts, CHUNK, self._stops(first, counts)):
            left = end - start
            columns = np.arange(int(left.max()))
            places = np.minimum(start[:, None] + columns, ids.shape[1] - 1)
            part = np.take_along_axis(ids, places, axis=1)
            before = first + start - gone
            if start.any():
                for one in watchers:
                    one.rehearse(self, "part", before)
                settled = self._settle("part", before, watchers)
                before, gone = settled, gone + before - settled
            real = columns < left[:, None]
            positions = np.where(real, before[:, None] + columns, -1)
            ends = (left > 0) & (end == counts)  # rows whose last token is in this chunk
            rows = (
                np.where(ends, left - 1, 0)[:, None]
                if last_only
                else np.broadcast_to(columns, part.shape)
            )
            logits = self.step(
                part, positions, before - self.base, rows, int(real.sum()), watchers=watchers
            )
            if isinstance(logits, Distant) and logits.shape == shape and not start.any():
                distant: Any = logits.only(ends[:, None] if last_only else real)
                if (end == counts).all():  # it was one graph call
                    return cast(Logits, distant)
            if last_only:
                out[ends] = logits[ends]
                continue
            for row, (a, b) in enumerate(zip(start, end, strict=True)):
                out[row, a:b] = logits[row, : b - a]
        return out

    def _settle(self, moment: str, lengths: Ints, watchers: tuple[CallWatcher, ...]) -> Ints:
        """Let observers do what is due; rows hold `lengths` [B] tokens. What they hold then."""
        backend = self.backend
        for one in watchers:
            start = time.perf_counter()
            done = one.settle(backend, moment, lengths)
            if done is None:
                continue
            self.room = []
            for other in () if done.moved else self.watchers:
                other.pin(backend)
            if done.calls:
                self.count(done.calls, 0, start)
            if done.lengths is not None:
                self._gone = self._gone + lengths - done.lengths
                self.kin = self.kin.rewound(np.zeros_like(done.lengths))
                lengths = done.lengths
        return lengths
