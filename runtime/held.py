"""What a session holds between its graph calls, and what is done then."""

from __future__ import annotations

import time

import numpy as np

from accel.ir.errors import AccelError, InputError
from accel.runtime.ints import Ints
from accel.runtime.keeper import LOST, Keeper
from accel.runtime.pages import Pages
from accel.runtime.past import Past
from accel.runtime.stepper import Stepper


class Held:
    """What `Session` is built on: it makes the calls."""

    def __init__(self, stepper: Stepper, batch: int, keeper: Keeper | None, pages: Pages | None):
        self.batch = batch
        self._stepper: Stepper | None = stepper
        self._room: list[int] = []  # slots of the buffers
        self._lengths: Ints = np.zeros(batch, np.int64)
        self._past = Past(batch) if stepper.recurrent else None
        self._keeper = keeper
        self._pages = pages
        self._calls = 0
        self._tokens = 0
        self._seconds = 0.0

    def close(self) -> None:
        """Free the cache. Closing twice is harmless."""
        if self._stepper is not None:
            if self._pages is not None:
                self._pages.close(self._stepper, self._lengths)
            self._stepper.close()
            self._stepper = None

    def _open(self) -> Stepper:
        if self._stepper is None:
            raise InputError("this session is closed; open another with model.session()")
        return self._stepper

    def _undo(self, before: Keeper | None, error: BaseException) -> None:
        """After a call that failed: `before` is what was known of the compressed part."""
        if before is None or self._keeper is None:
            return
        if before.plan.counts or (self._keeper.base != before.base).any():
            self.close()
            if isinstance(error, Exception):
                raise AccelError(LOST.format(f"{type(error).__name__}: {error}")) from error
        self._keeper = before

    def _count(self, calls: int, tokens: int, start: float) -> None:
        self._calls += calls
        self._tokens += tokens
        self._seconds += time.perf_counter() - start

    @property
    def _base(self) -> Ints | int:
        """The position of slot 0 of each row [B]."""
        split = self._keeper or self._pages
        return 0 if split is None else split.base

    def _compress(self, moment: str, lengths: Ints) -> None:
        """Compress the cache where the recipe says so; rows hold `lengths` [B] tokens."""
        keeper = self._keeper
        if keeper is None or not keeper.due(moment, lengths):
            return
        start = time.perf_counter()
        self._open().compress(keeper, lengths)
        keeper.compressed(lengths)
        self._room = []
        if self._past is not None:
            self._past.pin(self._open())
        self._count(1, 0, start)
