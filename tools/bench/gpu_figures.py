"""Figures of tools/bench/bench_gpu.py as they come, and what a call takes."""

from __future__ import annotations

import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

TINY = os.environ.get("GPU_BENCH_TINY") == "1"
CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
DEVICE = "cuda" if CUDA else "cpu"
CONTEXTS = (16, 24) if TINY else (512, 8192, 32768)
BATCHES = (1, 2) if TINY else (1, 8, 64)
STEPS = 2 if TINY else 24
WARM = 1 if TINY else 3  # steps that compile, record and replay for the first time


class Figures:
    """Writes figures as they come, until a time is over."""

    def __init__(self, file: Path, seconds: float):
        self._file, self._until = file.open("a"), time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds."""
        return self._until - time.monotonic()

    def add(self, what: str, value: Any, unit: str = "", note: str = "") -> None:
        """One figure, on a line."""
        print(
            json.dumps({"what": what, "value": value, "unit": unit, "note": note}),
            file=self._file,
            flush=True,
        )

    @contextmanager
    def trying(self, what: str, seconds: float = 0.0) -> Iterator[bool]:
        """Figures of one thing: where they fail, the reason stands in their place. Yields whether there is time."""
        if self.left < seconds:
            self.add(what, "not measured", "", f"no time: {seconds:.0f} s are needed")
        try:
            yield self.left >= seconds
        except Exception as error:
            said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            self.add(what, "not measured", "", said)
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()


def steps_of(run: Callable[[], Any], count: int = STEPS) -> tuple[float, float]:
    """Seconds of a call: the median, and the least."""
    for _ in range(WARM):
        run()
    found = []
    for _ in range(count):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return statistics.median(found), min(found)


def on_device(run: Callable[[], Any], count: int = 20) -> float:
    """Seconds that a call takes on the device, of the best of several."""
    for _ in range(WARM):
        run()
    if not CUDA:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    pairs = []
    for _ in range(count):
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        pair[0].record()
        run()
        pair[1].record()
        pairs.append(pair)
    torch.cuda.synchronize()
    return min(a.elapsed_time(b) for a, b in pairs) / 1e3
