"""What methods share that reuse parts of earlier prompts, at other positions and behind other texts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from accel.ir.axis import option
from accel.ir.invariants import Invariant
from accel.runtime.inputs.ints import Bools
from accel.runtime.kv.reuse import Base
from accel.runtime.kv.reuse._store import Piece

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Pieces(Base):
    """Prompts of a model's sessions are stored, up to `tokens` tokens in all. Of a later prompt, runs of `least` tokens
    or more that are stored are not computed again in the layers behind `layer`, but for a `ratio` of them.

    layer: the layer that tells which tokens are stale; -1: the second, or the first of two.
    """

    ratio: float = option(0.16, least=0, most=1)
    layer: int = option(-1, least=-1)
    least: int = option(16, least=1, most=4096)
    tokens: int = option(1 << 15, least=1, most=1 << 24)

    relies = Base.relies | {
        Invariant.ALL_LAYERS_RUN,
        Invariant.ALL_TOKENS_HELD,
        Invariant.CALL_INDEPENDENT,
        Invariant.PLAIN_KEYS,
        Invariant.TOKENS_CONTIGUOUS,
        Invariant.UNIFORM_SLOTS,
    }
    breaks = frozenset(
        {Invariant.BATCH_INVARIANCE, Invariant.EVERY_TOKEN_RUNS, Invariant.ROW_PRIVATE}
    )
    grade = "approximate"
    attention: ClassVar[bool] = False  # whether `stale` reads it

    def steps(self) -> list[Any]:
        from accel.passes.kv._shared.shift import Shift
        from accel.passes.prefill.prune._blend import Blend

        what = f"kv.reuse = {self.use}"
        return [Shift(what), Blend(what, self.layer, self.attention)]

    @abstractmethod
    def pieces(self, matches: Sequence[Piece]) -> list[Piece]:
        """Of all stored runs that a prompt has those that are used, in order, without overlap."""

    @abstractmethod
    def stale(self, deviation: Floats, drawn: Floats) -> Bools:
        """Which of the n reused tokens are computed again: by the squared distance [n] of their fresh keys and values
        at `layer` from the stored ones, and the attention [n] that the tokens which are not reused pay to them there
        (0 unless `attention`).
        """

    def watched(self, deviation: Floats) -> Bools:
        """Which of the n tokens that stay as they are, of this deviation [n], may be computed again in later calls."""
        return np.zeros(deviation.size, bool)

    def repaired(self, share: Floats) -> Bools:
        """Which of the n watched tokens are computed again before a token whose attention goes to them by these shares
        [n], of 1 in all.
        """
        return np.zeros(share.size, bool)


def best(worth: Floats, share: float) -> Bools:
    """The `share` of tokens with the highest worth [n]; of equals the first."""
    most = int(share * worth.size + 1e-9)
    found = np.zeros(worth.size, bool)
    found[np.argsort(-worth, kind="stable")[:most]] = True
    return found
