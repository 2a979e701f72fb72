"""What a session holds between its graph calls, and how it makes one."""

from __future__ import annotations

import time

import numpy as np

from accel.ir.errors import AccelError, InputError
from accel.runtime.backends.buffers import STEP
from accel.runtime.backends.protocol import Arrays, Bools, Logits, Stepper, whole_tiles
from accel.runtime.inputs.ints import Ints
from accel.runtime.session.observers.observer import Capabilities, Companion
from accel.runtime.session.rows import Kin

LOST = (
    "a call failed ({}) after some of its tokens were compressed or counted, which cannot be taken back; "
    "this session is closed, open another with model.session()"
)
_NO_QUERIES: Arrays = {}


class Held:
    """What `Session` is built on: the stepper, how many tokens each row holds, and companions that follow."""

    def __init__(self, stepper: Stepper, batch: int, companions: tuple[Companion, ...], tile: int):
        self.batch = batch
        self._stepper: Stepper | None = stepper
        self._tile = tile
        self._companions = companions
        self._room: list[int] = []  # slots of the buffers; none where they are new
        self._lengths: Ints = np.zeros(batch, np.int64)
        self._kin = Kin(np.arange(batch), self._lengths)
        self._start_figures()

    def close(self) -> None:
        """Free the cache. Closing twice is harmless."""
        if self._stepper is not None:
            for one in self._companions:
                one.close(self._stepper, self._lengths)
            self._stepper.close()
            self._stepper = None

    @property
    def capabilities(self) -> Capabilities:
        """What can be relied on before anything runs."""
        stepper = self._open()
        found = Capabilities(width=stepper.alike, trees=stepper.trees)
        for one in self._companions:
            found &= one.capabilities
        return found

    @property
    def held_from(self) -> Ints:
        """The position of each row [B] up to which it can be rewound; 0 where nothing was dropped."""
        found = np.zeros_like(self._lengths)
        for one in self._companions:
            found = np.maximum(found, one.held_from)
        return found

    @property
    def stats(self) -> dict[str, float]:
        """calls: graph calls; tokens: real ones run; reused: those that others had run; seconds in the
        graph; kv_bytes: state buffers now, without blocks that sessions share.
        """
        found: dict[str, float] = {
            "calls": self._calls,
            "tokens": self._tokens,
            "reused": 0,
            "seconds": self._seconds,
            "kv_bytes": self._stepper.kv_bytes if self._stepper else 0,
        }
        for one in self._companions:
            found |= one.stats
        return found

    @property
    def kv_most(self) -> int:
        """Most bytes of state buffers: now, or when rows were let go (`select`)."""
        return max(self._kv_most, self._stepper.kv_bytes if self._stepper else 0)

    def _start_figures(self) -> None:
        self._kv_most = 0
        self._calls = 0
        self._tokens = 0
        self._seconds = 0.0

    def _count(self, calls: int, tokens: int, start: float) -> None:
        self._calls += calls
        self._tokens += tokens
        self._seconds += time.perf_counter() - start

    def _open(self) -> Stepper:
        if self._stepper is None:
            raise InputError("this session is closed; open another with model.session()")
        return self._stepper

    @property
    def _base(self) -> Ints | int:
        """The position of slot 0 of each row [B]."""
        for one in self._companions:
            if one.base is not None:
                return one.base
        return 0

    def _step(
        self,
        stepper: Stepper,
        tokens: Ints,
        positions: Ints,
        slots: Ints,
        rows: Ints,
        real: int,
        tree: Bools | None = None,
    ) -> Logits:
        """One graph call, after making room for every slot that it writes, padding included. Companions hear of the
        tokens of a `tree` when a path of it is kept.
        """
        wanted = rows.shape[1]
        if self._tile > 1:
            tokens, positions, rows, tree = whole_tiles(self._tile, tokens, positions, rows, tree)
        ends, observe = slots + tokens.shape[1], False
        room = [int(ends.max())]
        for one in self._companions:
            room += one.slots(ends)
        self._need(stepper, room)
        start = time.perf_counter()
        for one in self._companions if tree is None else ():
            observe |= one.before(stepper, tokens.shape[1])
        logits = stepper.step(tokens, positions, slots, rows, observe, tree)
        for one in self._companions if tree is None else ():
            one.after(tokens, positions, stepper.observed if observe else _NO_QUERIES)
        self._count(1, real, start)
        return logits if wanted == rows.shape[1] else logits[:, :wanted]

    def _sparse(
        self, stepper: Stepper, tokens: Ints, positions: Ints, slots: Ints, real: int
    ) -> None:
        """A segment of a prompt that reads some of the keys before it."""
        self._need(stepper, [int(slots.max()) + tokens.shape[1]])
        start = time.perf_counter()
        rows = np.zeros((self.batch, 1), np.int64)
        given = {"tokens": tokens, "positions": positions, "slots": slots, "rows": rows}
        queries = stepper.part("sparse", given)
        for one in self._companions:
            one.after(tokens, positions, queries)
        self._count(1, real, start)

    def _need(self, stepper: Stepper, slots: list[int]) -> None:
        """Make room for so many slots, and in layers that see prompts pruned."""
        if not self._room or any(n > have for n, have in zip(slots, self._room, strict=True)):
            had = self._room or [0] * len(slots)
            room = [max(have, -(-n // STEP) * STEP) for n, have in zip(slots, had, strict=True)]
            stepper.resize(*room)
            self._room = room

    def _settle(self, stepper: Stepper, moment: str, lengths: Ints) -> None:
        """Let companions do what is due; rows hold `lengths` [B] tokens."""
        for one in self._companions:
            start = time.perf_counter()
            calls = one.settle(stepper, moment, lengths)
            if calls is None:
                continue
            self._room = []
            for other in self._companions:
                other.pin(stepper)
            if calls:
                self._count(calls, 0, start)

    def _undo(self, stepper: Stepper, held: Ints, error: BaseException) -> None:
        """After a call that failed: rows hold `held` [B] tokens as before, or the session closes."""
        self._lengths = held
        if any(one.lost() for one in self._companions):
            self.close()
            if isinstance(error, Exception):
                raise AccelError(LOST.format(f"{type(error).__name__}: {error}")) from error
            return
        for one in self._companions:
            if one.undo(stepper, held):
                self._room = []
