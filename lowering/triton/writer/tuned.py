"""Launches whose tiles, splits and warps are measured, once for each device and shape, by Triton's autotuner.

It keeps what it found in Triton's cache on disk. In the interpreter, while a CUDA graph is recorded, and once a model
has taken LIMIT seconds, the first candidate is launched unmeasured.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from accel.lowering.triton.writer.sizes import power

LIMIT = 60.0  # seconds of measurements of one model; 0: nothing is measured
_LOCK = threading.Lock()  # an autotuner holds the operands of the launch that it measures
_spent = 0.0


@dataclass(frozen=True)
class Choice:
    """A way to launch a kernel: values of its constants, and how it is compiled."""

    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2

    def __getitem__(self, name: str) -> Any:
        return self.constants[name]

    @property
    def options(self) -> dict[str, Any]:
        """As a launch takes them."""
        return {**self.constants, "num_warps": self.num_warps, "num_stages": self.num_stages}


def begin() -> None:
    """Another model: it has LIMIT seconds of its own."""
    global _spent
    _spent = 0.0


class Tuned:
    """A kernel that only writes its results; `key`: the operands that say which choice is best, beside the dtypes;
    `near`: those of which only the next power of two counts.
    """

    def __init__(self, kernel: Any, key: Sequence[str], near: Sequence[str] = ()):
        self._kernel, self._key, self._near = kernel, [*key, *near], frozenset(near)
        self._tuner: Any = None
        self._candidates: Sequence[Choice] = ()
        self._known: dict[tuple[Any, ...], int] = {}  # the place of the best candidate

    def __call__(
        self,
        grid: Callable[[Mapping[str, Any]], tuple[int, ...]],
        candidates: Sequence[Choice],
        *args: Any,
        **constants: Any,
    ) -> Choice:
        """Launch the best candidate, and say which that was. `grid`: of the constants.

        What is known of a key is a place among its candidates, which may be of other sizes in another launch.
        """
        named = {**dict(zip(self._kernel.arg_names, args, strict=False)), **constants}
        dtypes = (str(a.dtype) for a in args if isinstance(a, Tensor))
        said = (power(named[n]) if n in self._near else named[n] for n in self._key)
        key = (*said, *dtypes)
        with _LOCK:
            if key not in self._known and len(candidates) > 1 and _may_measure():
                self._known[key] = self._measured(grid, candidates, args, constants)
            place = self._known.get(key, 0)
        chosen = candidates[place if place < len(candidates) else 0]
        options = chosen.options
        self._kernel[grid({**constants, **options})](*args, **constants, **options)
        return chosen

    def _measured(
        self,
        grid: Callable[[Mapping[str, Any]], tuple[int, ...]],
        candidates: Sequence[Choice],
        args: tuple[Any, ...],
        constants: dict[str, Any],
    ) -> int:
        """The place of the best, by the autotuner; what it takes counts."""
        global _spent
        start = time.monotonic()
        self._candidates = [c for i, c in enumerate(candidates) if c not in candidates[:i]]
        if self._tuner is None:
            self._tuner = self._autotuner()
        self._tuner[grid](*args, **constants)
        best = self._tuner.best_config
        _spent += time.monotonic() - start
        found = Choice(best.kwargs, best.num_warps, best.num_stages)
        return candidates.index(found) if found in candidates else 0

    def _autotuner(self) -> Any:
        """Which candidates it measures, each launch says."""
        from triton import Config, autotune

        def candidates(*_: Any, **__: Any) -> list[Any]:
            return [Config(dict(c.constants), c.num_warps, c.num_stages) for c in self._candidates]

        several = [Config({}), Config({}, 1)]  # with one alone it measures nothing
        given = {"early_config_prune": candidates}
        tuned = autotune(several, self._key, prune_configs_by=given, cache_results=True)
        return tuned(self._kernel)


def _may_measure() -> bool:
    from triton import knobs

    if knobs.runtime.interpret or _spent >= LIMIT:
        return False
    return torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing()
