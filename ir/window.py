"""What layers with a window keep, as a manifest has it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accel.ir.fields import Positive

if TYPE_CHECKING:  # facts are read by commands that need no numpy
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

SLOTS = "C1"  # the size of their state, over slots of their own
STAGE = 1  # whose positions are those of these slots


@dataclass(frozen=True)
class Window:
    """Layers with a window have slots of their own. Where a call would need more than `most` of them, all tokens but
    the newest `tokens_kept` are dropped before it.

    size: the most tokens that a query sees, its own among them. back: so many of the newest tokens can always be
    rewound.
    """

    size: Positive
    back: Positive

    @property
    def tokens_kept(self) -> int:
        """Tokens that stay: what the next token sees, and what it sees where `back` tokens are taken back."""
        return self.size - 1 + self.back

    @property
    def most(self) -> int:
        """Slots that calls of a few tokens fill, so that room is made once in more than `back` tokens."""
        return self.size + 2 * self.back

    def stay(self, lengths: Ints, width: int) -> Ints:
        """Of `lengths` [B] tokens of rows, how many stay as a call of `width` tokens begins."""
        import numpy as np

        return np.where(
            lengths + width <= self.most, lengths, np.minimum(lengths, self.tokens_kept)
        )

    def slots(self, calls: Iterable[int]) -> int:
        """Slots of one row that calls of these numbers of tokens need."""
        import numpy as np

        held, need = np.zeros(1, np.int64), 0
        for width in calls:
            held = self.stay(held, width) + width
            need = max(need, int(held[0]))
        return need
