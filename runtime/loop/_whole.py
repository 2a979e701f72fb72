"""What loops share that ask, in one call, what every token of an answer is: of a model that sees both ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from accel.ir.errors import InputError
from accel.runtime.call import Logits
from accel.runtime.decode.row import Row
from accel.runtime.inputs.ints import Ints
from accel.runtime.session.modes.canvas import CanvasState
from accel.runtime.session.session import Session


def canvas_of(session: Session, loop: str) -> CanvasState:
    """What the session knows of its canvas. Raises InputError where the model does not see both ways."""
    canvas = session.observer(CanvasState)
    if canvas is None or canvas.diffusion is None:
        raise InputError(
            f"{loop} needs a model whose tokens see those after them, and this one decodes token by token; build it "
            "with loop = autoregressive"
        )
    return canvas


def written(session: Session, texts: Mapping[int, Ints]) -> Logits:
    """One call of the whole texts of some rows, [n] each: what the model gives for their tokens [B,T,…]."""
    counts = np.zeros(session.batch, np.int64)
    tokens = np.zeros((session.batch, max(ids.size for ids in texts.values())), np.int64)
    for row, ids in texts.items():
        counts[row], tokens[row, : ids.size] = ids.size, ids
    return session.write(tokens, 0, counts)


def check_greedy(rows: Sequence[Row], loop: str) -> None:
    """Raise InputError where a row samples."""
    if any(not row.sampler.greedy for row in rows):
        raise InputError(
            f"{loop} does not sample; leave temperature at 0, or build with another loop"
        )
