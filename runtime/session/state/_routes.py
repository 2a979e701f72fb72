"""What routers said of the tokens of prompts, by which each row's layers are chosen for what comes after."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from accel.runtime.inputs.ints import Ints
from accel.runtime.rows import ByRow, Rows

Scores = npt.NDArray[np.float32]


class Routes(Rows):
    """The scores of each token and layer. Of tokens that came after a prompt, and of pads, there are none."""

    scores: Annotated[Scores, ByRow(fill=float("nan"))]  # [B,N,L]

    def __init__(self, batch: int, layers: int):
        self.scores = np.full((batch, 0, layers), np.nan, np.float32)
        self._known: tuple[Scores, float, npt.NDArray[np.bool_]] | None = None

    def note(self, positions: Ints, scores: npt.NDArray[Any], rows: npt.NDArray[np.bool_]) -> None:
        """Scores [B,T,L] of tokens at `positions` [B,T] (-1: padding); of these rows [B] alone."""
        at = np.where(rows[:, None], positions, -1)
        batch, count, layers = self.scores.shape
        if (more := int(at.max(initial=-1)) + 1 - count) > 0:
            new = np.full((batch, more, layers), np.nan, np.float32)
            self.scores = np.concatenate([self.scores, new], 1)
        self._known = None
        row, column = np.nonzero(at >= 0)
        self.scores[row, at[row, column]] = scores[row, column]

    def cut(self, lengths: Ints) -> None:
        """Rows go back to so many tokens [B]."""
        self._known = None
        late = np.arange(self.scores.shape[1]) >= lengths[:, None]
        self.scores[late] = np.nan

    def chosen(self, least: float) -> npt.NDArray[np.bool_]:
        """Of each row the layers [B,L] whose mean score is at least so much; all, where none is known. The first and
        the last always are.
        """
        if self._known is not None and self._known[0] is self.scores and self._known[1] == least:
            return self._known[2]
        known = np.isfinite(self.scores)
        total = np.where(known, self.scores, 0).sum(1, dtype=np.float64)
        count = known.sum(1)
        found: npt.NDArray[np.bool_] = (total >= least * count) | (count == 0)
        found[:, [0, -1]] = True
        self._known = self.scores, least, found
        return found
