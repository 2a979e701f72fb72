"""The Triton target: one compiled step per model, and per session state buffers that it writes in place.

On a GPU a decode step (one token, one row of logits) is captured once as a CUDA graph over these
buffers, and replayed: the host's work is then the same whatever the number of layers. Growing or
compressing the cache makes other buffers, and so another capture.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from accel.ir.adapters import ROWS
from accel.ir.entries.step import STEP
from accel.ir.errors import OutOfMemoryError
from accel.ir.state import Part
from accel.lowering.triton.lowered import Compiled, Lowered
from accel.runtime.backends.eager import EagerSession, outputs
from accel.runtime.backends.protocol import Compression, call_inputs
from accel.runtime.call import Embeds, Outputs
from accel.runtime.inputs.ints import Bools, Ints


class TritonBackend:
    """Sessions over one lowered program; they share its parameters on the device."""

    tuning = threads = cost_key = None

    def __init__(self, program: Lowered):
        self.program = program
        self.state, self.entries = program.state, program.entries

    def open_session(self, batch: int) -> TritonSession:
        """A backend session for `batch` rows with an empty cache."""
        return TritonSession(self.program, batch, self.program.device)

    def pool(self, shape: Sequence[int], dtype: str) -> DeviceArray:
        """See protocol.Backend. On the device: steps read blocks where they lie."""
        with room():
            return DeviceArray(
                torch.zeros(*shape, dtype=getattr(torch, dtype), device=self.program.device)
            )

    def close(self) -> None:
        """Let go of the parameters on the device; they are freed when the last session closes."""
        self.program.compiled = {}


@dataclass(frozen=True, eq=False)
class DeviceArray:
    """A tensor on the device that is read and written as an array of the host is, some of its first axis at a time."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """As an array has it."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """As an array has it."""
        return self.tensor.new_empty(0, device="cpu").numpy().dtype

    @property
    def nbytes(self) -> int:
        """As an array has it."""
        return self.tensor.nbytes

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, index: Any) -> npt.NDArray[Any]:
        """A copy on the host."""
        found: npt.NDArray[Any] = self.tensor[index].cpu().numpy()
        return found.copy() if self.tensor.device.type == "cpu" else found

    def __setitem__(self, index: Any, array: npt.NDArray[Any]) -> None:
        self.tensor[index] = torch.from_numpy(np.ascontiguousarray(array)).to(self.tensor.device)


@contextmanager
def room() -> Iterator[None]:
    """Raises OutOfMemoryError where the device has no memory left."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"{str(error).partition('.')[0]}. The device's memory ran out: give fewer or shorter prompts"
        ) from error


class TritonSession(EagerSession):
    """See protocol.BackendSession. State values are buffers on the device, which a step writes in place."""

    def __init__(self, program: Lowered, batch: int, device: str):
        super().__init__(program, batch, device)
        self._compiled = program.compiled[STEP.name]
        self._args: list[Any] = []  # of the step, in its order: state, and room for the rest
        self._decode = Decode(self._compiled) if device == "cuda" else None

    def adapt(self, arrays: Mapping[str, npt.NDArray[Any]], rows: npt.NDArray[Any]) -> None:
        """See protocol.BackendSession. They stay where they are, as the state does."""
        super().adapt(arrays, rows)
        self._bind()

    def resize(self, capacity: int, *later: int) -> None:
        """New buffers of `capacity` slots with the old contents."""
        with room():
            super().resize(capacity, *later)
        self._bind()

    def step(
        self,
        tokens: Ints,
        positions: Ints,
        slots: Ints,
        rows: Ints,
        want: Collection[str] = (),
        tree: Bools | None = None,
        embeds: Embeds | None = None,
    ) -> Outputs:
        """One run of the step entry. Where it fails, what it wrote lies in nobody's sight, as after a
        rewind; recurrent state changes only where it succeeds.
        """
        given = call_inputs(tokens, positions, slots, rows, tree, embeds)
        told = self._compiled.defaults | self._controls
        args = list(self._args)
        for name, place in self._places.items():
            args[place] = self._tensor(given[name]) if name in given else told[name]
        single = tokens.shape[1] == rows.shape[1] == 1
        with room():
            if single and self._decode is not None:
                found = self._decode(args, self._places.values())
            else:
                found = self._compiled(args)
        out = dict(zip(self._compiled.outputs, found, strict=True))
        return outputs(out, want)

    def encode(self, inputs: Mapping[str, npt.NDArray[Any]]) -> None:
        """One run of the encode entry."""
        with room():
            super().encode(inputs)
        self._bind()

    def buffers(self) -> dict[str, npt.NDArray[Any]]:
        """See protocol.BackendSession. Without pools, which are read by blocks."""
        pooled = {value.name for value in self._program.state if value.pooled}
        return {n: tensor.cpu().numpy() for n, tensor in self._state.items() if n not in pooled}

    def put(self, arrays: Mapping[str, Any]) -> None:
        """See protocol.BackendSession. A pool is used where it lies."""
        there = {n: a.tensor for n, a in arrays.items() if isinstance(a, DeviceArray)}
        with room():
            super().put({n: a for n, a in arrays.items() if n not in there})
        self._state = {**self._state, **there}
        self._bind()

    def compress(self, eviction: Compression, seen: Ints) -> None:
        """One run of the compress entry."""
        with room():
            super().compress(eviction, seen)
        self._bind()

    def forget(self, rows: npt.NDArray[np.bool_]) -> None:
        """See protocol.BackendSession."""
        super().forget(rows)
        self._bind()

    def restore(self, snapshot: Mapping[str, Any] | None, rows: Any) -> None:
        """See protocol.BackendSession. In place: the buffers stay where they are."""
        mask = self._tensor(rows)
        for value in self._program.state:
            if value.part is Part.RECURRENT:
                old = value.fill if snapshot is None else self._held(snapshot, value.name)[mask]
                self._state[value.name][mask] = old

    def snapshot(self) -> dict[str, Tensor]:
        """See protocol.BackendSession."""
        return {name: tensor.clone() for name, tensor in super().snapshot().items()}

    def copy(self, rows: Ints | None = None) -> EagerSession:
        """See protocol.BackendSession."""
        other = super().copy(rows)
        assert isinstance(other, TritonSession)
        other._bind()
        return other

    def move(self, rows: Ints, slots: tuple[int, int] | None) -> None:
        """See protocol.BackendSession. In place: the buffers stay where they are."""
        for name, tensor in self._of(rows).items():
            if tensor is not self._state[name]:
                self._state[name].copy_(tensor)
        if ROWS in self._adapters:
            self._adapters[ROWS].copy_(self._adapters[ROWS][self._tensor(rows)])

    def join(self, other: EagerSession) -> None:
        """See protocol.BackendSession."""
        super().join(other)
        self._bind()

    def leave(self, rows: Ints) -> None:
        """See protocol.BackendSession."""
        super().leave(rows)
        self._bind()

    def close(self) -> None:
        """Drop the state, and the graph over it."""
        super().close()
        self._bind()

    def _bind(self) -> None:
        """Let the step work on the buffers that there are now."""
        names, held = self._compiled.inputs, {**self._adapters, **self._state}
        self._args = [held.get(name) for name in names]
        self._places = {n: i for i, n in enumerate(names) if n not in held}
        if self._decode is not None:
            self._decode = Decode(self._compiled, self._decode.refused)


class Decode:
    """Calls of one shape over buffers that stay where they are: the first as it is, which compiles its
    kernels, from the second on as a CUDA graph.
    """

    def __init__(self, compiled: Compiled, refused: bool = False):
        """`refused`: a capture failed before, as where an operator asks the host; none is tried again."""
        self.refused = refused
        self._compiled = compiled
        self._warm = False
        self._graph: Any = None
        self._args: list[Any] = []
        self._out: tuple[Tensor, ...] = ()

    def __call__(self, args: list[Any], places: Iterable[int]) -> tuple[Tensor, ...]:
        """What the step gives; the next call writes over it. `places`: the args that are new each time."""
        if self.refused or not self._warm:
            self._warm = True
            return self._compiled(args)
        if self._graph is None:
            self._capture(args)
            if self.refused:
                return self._compiled(args)
        for i in places:
            self._args[i].copy_(args[i])
        self._graph.replay()
        return self._out

    def _capture(self, args: list[Any]) -> None:
        """Record a call; it computes nothing yet."""
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._out = self._compiled(args)
            except RuntimeError:
                self.refused = True
            finally:
                try:
                    graph.capture_end()
                except RuntimeError:  # what could not be captured spoils the capture
                    self.refused = True
        torch.cuda.current_stream().wait_stream(stream)
        self._graph, self._args = graph, args
