"""Learn2PD (arXiv:2509.25188): a small network learnt which guesses of a block are final."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from accel.ir.axis import option
from accel.ir.errors import InputError
from accel.ir.trained import Tensors
from accel.runtime.decode.row import Row
from accel.runtime.decode.trained_part import Sizes, TrainedPart, sizes_of
from accel.runtime.loop._blocks import Blocks, surest
from accel.runtime.loop._canvas import Guess, Place

END = ("none", "filled", "guessed")


@dataclass(frozen=True)
class Learn2pd(TrainedPart, Blocks):
    """Tokens stay that the network finds final with a probability above `threshold`, and always the surest. It reads
    how sure the model is of each mask of the block; of a slot that is filled it is sure. `trained`: its file, from
    `accel-compile train learn2pd`; empty: the one that a build finds. A file is for blocks of one size.

    `end`: where an end token is `filled`, nothing behind it is computed; or also where the surest of the masks that
    would hold one is `guessed` to: it then does.
    """

    threshold: float = option(0.96, least=0, most=1)
    end: str = option("none", one_of=END)
    trained: str = ""

    lacks = "what the model says of slots that are filled, which cached calls do not compute"
    key: ClassVar[str] = "learn2pd"

    @classmethod
    def sizes(cls, block: int, inner: int) -> Sizes:
        """Of the network's tensors."""
        return {
            "first": (block, inner), "first.bias": (inner,),
            "last": (inner, block), "last.bias": (block,),
        }  # fmt: skip

    @classmethod
    def expected(cls, tensors: Tensors) -> Sizes:
        """See TrainedPart."""
        first = sizes_of(tensors, "first")
        return cls.sizes(*(first if len(first) == 2 else (0, 0)))

    @classmethod
    def odds(cls, network: Mapping[str, Any], x: Any) -> Any:
        """The logarithm of the odds [N,K] that each slot's guess is final, by how sure the model is of each [N,K]: of
        arrays, or of torch's tensors to learn by.
        """
        x = x @ network["first"] + network["first.bias"]
        x = x * (x > 0)
        return x @ network["last"] + network["last.bias"]

    @property
    def network(self) -> Tensors:
        """Its tensors. Raises InputError where the file holds none for blocks of this size."""
        found = self.part
        if (size := found["first"].shape[0]) != self.block:
            raise InputError(
                f"{self.full_name}: block is {self.block}, but the part was trained for blocks of {size}; give "
                f"block = {size}, or train one by your recipe: accel-compile train RECIPE.toml MODEL"
            )
        return found

    def begin(self, row: Row) -> tuple[Tensors, Row]:
        return self.network, row

    def stays(self, guess: Guess, place: Place) -> Any:
        network, row = place.memory
        odds = self.odds(network, read(guess, place, self.block)[None])[0][
            guess.slots - place.first
        ]
        stays = surest(guess, 1 / (1 + np.exp(np.minimum(-odds, 80))) > self.threshold)
        if self.end == "guessed" and (ends := _ends(row, guess)).any():
            stays = np.union1d(stays, np.argmax(np.where(ends, guess.sure, -1)))
        return stays

    def cuts(self, guess: Guess, places: Any, place: Place) -> int | None:
        if self.end == "none":
            return None
        slots = guess.slots[places][_ends(place.memory[1], guess)[places]]
        return int(slots.min()) + 1 if slots.size else None


def read(guess: Guess, place: Place, block: int) -> npt.NDArray[np.float32]:
    """What the network reads of a call [K]: the largest probability at each mask of the block, 1 at the other slots."""
    found = np.ones(block, np.float32)
    found[guess.slots - place.first] = guess.probabilities.max(1)
    return found


def _ends(row: Row, guess: Guess) -> npt.NDArray[np.bool_]:
    """Which guesses would end the row."""
    return np.array([row.ends(token) for token in guess.tokens.tolist()], np.bool_)
