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
    """A kernel that only writes its results; `key`: the operands that say which choice is best, beside the dtypes."""

    def __init__(self, kernel: Any, key: Sequence[str]):
        self._kernel, self._key = kernel, list(key)
        self._tuner: Any = None
        self._candidates: Sequence[Choice] = ()
        self._known: dict[tuple[Any, ...], Choice] = {}

    def __call__(
        self,
        grid: Callable[[Mapping[str, Any]], tuple[int, ...]],
        candidates: Sequence[Choice],
        *args: Any,
        **constants: Any,
    ) -> Choice:
        """Launch the best candidate, and say which that was. `grid`: of the constants."""
        named = {**dict(zip(self._kernel.arg_names, args, strict=False)), **constants}
        dtypes = (str(a.dtype) for a in args if isinstance(a, Tensor))
        key = (*(named[name] for name in self._key), *dtypes)
        with _LOCK:
            chosen = self._known.get(key, candidates[0])
            if key not in self._known and len(candidates) > 1 and _may_measure():
                chosen = self._known[key] = self._measured(grid, candidates, args, constants)
        options = chosen.options
        self._kernel[grid({**constants, **options})](*args, **constants, **options)
        return chosen

    def _measured(
        self,
        grid: Callable[[Mapping[str, Any]], tuple[int, ...]],
        candidates: Sequence[Choice],
        args: tuple[Any, ...],
        constants: dict[str, Any],
    ) -> Choice:
        """The best, by the autotuner; what it takes counts."""
        global _spent
        start, self._candidates = time.monotonic(), candidates
        if self._tuner is None:
            self._tuner = self._autotuner()
        self._tuner[grid](*args, **constants)
        best = self._tuner.best_config
        _spent += time.monotonic() - start
        return Choice(best.kwargs, best.num_warps, best.num_stages)

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
