"""Which layers, or branches of them, a call runs: the caller's plan, or the recipe's where the caller says nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from accel.ir.depth import NESTED, REFEED, ROUTE, RUN_ATTN, RUN_LAYERS, RUN_MLP, Depth
from accel.ir.errors import InputError, shown
from accel.runtime.backends.layer_inputs import NEVER, Controls, whole
from accel.runtime.backends.protocol import BackendSession
from accel.runtime.call import Arrays, Call
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
from accel.runtime.session.state._routes import Routes

THRESHOLD = "threshold"
LACKS = (
    "run_layers and threshold need a model whose layers can be skipped; build this one with a depth recipe, such as "
    "unified-skip"
)
NO_BRANCHES = (
    "run_attn and run_mlp need a model whose layers' branches can be skipped; build this one with depth = by-branch, "
    "or give run_layers"
)
_PLANS = (RUN_LAYERS, RUN_ATTN, RUN_MLP)
_FAR = np.iinfo(np.int64).max


class LayerSchedule(SessionObserver, CallWatcher):
    """What a session knows of the layers that its tokens went through, and of where each row's prompt ended: from there
    on a plan may change token by token. Rows that run together run what one of them runs.

    Where caches are nested a layer that was left out for a token may run again only when that token
    is forgotten: by default it stays off, and a plan that switches it on is refused.

    Where layers have scores, each row's layers are chosen by its prompt: a layer runs where one row takes it, and
    changes the streams of those that do.
    """

    _lacks: Annotated[Ints, ByRow(axis=1)]  # the first token of each row that a layer lacks [L,B]
    _prompt: Annotated[Ints, ByRow()]  # tokens of each row up to which its last prompt went [B]
    _before: Annotated[Ints, ByRow(saved=False)]  # tokens before the call
    _routes: Annotated[Routes, ByRow(name="routes")]
    _asks: Annotated[
        npt.NDArray[np.bool_], ByRow(saved=False)
    ]  # rows whose tokens belong to a prompt

    order = 90  # what a call ran counts only when all else about it went well
    controls: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys((RUN_LAYERS, THRESHOLD), LACKS),
        **dict.fromkeys((RUN_ATTN, RUN_MLP), NO_BRANCHES),
    }

    def __init__(self, depth: Depth, batch: int):
        self.depth = depth
        self._whole = whole(depth)
        first = NEVER if depth.threshold is None else depth.threshold
        mlp = None if depth.mlp is None else np.array(depth.mlp, bool)
        self._turns = np.array(depth.turns, np.int64)
        self._decode = [
            Controls(np.array(depth.plan_at(n), bool), first if n >= depth.dense else NEVER, mlp)
            for n in (0, *depth.turns)
        ]
        self._decoding = False
        self._prompt = np.zeros(batch, np.int64)
        self._lacks = np.full((len(depth.plan), batch), _FAR)
        self._asked = self._whole  # a caller's last, so that one that comes again is known
        self._noted: Controls | None = None
        self._sent: Controls | None = None
        self._before = np.zeros(batch, np.int64)
        self._routes = Routes(batch, len(depth.plan))
        self._asks = np.zeros(batch, bool)

    @classmethod
    def for_model(cls, model: ModelParts) -> ObserverFactory | None:
        """Where a depth method was built in whose tokens do not run again (`PendingTokens`)."""
        depth = model.facts.depth
        if depth is None or depth.cache == REFEED:
            return None
        return ObserverFactory(lambda batch: cls(depth, batch))

    @property
    def capabilities(self) -> Capabilities:
        """Single tokens go another way than several at once, unless the recipe's plan is all layers. Rows that are run
        together leave out what one of them left out. Where each token goes by itself, neither is so.
        """
        same = self.depth.all_run and (self.depth.threshold is None or self.depth.routed)
        alone = same and self.depth.by_prompt is None
        return Capabilities(width=None if alone else 1, joins=same, chunks=same)

    def begin(self, backend: BackendSession, call: Call) -> None:
        """Let the backend session know what the call runs (`plan_of`), where that is news."""
        sent = self.plan_of(call)
        self._before, self._decoding = call.before, self._decodes(call)
        self._asks = ~self._after_prompts(call)
        self._send(backend, sent)

    def _send(self, backend: BackendSession, sent: Controls) -> None:
        """Where it is news."""
        if sent is not self._sent:
            backend.control(sent.arrays(self.depth))
            self._sent = sent

    def plan_of(self, call: Call) -> Controls:
        """What a call sends. By default a prompt runs all layers, and single tokens after it the recipe's. Raises
        InputError.
        """
        before, after = call.before, call.after
        threshold = call.controls.get(THRESHOLD)
        decodes = self.depth.routed or self._decodes(call)
        controls = self._decode[self._turn(before, after)] if decodes else self._whole
        if decodes and self.depth.falls:
            limit = self.depth.threshold_at(self._nearest(before, after))
            controls = controls if limit is None else replace(controls, threshold=limit)
        asked = self._asked_for(call.controls, controls)
        if asked is None and self.depth.by_prompt is not None:
            return self._by_row(call)
        if asked is not None:
            controls = asked
        if threshold is None and controls is self._noted:
            return controls
        complete = self._complete(before, after)
        if asked is not None:
            if (late := asked.layers & ~complete).any():
                layer = int(late.argmax())
                row = int((self._lacks[layer] < before).argmax())
                name = RUN_LAYERS if self.depth.mlp is None else RUN_ATTN
                raise InputError(
                    f"{name}: layer {layer} was skipped for token {self._lacks[layer, row]} of row {row} "
                    "and lacks its keys; skip it, rewind to that token, or build with "
                    'cache = "propagate"'
                )
        elif not complete[controls.layers].all():
            both = controls.layers & complete
            layers = both if both.any() or controls.mlp is not None else complete
            controls = replace(controls, layers=layers)
        return (
            controls if threshold is None else replace(controls, threshold=self._limit(threshold))
        )

    @staticmethod
    def _decodes(call: Call) -> bool:
        """Whether a call is of single tokens after a prompt."""
        return not call.prompt and bool(
            (call.after - call.before).max() == 1 and call.before.min() > 0
        )

    @staticmethod
    def _after_prompts(call: Call) -> npt.NDArray[np.bool_]:
        """The rows [B] whose token is a single one after a prompt, whatever others run."""
        found: npt.NDArray[np.bool_] = (call.after - call.before == 1) & (call.before > 0)
        return found & (not call.prompt)

    def _by_row(self, call: Call) -> Controls:
        """Each row's own layers: of a prompt all, after it those that its scores choose; without those that it lacks.
        One that comes again is the same object.
        """
        assert self.depth.by_prompt is not None
        rows = (self._lacks >= call.before).T | (call.after == call.before)[:, None]
        after = self._after_prompts(call)
        if after.any():
            rows = rows & (self._routes.chosen(self.depth.by_prompt) | ~after[:, None])
        runs = rows[call.after > call.before]
        found = Controls(runs.any(0) if len(runs) else rows.any(0), rows=rows)
        return self._sent if self._sent is not None and self._sent.same(found) else found

    def before(self, backend: BackendSession, width: int) -> Collection[str]:
        """See CallWatcher: scores of prompts."""
        return (ROUTE,) if self.depth.by_prompt is not None and self._asks.any() else ()

    def after(self, tokens: Ints, positions: Ints, extra: Arrays) -> None:
        """See CallWatcher."""
        if ROUTE in extra and self.depth.by_prompt is not None:
            self._routes.note(positions, extra[ROUTE], self._asks)

    def _turn(self, before: Ints, after: Ints) -> int:
        """Which of the plans of decoding runs, for the row that is nearest to its prompt."""
        if not self._turns.size:
            return 0
        nearest = self._nearest(before, after)
        return int(np.searchsorted(self._turns, nearest, side="right"))

    def _nearest(self, before: Ints, after: Ints) -> int:
        """How far the row that is nearest to its prompt is from it, in tokens."""
        return int((before - self._prompt)[after > before].min())

    def _asked_for(self, controls: Mapping[str, Any], usual: Controls) -> Controls | None:
        """What the caller's plan sends; none where there is none. One that comes again is the same object."""
        given = {n: self._checked(n, controls[n]) for n in _PLANS if controls.get(n) is not None}
        if not given:
            return None
        if RUN_LAYERS in given:
            if len(given) > 1:
                raise InputError("run_layers: give it alone, or run_attn and run_mlp in its place")
            layers = given[RUN_LAYERS]
            mlp = None if self.depth.mlp is None else layers
        else:
            if self.depth.mlp is None:
                raise InputError(NO_BRANCHES)
            layers, mlp = given.get(RUN_ATTN, usual.layers), given.get(RUN_MLP, usual.mlp)
        if not layers.any() and (mlp is None or not mlp.any()):
            raise InputError(f"{next(iter(given))} skips every layer; at least one must run")
        asked = Controls(layers, usual.threshold, mlp)
        if not self._asked.same(asked):
            self._asked = asked
        return self._asked

    def settle(self, backend: BackendSession, moment: str, lengths: Ints) -> Settled | None:
        """Note what the call that was sent last left out."""
        controls, rows = self._sent, lengths > self._before
        if moment == "call" and not self._decoding:
            self._prompt = np.where(rows, lengths, self._prompt)
        if moment != "call" or controls is None or controls is self._noted:
            return None
        if self.depth.cache == NESTED:
            ran = controls.layers[:, None]
            ran = ran if controls.rows is None else ran & controls.rows.T
            out = ~ran & rows
            self._lacks = np.where(out, np.minimum(self._lacks, self._before), self._lacks)
        self._noted = controls if rows.all() else None
        return None

    def rewind(self, backend: BackendSession, new_lengths: Ints, lengths: Ints) -> bool:
        """Rows hold no more than `new_lengths` [B] tokens from now on."""
        self._lacks[self._lacks >= new_lengths] = _FAR
        self._prompt = np.minimum(self._prompt, new_lengths)
        self._routes.cut(new_lengths)
        self._noted = None
        return False

    def complete(self, lengths: Ints) -> bool:
        """Whether each layer's cache holds the first `lengths` [B] tokens of each row."""
        return bool((self._lacks >= lengths).all())

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

    def _checked(self, name: str, value: Any) -> npt.NDArray[np.bool_]:
        """A plan [L]."""
        count = len(self.depth.plan)
        try:
            plan = np.asarray(value)
        except ValueError:  # ragged lists
            plan = np.empty(0)
        if plan.dtype != np.bool_ or plan.shape != (count,):
            raise InputError(
                f"{name} is {plan.dtype} {list(plan.shape)}; give {count} bools, one per layer, true "
                "where the layer runs"
            )
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
