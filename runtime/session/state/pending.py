"""Tokens that left early and run again with later ones: EE-LLM's recomputation of keys and values
(arXiv:2312.04916).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Annotated

import numpy as np

from accel.ir.depth import LAYERS_RAN, REFEED, Depth
from accel.ir.entries.embed import EMBEDS
from accel.ir.errors import InputError
from accel.runtime.backends.layer_inputs import NEVER, Controls
from accel.runtime.backends.protocol import BackendSession
from accel.runtime.call import Arrays, Call, Logits
from accel.runtime.inputs.ints import Ints
from accel.runtime.rows import ByRow, PerRow
from accel.runtime.session.observers.observer import (
    Calls,
    Capabilities,
    ModelParts,
    ObserverFactory,
    PromptRunner,
    Settled,
)
from accel.runtime.session.state.layer_schedule import LayerSchedule


class PendingTokens(LayerSchedule, PromptRunner):
    """What a session knows of the newest tokens of each row that did not go through all layers.

    The next call of few tokens begins with them, from the embedding on, and its new tokens decide where it ends. Behind
    the last layer all are whole. Any other call, and what reads the cache between calls, first runs them through all
    layers. A call by which more than `window` tokens of a row could be pending runs all layers.
    """

    pending: PerRow
    _ids: Annotated[Ints, ByRow()]  # of pending tokens, the oldest first [B,window]

    def __init__(self, depth: Depth, batch: int):
        super().__init__(depth, batch)
        self.pending = np.zeros(batch, np.int64)
        self._ids = np.zeros((batch, depth.window), np.int64)
        self._prior = (self.pending, self._ids)  # before the call
        self._together = False  # whether the call begins with those that are pending
        self._leaves = False  # whether it may end before the last layer
        self._again = 0

    @classmethod
    def for_model(cls, model: ModelParts) -> ObserverFactory | None:
        """Where tokens that left early run again."""
        depth = model.facts.depth
        if depth is None or depth.cache != REFEED:
            return None
        return ObserverFactory(lambda batch: cls(depth, batch))

    @property
    def capabilities(self) -> Capabilities:
        """See LayerSchedule. A tree is no chain that new tokens could end."""
        return replace(super().capabilities, trees=False)

    @property
    def stats(self) -> dict[str, float]:
        """See SessionObserver."""
        return {"tokens_again": self._again}

    def begin(self, backend: BackendSession, call: Call) -> None:
        """See CallWatcher. Raises InputError."""
        super().begin(backend, call)
        assert self._sent is not None
        self._prior = (self.pending, self._ids)
        self._leaves = self._sent.threshold < NEVER
        self._together = not call.prompt and self._most(call) <= 1 + self._window

    def plan_of(self, call: Call) -> Controls:
        """See LayerSchedule. Raises InputError."""
        controls = super().plan_of(call)
        if not controls.layers.all():
            raise InputError(
                "run_layers leaves out a layer, but tokens of this model that left early run again and no caller says "
                'where; leave run_layers out, or build with cache = "propagate"'
            )
        embedded = call.controls.get(EMBEDS) is not None  # which are not there to run again
        full = call.prompt or embedded or self._most(call) > self._window
        return self._whole if full else controls

    @property
    def _window(self) -> int:
        return self.depth.window

    def _most(self, call: Call) -> int:
        """Tokens of a row with those that are pending."""
        return int((self.pending + call.after - call.before).max())

    def catch_up(self, backend: BackendSession, lengths: Ints) -> tuple[Ints, Ints, Ints] | None:
        """See CallWatcher: what is pending, through all layers."""
        if self._together or not self.pending.any():
            return None
        self._send(backend, self._whole)
        self._leaves = False
        self._again += int(self.pending.sum())
        return self._ids[:, : int(self.pending.max())], self.pending, lengths - self.pending

    def run(
        self, calls: Calls, tokens: Ints, counts: Ints | None, last_only: bool, prompt: bool
    ) -> Logits | None:
        """See PromptRunner: behind what is pending."""
        if not self._together or not self.pending.any():
            return None
        before, width = self.pending[:, None], tokens.shape[1]
        new = np.full(len(tokens), width, np.int64) if counts is None else counts
        ends = before + new[:, None]  # [B,1]
        columns = np.arange(int(ends.max()))[None]
        again = columns < before
        ids = np.where(
            again,
            np.take_along_axis(self._ids, np.minimum(columns, self._window - 1), 1),
            np.take_along_axis(tokens, np.clip(columns - before, 0, width - 1), 1),
        )
        first = calls.lengths - self.pending
        positions = np.where(columns < ends, first[:, None] + columns, -1)
        last = np.maximum(ends - 1, 0)
        rows = last if last_only else np.minimum(before + np.arange(width)[None], last)
        self._again += int(before.sum())
        logits = calls.step(ids, positions, first - calls.base, rows, int(ends.sum()), again=again)
        real = (new > 0)[:, None] if last_only else np.arange(width)[None] < new[:, None]
        return np.where(real[..., None], logits, np.float32(0))

    def before(self, backend: BackendSession, width: int) -> Collection[str]:
        """See CallWatcher."""
        return (LAYERS_RAN,) if self._leaves else ()

    def after(self, tokens: Ints, positions: Ints, extra: Arrays) -> None:
        """See CallWatcher. A step's tokens begin with those that were pending."""
        ran = extra.get(LAYERS_RAN) if self._leaves else None
        if ran is not None and (ran < len(self.depth.plan)).any():
            self.pending = self.pending + (positions >= 0).sum(1)
            missing = max(0, self._window - tokens.shape[1])
            self._ids = np.pad(tokens[:, : self._window], ((0, 0), (0, missing)))
        else:
            self.pending = np.zeros_like(self.pending)

    def settle(self, backend: BackendSession, moment: str, lengths: Ints) -> Settled | None:
        """See CallWatcher."""
        if moment == "call":
            self._together = False
        return super().settle(backend, moment, lengths)

    def undo(self, backend: BackendSession, lengths: Ints) -> bool:
        """See CallWatcher. What was whole before is so."""
        self.pending, self._ids = self._prior
        self._together = False
        return super().undo(backend, lengths)

    def rewind(self, backend: BackendSession, new_lengths: Ints, lengths: Ints) -> bool:
        """See SessionObserver."""
        self.pending = np.maximum(self.pending - (lengths - new_lengths), 0)
        return super().rewind(backend, new_lengths, lengths)
