"""Which layers a call runs: the caller's plan, or the recipe's where the caller says nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from accel.ir.depth import NESTED, Depth
from accel.ir.errors import InputError, shown
from accel.runtime.backends.layer_inputs import NEVER, Controls
from accel.runtime.backends.protocol import BackendSession
from accel.runtime.call import Call
from accel.runtime.inputs.ints import Ints
from accel.runtime.rows import ByRow
from accel.runtime.session.observers.observer import (
    CallWatcher,
    Capabilities,
    ModelParts,
    ObserverFactory,
    SessionObserver,
    Settled,
)

RUN_LAYERS, THRESHOLD = "run_layers", "threshold"
LACKS = (
    "run_layers and threshold need a model whose layers can be skipped; build this one with a depth recipe, such as "
    "unified-skip"
)
_FAR = np.iinfo(np.int64).max


class LayerSchedule(SessionObserver, CallWatcher):
    """What a session knows of the layers that its tokens went through.

    Where caches are nested a layer that was left out for a token may run again only when that token
    is forgotten: by default it stays off, and a plan that switches it on is refused.
    """

    _lacks: Annotated[Ints, ByRow(axis=1)]  # the first token of each row that a layer lacks [L,B]
    _before: Annotated[Ints, ByRow(saved=False)]  # tokens before the call

    order = 90  # what a call ran counts only when all else about it went well
    controls: ClassVar[Mapping[str, str]] = dict.fromkeys((RUN_LAYERS, THRESHOLD), LACKS)

    def __init__(self, depth: Depth, batch: int):
        self.depth = depth
        self._whole = Controls(np.ones(len(depth.plan), bool))
        first = NEVER if depth.threshold is None else depth.threshold
        self._decode = Controls(np.array(depth.plan, bool), first)
        self._lacks = np.full((len(depth.plan), batch), _FAR)
        self._asked = self._whole  # a caller's last, so that one that comes again is known
        self._noted: Controls | None = None
        self._sent: Controls | None = None
        self._before = np.zeros(batch, np.int64)

    @classmethod
    def for_model(cls, model: ModelParts) -> ObserverFactory | None:
        """Where a depth method was built in."""
        depth = model.facts.depth
        return None if depth is None else ObserverFactory(lambda batch: cls(depth, batch))

    @property
    def capabilities(self) -> Capabilities:
        """Single tokens go another way than several at once, unless the recipe's plan is all layers. Rows that are run
        together leave out what one of them left out.
        """
        same = all(self.depth.plan) and self.depth.threshold is None
        return Capabilities(width=None if same else 1, joins=same, chunks=same)

    def begin(self, backend: BackendSession, call: Call) -> None:
        """Let the backend session know what the call runs (`plan_of`), where that is news."""
        sent = self.plan_of(call)
        self._before = call.before
        if sent is not self._sent:
            backend.control(sent.arrays(self.depth))
            self._sent = sent

    def plan_of(self, call: Call) -> Controls:
        """What a call sends. By default a prompt runs all layers, and single tokens after it the recipe's. Raises
        InputError.
        """
        before, after = call.before, call.after
        run_layers, threshold = call.controls.get(RUN_LAYERS), call.controls.get(THRESHOLD)
        decoding = not call.prompt and bool((after - before).max() == 1 and before.min() > 0)
        controls = self._decode if decoding else self._whole
        if run_layers is not None:
            plan, usual = self._checked(run_layers), controls.threshold
            if self._asked.threshold != usual or not np.array_equal(self._asked.layers, plan):
                self._asked = Controls(plan, usual)
            controls = self._asked
        if threshold is None and controls is self._noted:
            return controls
        complete = self._complete(before, after)
        if run_layers is not None:
            if (late := plan & ~complete).any():
                layer = int(late.argmax())
                row = int((self._lacks[layer] < before).argmax())
                raise InputError(
                    f"run_layers: layer {layer} was skipped for token {self._lacks[layer, row]} of row {row} "
                    "and lacks its keys; skip it, rewind to that token, or build with "
                    'cache = "propagate"'
                )
        elif not complete[controls.layers].all():
            both = controls.layers & complete
            controls = Controls(both if both.any() else complete, controls.threshold)
        return controls if threshold is None else Controls(controls.layers, self._limit(threshold))

    def settle(self, backend: BackendSession, moment: str, lengths: Ints) -> Settled | None:
        """Note what the call that was sent last left out."""
        controls = self._sent
        if moment != "call" or controls is None or controls is self._noted:
            return None
        rows = lengths > self._before
        if self.depth.cache == NESTED:
            out = ~controls.layers[:, None] & rows
            self._lacks = np.where(out, np.minimum(self._lacks, self._before), self._lacks)
        self._noted = controls if rows.all() else None
        return None

    def rewind(self, backend: BackendSession, new_lengths: Ints, lengths: Ints) -> bool:
        """Rows hold no more than `new_lengths` [B] tokens from now on."""
        self._lacks[self._lacks >= new_lengths] = _FAR
        self._noted = None
        return False

    def select(self, rows: Ints) -> None:
        """See SessionObserver."""
        super().select(rows)
        self._noted = None

    def join(self, backend: BackendSession, other: Self) -> None:
        """See SessionObserver."""
        super().join(backend, other)
        self._noted = None

    def copy(self) -> Self:
        """See SessionObserver. What the call before it sent is told to its backend session again."""
        other = super().copy()
        other._noted = other._sent = None
        return other

    def _complete(self, before: Ints, after: Ints) -> npt.NDArray[np.bool_]:
        """Layers [L] that lack no token which the call's rows look back at."""
        found: npt.NDArray[np.bool_] = ((self._lacks >= before) | (after == before)).all(1)
        return found

    def _checked(self, run_layers: Any) -> npt.NDArray[np.bool_]:
        """A plan [L]."""
        count = len(self.depth.plan)
        try:
            plan = np.asarray(run_layers)
        except ValueError:  # ragged lists
            plan = np.empty(0)
        if plan.dtype != np.bool_ or plan.shape != (count,):
            raise InputError(
                f"run_layers is {plan.dtype} {list(plan.shape)}; give {count} bools, one per layer, true "
                "where the layer runs"
            )
        if not plan.any():
            raise InputError("run_layers skips every layer; at least one must run")
        return plan.copy()

    def _limit(self, threshold: Any) -> float:
        """A confidence to exit from."""
        if self.depth.threshold is None:
            raise InputError(
                "threshold: this model has no early exits; build it with a recipe that has, such as calm"
            )
        if (
            isinstance(threshold, bool)
            or not isinstance(threshold, (int, float))
            or threshold != threshold
        ):
            raise InputError(
                f"threshold is {shown(threshold)}; give a number, above 1 to run all layers"
            )
        return float(threshold)
