"""What a session does about a recipe that keeps keys of a prompt in fewer directions: it finds these, when one ends."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.ir.entries.factor import FACTOR, directions_of
from accel.ir.entries.squares import SQUARES, squares_of
from accel.ir.low_rank import LowRank
from accel.ir.state import Part, name_of
from accel.runtime.backends.onnx.mapped import put_away
from accel.runtime.backends.protocol import BackendSession
from accel.runtime.call import Arrays
from accel.runtime.inputs.ints import Ints
from accel.runtime.rows import PerRow
from accel.runtime.session.observers.observer import (
    CallWatcher,
    Capabilities,
    ModelParts,
    ObserverFactory,
    SessionObserver,
    Settled,
)

_TOKENS = 4096  # of a prompt, whose keys are in memory at once


class KeyDirections(SessionObserver, CallWatcher):
    """Of how many first tokens of each row the state has keys in fewer directions.

    Those of all tokens that a row has at the end of a prompt: the directions are the singular vectors of their keys, as
    eigenvectors of the sum of outer products, in float64. What a rewind takes tokens of keeps its directions. Exact
    keys, which lie in files, are then dropped from memory; a step reads some of them again.
    """

    _coded: PerRow
    _known: PerRow  # what the state says of it

    capabilities = Capabilities(chunks=False)

    def __init__(self, plan: LowRank, batch: int):
        self.plan = plan
        self._coded = self._known = np.zeros(batch, np.int64)

    @classmethod
    def for_model(cls, model: ModelParts) -> ObserverFactory | None:
        """Where the recipe has keys in fewer directions."""
        plan = model.facts.low_rank
        return ObserverFactory(lambda n: cls(plan, n)) if plan is not None else None

    def before(self, backend: BackendSession, width: int) -> Collection[str]:
        """Tell the state what a rewind took, before a token is written over it."""
        if (self._known != self._coded).any():
            none = np.zeros_like(self._coded)
            blank = {
                layer: np.zeros((none.size, *shape), np.float32)
                for layer, shape in self.plan.shapes.items()
            }
            self._factor(backend, none, none, blank)
        return ()

    def settle(self, backend: BackendSession, moment: str, lengths: Ints) -> Settled | None:
        """Find the directions of rows that hold more than was coded, when a prompt ends."""
        due = lengths > self._coded
        if moment != "prompt" or not due.any():
            return None
        stop = np.where(due, lengths, 0)
        stretches = [
            (np.minimum(first, stop), np.minimum(first + _TOKENS, stop))
            for first in range(0, int(stop.max()), _TOKENS)
        ]
        squares: dict[int, Any] = dict.fromkeys(self.plan.layers, 0.0)
        for start, end in stretches:
            found = backend.part(SQUARES.name, _stretch(start, end))
            for layer in squares:
                squares[layer] = squares[layer] + found[squares_of(layer)].astype(np.float64)
        directions = {
            layer: _largest(squares[layer], *shape) for layer, shape in self.plan.shapes.items()
        }
        self._coded = np.where(due, lengths, self._coded)
        for start, end in stretches:
            self._factor(backend, start, end, directions)
        held = backend.buffers()
        names = (name_of(Part.KEYS, layer) for layer in self.plan.layers)
        put_away(held[name] for name in names if name in held)
        return None

    def undo(self, backend: BackendSession, lengths: Ints) -> bool:
        """See SessionObserver."""
        self._coded = np.minimum(self._coded, lengths)
        return False

    def rewind(self, backend: BackendSession, new_lengths: Ints, lengths: Ints) -> bool:
        """See SessionObserver."""
        self._coded = np.minimum(self._coded, new_lengths)
        return False

    def _factor(
        self,
        backend: BackendSession,
        start: Ints,
        stop: Ints,
        directions: dict[int, npt.NDArray[np.float32]],
    ) -> None:
        """Write the products of keys in slots start..stop-1 [B] with directions [B,G,R,D]."""
        told = {directions_of(layer): x for layer, x in directions.items()}
        backend.part(FACTOR.name, {**_stretch(start, stop), "coded": self._coded, **told})
        self._known = self._coded


def _largest(
    squares: npt.NDArray[np.float64], heads: int, rank: int, width: int
) -> npt.NDArray[np.float32]:
    """Of symmetric matrices [B,G D,G D] the eigenvectors of the R largest eigenvalues [B,G,R,D]."""
    found = np.linalg.eigh(squares)[1][..., ::-1][..., :rank]  # [B,G D,R]
    apart = found.reshape(len(squares), heads, width, rank).swapaxes(2, 3)
    return np.ascontiguousarray(apart, np.float32)


def _stretch(start: Ints, stop: Ints) -> Arrays:
    count = max(1, int((stop - start).max()))
    return {"start": start, "stop": stop, "ranks": np.arange(count)}
