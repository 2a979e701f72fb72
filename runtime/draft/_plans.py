"""Plans of drafts that leave out attentions and MLPs apart: which of a model's branches a drafted token runs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.ir.depth import RUN_ATTN, RUN_MLP
from accel.ir.errors import InputError
from accel.runtime.decode.context import DecodeContext

Flags = npt.NDArray[np.bool_]
Branch = tuple[str, int]  # RUN_ATTN or RUN_MLP, and the layer


@dataclass(frozen=True, eq=False)
class Plan:
    """The layers whose attention, and those whose MLP, a drafted token runs [L]."""

    attn: Flags
    mlp: Flags

    @classmethod
    def without(cls, branches: Collection[Branch], layers: int) -> Plan:
        """All but some branches, of a model of so many layers."""
        return cls(
            *(
                np.array([(kind, i) not in branches for i in range(layers)], bool)
                for kind in (RUN_ATTN, RUN_MLP)
            )
        )

    @property
    def controls(self) -> dict[str, Any]:
        """What a call says that runs it (`Session.run`)."""
        return {RUN_ATTN: self.attn, RUN_MLP: self.mlp}

    @property
    def share(self) -> float:
        """Of the branches, those that run."""
        return float(np.concatenate([self.attn, self.mlp]).mean())


def every_second(layers: int) -> Iterator[Branch]:
    """The branches of layers 1, 3, 5 and so on, then of 2, 4, 6; without those of the first and the last layer."""
    for i in (*range(1, layers - 1, 2), *range(2, layers - 1, 2)):
        yield from ((RUN_ATTN, i), (RUN_MLP, i))


def layers_by_branch(context: DecodeContext, name: str) -> int:
    """The layers of the model that a drafter `name` runs in part. Raises InputError where no call chooses branches."""
    depth = None if context.model is None else context.model.facts.depth
    if depth is None or depth.mlp is None:
        raise InputError(
            f"{name} needs a model whose calls can leave out attentions and MLPs; build with depth = by-branch"
        )
    return len(depth.plan)
