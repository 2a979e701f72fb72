"""SkipDecode (arXiv:2307.02628): the further a token is from its prompt, the fewer layers it runs; layers between the
lowest and the top go, from below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from accel.ir.axis import option
from accel.ir.depth import CACHES, NESTED, Depth
from accel.ir.errors import PassError, RecipeError
from accel.ir.invariants import Invariant
from accel.ir.program import Program
from accel.passes import Report
from accel.passes.depth import Base
from accel.passes.depth._delete import ANOTHER, no_adapters
from accel.passes.depth._joint import conditions, layers
from accel.passes.depth._remove import remove


@dataclass(frozen=True)
class Skipdecode(Base):
    """A prompt and the first token after it run `max_layers` layers (0: all). The number falls in equal steps to
    `min_layers` (0: half of the model's), reached `length` tokens later: give about half of the length of usual
    answers, or all of it. The `warmup` layers at the bottom always run, and of the others those at the top.

    Layers that not even a prompt runs are deleted, with weights and caches. The paper finetunes with these layers.
    """

    max_layers: int = option(0, least=0)
    min_layers: int = option(0, least=0)
    warmup: int = option(1, least=1)
    length: int = option(256, least=1, most=1 << 20)
    cache: str = option(NESTED, one_of=CACHES)
    small: ClassVar[Mapping[str, Any]] = {"min_layers": 2, "length": 6}

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.min_layers <= self.warmup:
            raise RecipeError(
                f"{self.full_name}: min_layers is {self.min_layers}, but {self.warmup} of warmup and the last layer "
                f"always run; give at least {self.warmup + 1}, or 0 for half of the layers"
            )
        if 0 < self.max_layers < max(self.min_layers, self.warmup + 1):
            raise RecipeError(
                f"{self.full_name}: max_layers is {self.max_layers}; give at least min_layers and more than warmup, "
                f"{max(self.min_layers, self.warmup + 1)}, or 0 for all layers"
            )

    @property
    def breaks(self) -> frozenset[Invariant]:
        """With layers that even a prompt leaves out, others are beside each other."""
        return super().breaks | ({Invariant.FIXED_LAYERS} if self.max_layers else set())

    @property
    def error(self) -> float:  # type: ignore[override]
        """With layers deleted it is another model."""
        return ANOTHER if self.max_layers else super().error

    def run(self, program: Program) -> Report:
        """See Pass."""
        count = len(program.facts.layers)
        most, fewest = self.max_layers or count, self.min_layers or count // 2
        if not self.warmup < fewest <= most <= count:
            raise PassError(
                f"skipdecode: of {count} layers {most} run at first and {fewest} at last, with {self.warmup} at the "
                f"bottom always; give a min_layers of more than warmup, and at most max_layers, and a max_layers of "
                f"at most {count}"
            )
        if most < count:
            no_adapters(program, self.use)
            remove(program, layers(program), range(self.warmup, self.warmup + count - most))
        calls = conditions(program, self.cache)
        until = durations(most, fewest, self.warmup, self.length)
        plan = tuple(i < self.warmup or i >= most - fewest + self.warmup for i in range(most))
        program.facts.depth = Depth(plan, self.cache, until=until)
        return Report(changed=len(calls))


def counts(most: int, fewest: int, length: int) -> np.ndarray[Any, Any]:
    """How many layers each of `length` tokens after a prompt runs, int [length]; those after them run the fewest."""
    share = np.arange(length) / length
    found: np.ndarray[Any, Any] = np.floor(most - (most - fewest) * share + 0.5).astype(int)
    return found


def durations(most: int, fewest: int, warmup: int, length: int) -> tuple[int, ...]:
    """Of each of `most` layers, for how many tokens it runs before the fewest do without it; 0 where they run it."""
    run = counts(most, fewest, length)
    needed = [most - i + warmup for i in range(most)]  # to run layer i, so many layers must run
    return tuple(
        int((run >= n).sum()) if i >= warmup and n > fewest else 0 for i, n in enumerate(needed)
    )
