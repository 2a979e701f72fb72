"""Calls that give embeddings in place of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from accel.ir.entries.embed import EMBED, EMBEDS
from accel.ir.errors import InputError
from accel.runtime.backends.protocol import BackendSession
from accel.runtime.call import Call, Embeds
from accel.runtime.inputs.ints import Ints
from accel.runtime.session.observers.observer import (
    CallWatcher,
    EmbedsGiver,
    ModelParts,
    ObserverFactory,
    SessionObserver,
    Settled,
)


class GivenEmbeds(SessionObserver, CallWatcher, EmbedsGiver):
    """Holds the embeddings [B,T,E] of a call while its steps run."""

    controls: ClassVar[Mapping[str, str]] = {
        EMBEDS: "embeds: this model takes tokens alone; build it with a recipe whose method gives embeddings, such as "
        "superposed"
    }

    def __init__(self) -> None:
        self._rows: npt.NDArray[np.float32] | None = None
        self._width = 0  # of a row, once it is known
        self._before: Ints = np.zeros(0, np.int64)  # tokens of each row before the call

    @classmethod
    def for_model(cls, model: ModelParts) -> ObserverFactory | None:
        """Where the step takes them."""
        return ObserverFactory(lambda n: cls()) if EMBED.name in model.entries else None

    def begin(self, backend: BackendSession, call: Call) -> None:
        """See CallWatcher. Raises InputError where they are no numbers, or not one for each token."""
        self._rows = None
        if (rows := call.controls.get(EMBEDS)) is None:
            return
        if not self._width:
            blank = np.zeros((len(call.before), 1), np.int64)
            self._width = int(backend.part(EMBED.name, {"tokens": blank})["stream"].shape[2])
        given, shape = np.asarray(rows), (*call.tokens.shape, self._width)
        if given.dtype.kind != "f" or given.shape != shape:
            raise InputError(
                f"embeds are {given.dtype} {list(given.shape)}; give floats {list(shape)}, a row for each token of the "
                "call (session.embed gives those of tokens)"
            )
        if not np.isfinite(given).all():
            raise InputError("embeds hold numbers that are not finite; give finite ones")
        self._rows, self._before = np.ascontiguousarray(given, np.float32), call.before

    def embeds(self, positions: Ints, tree: bool = False) -> Embeds | None:
        """See EmbedsGiver."""
        if self._rows is None:
            return None
        if tree:
            return Embeds(self._rows, positions >= 0)
        columns = positions - self._before[:, None]
        mask = (positions >= 0) & (columns >= 0) & (columns < self._rows.shape[1])
        rows = np.take_along_axis(self._rows, np.where(mask, columns, 0)[:, :, None], 1)
        return Embeds(rows, mask)

    def settle(self, backend: BackendSession, moment: str, lengths: Ints) -> Settled | None:
        """See CallWatcher. What is no part of a call has its tokens."""
        if moment == "call":
            self._rows = None
        return None

    def undo(self, backend: BackendSession, lengths: Ints) -> bool:
        """See CallWatcher."""
        self._rows = None
        return False
