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

from accel.lowering import triton as target

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
    """A kernel that only writes its results, with the names of those operands that say which choice is best."""

    def __init__(self, kernel: Any, key: Sequence[str]):
        self._kernel, self._key = kernel, key
        self._tuner: Any = None
        self._candidates: Sequence[Choice] = ()

    def __call__(
        self,
        grid: Callable[[Mapping[str, Any]], tuple[int, ...]],
        candidates: Sequence[Choice],
        *args: Any,
        **constants: Any,
    ) -> Choice:
        """Launch the best candidate, and say which that was; the first where nothing is measured. `grid`: of the
        constants.
        """
        if len(candidates) == 1 or not LIMIT or _unmeasured():
            chosen = candidates[0]
            self._kernel[grid({**constants, **chosen.constants})](
                *args, **constants, **chosen.options
            )
            return chosen
        global _spent
        with _LOCK:
            self._candidates = candidates if _spent < LIMIT else candidates[:1]
            tuner, start = self._made(), time.monotonic()
            known = len(tuner.cache)
            tuner[grid](*args, **constants)
            if len(tuner.cache) > known:
                torch.cuda.synchronize()
                _spent += time.monotonic() - start
            best = tuner.best_config
            return Choice(best.kwargs, best.num_warps, best.num_stages)

    def _made(self) -> Any:
        """The autotuner; which candidates it measures, the launch says."""
        if self._tuner is None:
            from triton import Config, autotune

            def candidates(*_: Any, **__: Any) -> list[Any]:
                return [
                    Config(dict(c.constants), c.num_warps, c.num_stages) for c in self._candidates
                ]

            given = {"early_config_prune": candidates}
            several = [Config({}), Config({}, 1)]  # with one alone it measures nothing
            how = autotune(several, list(self._key), given, cache_results=True)
            self._tuner = how(self._kernel)
        return self._tuner


def _unmeasured() -> bool:
    return target.interpreted() or torch.cuda.is_current_stream_capturing()
