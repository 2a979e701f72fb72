"""Calls that recur, recorded over inputs that stay in one place and replayed: on a GPU as CUDA graphs."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

MOST = 16  # recordings that are held at once
_SEEN = 256  # forms of calls that are remembered
_GIVES_UP = 3  # recordings that were refused, with none that was not, after which no more are tried
Outputs = tuple[Tensor, ...]


class Recording(Protocol):
    """A call over fixed memory. `out`: what it gives; each replay writes over it."""

    out: Outputs

    def replay(self) -> None:
        """Run it again, on what its inputs hold now."""


Recorder = Callable[[Callable[[], Outputs]], Recording]
"""Records a call, which may compute nothing while it is recorded. Raises RuntimeError where it cannot be recorded."""


@dataclass(frozen=True)
class _Held:
    inputs: Tensor
    recording: Recording


class Recorded:
    """The calls of a session, by what they have in common (`key`): the first of a key runs as it is, which compiles its
    kernels; the second is recorded; from there on it is replayed. The recordings that were used last are held, `most`
    of them. A call that cannot be recorded runs as it is.
    """

    def __init__(self, recorder: Recorder, device: str, most: int = MOST):
        self._recorder, self._device, self._most = recorder, device, most
        self._held: OrderedDict[Hashable, _Held] = OrderedDict()
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._refused: dict[Hashable, str] = {}
        self._any = False  # whether anything was recorded

    @property
    def refused(self) -> dict[Hashable, str]:
        """The calls that could not be recorded, and why."""
        return dict(self._refused)

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._held

    def drop(self) -> None:
        """Buffers that calls work on have moved: recordings are of no use, and kernels may be compiled anew."""
        self._held.clear()
        self._seen.clear()

    def __call__(self, key: Hashable, inputs: Tensor, run: Callable[[Tensor], Outputs]) -> Outputs:
        """What `run` gives on the device for inputs, uint8 [n] on the host; the next call of the key may write over
        it.
        """
        held = self._held.get(key)
        if held is None and self._may(key):
            held = self._record(key, inputs, run)
        if held is None:
            return run(inputs.to(self._device, non_blocking=True))
        self._held.move_to_end(key)
        held.inputs.copy_(inputs, non_blocking=True)
        held.recording.replay()
        return held.recording.out

    def _may(self, key: Hashable) -> bool:
        """Whether a call of this key is to be recorded now."""
        if key in self._refused or (not self._any and len(self._refused) >= _GIVES_UP):
            return False
        if key in self._seen:
            return True
        self._seen[key] = None
        if len(self._seen) > _SEEN:
            self._seen.popitem(last=False)
        return False

    def _record(
        self, key: Hashable, inputs: Tensor, run: Callable[[Tensor], Outputs]
    ) -> _Held | None:
        place = inputs.to(self._device, copy=True)
        while len(self._held) >= self._most:
            self._held.popitem(last=False)
        try:
            recording = self._recorder(lambda: run(place))
        except RuntimeError as error:
            self._refused[key] = str(error)
            return None
        self._any = True
        self._held[key] = _Held(place, recording)
        return self._held[key]


class _CudaRecording:
    def __init__(self, graph: Any, out: Outputs):
        self._graph, self.out = graph, out

    def replay(self) -> None:
        self._graph.replay()


class CudaRecorder:
    """Records CUDA graphs, which share their memory: what one gives stays until it is replayed itself."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: Any = None

    def __call__(self, run: Callable[[], Outputs]) -> Recording:
        if self._stream is None:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        graph, stream, current = torch.cuda.CUDAGraph(), self._stream, torch.cuda.current_stream()
        out: Outputs = ()
        failed: RuntimeError | None = None
        collecting = gc.isenabled()
        gc.disable()  # nothing is to be freed in the middle
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    out = run()
                except RuntimeError as error:
                    failed = error
                finally:
                    try:
                        graph.capture_end()
                    except RuntimeError as error:  # what could not be recorded spoils the rest
                        failed = failed or error
        finally:
            if collecting:
                gc.enable()
        current.wait_stream(stream)
        if failed is not None:
            self._pool = self._stream = None  # which it may have spoilt, too
            raise RuntimeError(f"no CUDA graph: {str(failed).splitlines()[0]}") from failed
        return _CudaRecording(graph, out)


def recorder(device: str) -> Recorder | None:
    """What records calls on a device; None where nothing does."""
    return CudaRecorder() if device == "cuda" else None
