"""What is said of a draft before it is verified: H-RAD of SpecBranch (arXiv:2506.01979), by hidden states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.ir.errors import InputError
from accel.ir.taps import stream
from accel.runtime.decode.row import Row
from accel.runtime.draft._streams import Streams
from accel.runtime.session.session import Session

LAYERS = 4  # of the target, whose outputs are read
Floats = npt.NDArray[np.float32]


class Fate(IntEnum):
    """How many tokens of a draft stand."""

    NONE = 0
    SOME = 1
    ALL = 2

    @classmethod
    def of(cls, drafted: int, stood: int) -> Fate:
        """Of a draft that was verified."""
        return cls.ALL if stood == drafted else cls.SOME if stood else cls.NONE


class Foresight:
    """Says of every draft that some of it stands. A subclass looks."""

    def fate(self, row: int, token: int) -> Fate:
        """Of a draft of a row whose newest token this is; the target did not run it yet."""
        return Fate.SOME

    def observe(self, row: int, drafted: int, stood: int) -> None:
        """So many tokens of the row's last draft stood."""

    def close(self) -> None:
        """Nothing is heard from now on."""


def taps_of(layers: int) -> Sequence[str]:
    """What is read of a model of so many layers: the outputs of its last ones."""
    return [stream(layer) for layer in range(max(0, layers - LAYERS), layers)]


class Heard(Foresight):
    """What the target computed for each row's last token that it ran, beside the embedding of the newest one.

    most: tokens of a draft.
    """

    def __init__(self, session: Session, rows: Sequence[Row], names: Sequence[str], most: int):
        self._session, self._rows, self._names = session, rows, names
        self._streams = Streams()
        self._streams.ask(names, 1 + most)
        session.listen(self._streams)

    def read(self, row: int, token: int) -> Floats | None:
        """What the predictor reads [F]; None where the last token ran in another way than by a step."""
        positions, heard = self._streams.of(row)
        at = np.flatnonzero(positions == self._rows[row].seen.size - 2)
        if not at.size:
            return None
        embedding = self._session.embed(np.full((1, 1), token))[0, 0]
        parts = [heard[name][at[-1]] for name in self._names]
        return np.concatenate([*parts, embedding]).astype(np.float32)

    def close(self) -> None:
        """See Foresight."""
        with suppress(InputError):  # of a session that a failed call closed
            self._session.unlisten(self._streams)


def classes(part: Mapping[str, Any], x: Any) -> Any:
    """The predictor's logits [N,3] of what it reads [N,F]: of arrays, or of torch's tensors to learn by."""
    for name in ("first", "second"):
        x = x @ part[name] + part[f"{name}.bias"]
        x = x * (x > 0)
    return x @ part["last"] + part["last.bias"]


class Predictor(Heard):
    """By a trained part: its likeliest class."""

    def __init__(
        self,
        part: Mapping[str, Any],
        session: Session,
        rows: Sequence[Row],
        names: Sequence[str],
        most: int,
    ):
        super().__init__(session, rows, names, most)
        self._part = {name: tensor.astype(np.float32) for name, tensor in part.items()}

    def fate(self, row: int, token: int) -> Fate:
        """See Foresight."""
        x = self.read(row, token)
        return Fate.SOME if x is None else Fate(int(classes(self._part, x[None])[0].argmax()))
