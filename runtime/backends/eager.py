"""A Program run by the reference of every operator: always works, and is the oracle for the other
targets.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from accel.ir.adapters import ROWS
from accel.ir.entries.commit import COMMIT
from accel.ir.entries.compress import COMPRESS
from accel.ir.entries.encode import ENCODE
from accel.ir.entries.flat import FLAT
from accel.ir.entries.step import LOGITS, STEP, is_extra
from accel.ir.sizes import grows
from accel.ir.state import Part, output_of, state_of
from accel.ir.window import SLOTS
from accel.runtime.backends.buffers import (
    forgettable,
    kept_slots,
    rearrange,
    recent_slots,
    sizes_of,
    trimmed,
)
from accel.runtime.backends.protocol import Compression, alike, call_inputs
from accel.runtime.call import Arrays, Embeds, Logits, Outputs
from accel.runtime.inputs.ints import Bools, Ints
from accel.runtime.inputs.stack import stacked


class Steppable(Protocol):
    """What the backend session needs of a `Program`: its state layout and `run(entry, inputs) -> outputs by
    name`.
    """

    @property
    def state(self) -> Any: ...
    @property
    def entries(self) -> Any: ...
    def run(self, entry: str, inputs: dict[str, Any]) -> dict[str, Any]: ...


class EagerBackend:
    """Sessions over one program; they share its parameters."""

    tuning = threads = cost_key = None

    def __init__(self, program: Steppable):
        self.program = program
        self.state, self.entries = program.state, program.entries

    def open_session(self, batch: int) -> EagerSession:
        """A backend session for `batch` rows with an empty cache."""
        return EagerSession(self.program, batch)

    def pool(self, shape: Sequence[int], dtype: str) -> Any:
        """See protocol.Backend."""
        return np.zeros(shape, dtype)

    def close(self) -> None:
        """Nothing to free: the program belongs to the caller."""


class EagerSession:
    """See protocol.BackendSession. State values are torch tensors, replaced by what each call gives of them."""

    def __init__(self, program: Steppable, batch: int, device: str = "cpu"):
        self._program = program
        self._batch = batch
        self.alike = alike(program.state)
        self.tile = 1
        self._device = device
        self._state: dict[str, Tensor] = {}
        self._controls: dict[str, Tensor] = {}
        self._adapters: dict[str, Tensor] = {}

    def control(self, values: Mapping[str, npt.NDArray[Any]]) -> None:
        """See protocol.BackendSession."""
        self._controls = self._controls | {n: self._tensor(a) for n, a in values.items()}

    def adapt(self, arrays: Mapping[str, npt.NDArray[Any]], rows: npt.NDArray[Any]) -> None:
        """See protocol.BackendSession."""
        self._adapters = {n: self._tensor(a) for n, a in {**arrays, ROWS: rows}.items()}

    def resize(self, capacity: int, *later: int) -> None:
        """New buffers of `capacity` slots with the old contents."""
        state = dict(self._state)
        letters = {"B": self._batch, "C": capacity}  # nothing is kept yet
        letters |= {f"C{i}": slots for i, slots in enumerate(later, start=1)}
        for value in self._program.state:
            if value.cross:
                continue
            old = state.get(value.name)
            if old is not None and not grows(value.shape):
                continue
            shape = sizes_of(value, letters, None if old is None else old.shape)
            dtype = getattr(torch, value.dtype)
            new = torch.full(shape, value.fill, dtype=dtype, device=self._device)
            if old is not None:
                new[tuple(slice(n) for n in old.shape)] = old
            state[value.name] = new
        self._state = state

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
        """One run of the step entry; the state changes only where it succeeds."""
        called = call_inputs(tokens, positions, slots, rows, tree, embeds)
        inputs = {n: self._tensor(a) for n, a in called.items()}
        with torch.no_grad():
            given = {**inputs, **self._controls, **self._adapters, **self._state}
            out = self._program.run(STEP.name, given)
        self._state = {name: out.get(output_of(name), old) for name, old in self._state.items()}
        return outputs(out, want)

    @property
    def entries(self) -> Collection[str]:
        """See protocol.BackendSession."""
        found: Collection[str] = self._program.entries
        return found

    @property
    def extra(self) -> Collection[str]:
        """See protocol.BackendSession."""
        return [name for name in self._program.entries[STEP.name].outputs if is_extra(name)]

    def part(self, entry: str, inputs: Arrays) -> Arrays:
        """One run of another entry; the state changes only where it succeeds."""
        with torch.no_grad():
            tensors = {n: self._tensor(a) for n, a in inputs.items()}
            out = self._program.run(entry, {**tensors, **self._adapters, **self._state})
        self._state = {name: out.get(output_of(name), old) for name, old in self._state.items()}
        return {
            n: v.float().cpu().numpy() for n, v in out.items() if state_of(n) not in self._state
        }

    def encode(self, inputs: Mapping[str, npt.NDArray[Any]]) -> None:
        """One run of the encode entry."""
        given = {n: self._tensor(a) for n, a in inputs.items()}
        with torch.no_grad():
            out = self._program.run(ENCODE.name, given)
        self._state = {**self._state, **{state_of(n): v for n, v in out.items()}}

    def compress(self, eviction: Compression, seen: Ints) -> None:
        """One run of the compress entry."""
        recent = recent_slots(self._program.state, self._state)
        slots = kept_slots(self._program.state, self._state)
        given = {
            n: self._tensor(a) for n, a in eviction.compress_inputs(seen, recent, slots).items()
        }
        with torch.no_grad():
            out = self._program.run(COMPRESS.name, {**given, **self._state})
        found = trimmed(self._program.state, {state_of(n): v.cpu().numpy() for n, v in out.items()})
        held = {v.name for v in self._program.state if not grows(v.shape)}
        state = {n: v for n, v in self._state.items() if n in held}
        self._state = state | {n: self._tensor(a) for n, a in found.items()}

    def drop(self, first: Ints) -> None:
        """See protocol.BackendSession."""
        for value in self._program.state:
            if SLOTS not in value.shape or value.name not in self._state:
                continue
            axis, buffer = value.shape.index(SLOTS), self._state[value.name]
            for row in np.flatnonzero(first):
                slots, gone = buffer[row].movedim(axis - 1, 0), int(first[row])
                slots.copy_(slots.roll(-gone, 0))
                if value.positions:
                    slots[len(slots) - gone :] = value.fill

    def rearrange(self, rows: Ints, to: Ints, source: Ints) -> None:
        """See protocol.BackendSession."""
        where = map(self._tensor, (rows, to, source))
        rearrange(self._program.state, self._state, *where)

    def forget(self, rows: npt.NDArray[np.bool_]) -> None:
        """See protocol.BackendSession."""
        mask = self._tensor(rows)
        for value in self._program.state:
            if forgettable(value) and value.name in self._state:
                now = self._state[value.name].clone()
                now[mask] = value.fill
                self._state[value.name] = now

    def buffers(self) -> dict[str, npt.NDArray[Any]]:
        """See protocol.BackendSession."""
        return {name: tensor.cpu().numpy() for name, tensor in self._state.items()}

    def put(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """See protocol.BackendSession."""
        given = {n: torch.from_numpy(a).to(self._device) for n, a in arrays.items()}
        self._state = {**self._state, **given}

    def copy(self, rows: Ints | None = None) -> EagerSession:
        """See protocol.BackendSession."""
        count = self._batch if rows is None else rows.size
        other = type(self)(self._program, count, self._device)
        if rows is None:
            shared = {v.name for v in self._program.state if v.written_between_steps}
            other._state = {n: t if n in shared else t.clone() for n, t in self._state.items()}
        else:
            other._state = self._of(rows)
        other._controls, other._adapters = self._controls, dict(self._adapters)
        if rows is not None:
            other._use(rows)
        return other

    def move(self, rows: Ints, slots: tuple[int, int] | None) -> None:
        """See protocol.BackendSession."""
        self._state = self._of(rows)
        self._use(rows)

    def join(self, other: EagerSession) -> None:
        """See protocol.BackendSession."""
        pooled = {v.name: v for v in self._program.state if v.pooled}
        fills = {v.name: v.fill for v in self._program.state}
        for name, mine in self._state.items():
            if name not in pooled:
                both = (mine.cpu().numpy(), other._state[name].cpu().numpy())
                self._state[name] = self._tensor(stacked(*both, fill=fills[name]))
        if ROWS in self._adapters:
            self._adapters[ROWS] = torch.cat([self._adapters[ROWS], other._adapters[ROWS]])
        self._batch += other._batch
        other.close()

    def leave(self, rows: Ints) -> None:
        """See protocol.BackendSession."""
        self._state = self._of(rows)
        self._use(rows)
        self._batch = rows.size

    def _use(self, rows: Ints) -> None:
        """Row i uses the adapter that row rows[i] did."""
        if ROWS in self._adapters:
            self._adapters[ROWS] = self._adapters[ROWS][self._tensor(rows)]

    def _of(self, rows: Ints) -> dict[str, Tensor]:
        """A copy of the state of these rows [n]."""
        pooled, index = {v.name for v in self._program.state if v.pooled}, self._tensor(rows)
        return {n: t if n in pooled else t[index] for n, t in self._state.items()}

    @property
    def trees(self) -> bool:
        """See protocol.BackendSession."""
        return COMMIT.name in self._program.entries

    @property
    def flat(self) -> bool:
        """See protocol.BackendSession."""
        return FLAT.name in self._program.entries

    @property
    def recurrent(self) -> bool:
        """Whether any state value is one."""
        return any(value.part is Part.RECURRENT for value in self._program.state)

    def snapshot(self) -> dict[str, Any]:
        """The recurrent state values, which a step replaces and never writes."""
        return {
            v.name: self._state[v.name] for v in self._program.state if v.part is Part.RECURRENT
        }

    def restore(self, snapshot: Mapping[str, Any] | None, rows: Any) -> None:
        """See protocol.BackendSession."""
        for value in self._program.state:
            if value.part is Part.RECURRENT:
                now = self._state[value.name].clone()
                mask = self._tensor(rows)
                now[mask] = (
                    value.fill if snapshot is None else self._held(snapshot, value.name)[mask]
                )
                self._state[value.name] = now

    def _held(self, snapshot: Mapping[str, Any], name: str) -> Tensor:
        """A value of a snapshot on the device; those that were saved are arrays."""
        return torch.as_tensor(snapshot[name], device=self._device)

    @property
    def kv_bytes(self) -> int:
        """Bytes of all state tensors but a pool's."""
        pooled = {v.name for v in self._program.state if v.pooled}
        return sum(t.numel() * t.element_size() for n, t in self._state.items() if n not in pooled)

    @property
    def kv_mapped(self) -> int:
        """None: each step replaces the state, or reads all of it."""
        return 0

    def _tensor(self, array: npt.NDArray[Any]) -> Tensor:
        """A copy on the device."""
        return torch.from_numpy(np.array(array)).to(self._device)

    def spread(self, threads: int) -> None:
        """See protocol.BackendSession: torch's threads are those of the process."""

    def close(self) -> None:
        """Drop the state."""
        self._state = {}


def outputs(out: Mapping[str, Tensor], want: Collection[str]) -> Outputs:
    """What a step gives, on the host: logits, and those of its other outputs that are wanted."""
    logits: Logits = out[LOGITS].float().cpu().numpy().copy()
    return Outputs(logits, {name: out[name].float().cpu().numpy() for name in want})
