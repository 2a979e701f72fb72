"""One session on the Triton target: state buffers on the device, which a step writes in place.

A call's inputs go to the device in one piece of memory, and the largest logit of each token comes back in one: so a
step waits for the device once. Calls of few tokens are recorded (`recorded.Recorded`): the host's work is then the
same whatever the number of layers. Growing or compressing the cache makes other buffers, and so other recordings.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Hashable, Mapping
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from accel.ir.adapters import ROWS
from accel.ir.entries.step import LOGITS, STEP
from accel.ir.state import Part
from accel.lowering.triton.lowered import Compiled, Lowered, flags_of, plan_of
from accel.runtime.backends.eager import EagerSession
from accel.runtime.backends.protocol import Compression, call_inputs
from accel.runtime.backends.triton.memory import DeviceArray, room
from accel.runtime.backends.triton.recorded import Recorded, recorder
from accel.runtime.backends.triton.sheet import Sheet
from accel.runtime.call import Arrays, Embeds, Logits, Outputs
from accel.runtime.inputs.distant import Distant
from accel.runtime.inputs.ints import Bools, Ints

WIDEST, MOST_TOKENS = 64, 512  # tokens of a row, and of all, in a call that is recorded


class TritonSession(EagerSession):
    """See protocol.BackendSession. State values are buffers on the device, which a step writes in place."""

    def __init__(self, program: Lowered, batch: int, device: str):
        super().__init__(program, batch, device)
        self._compiled: Compiled = program.compiled[STEP.name]
        self._args: list[
            Any
        ] = []  # of the step, in its order: what lies there, and room for the rest
        self._places = {name: i for i, name in enumerate(self._compiled.inputs)}
        self._plan = plan_of(self._compiled, self._compiled.defaults)
        self._recorded: Recorded | None = None
        if not self._compiled.waits and (records := recorder(device)) is not None:
            self._recorded = Recorded(records, device)
        self._last: weakref.ref[_Lying] | None = (
            None  # the logits that the next step may write over
        )

    def control(self, values: Mapping[str, npt.NDArray[Any]]) -> None:
        """See protocol.BackendSession. Written where they lie; what a branch of the host goes by is known here, too."""
        new = {}
        for name, array in values.items():
            there = self._controls.get(name)
            if there is None or tuple(there.shape) != array.shape:
                new[name] = array
            else:
                there.copy_(torch.from_numpy(np.array(array)))
        given = {n: torch.from_numpy(np.array(a)) for n, a in values.items()}
        self._plan = self._plan | plan_of(self._compiled, given)
        if new:
            super().control(new)
            self._bind()

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
        rewind; recurrent state changes only where it succeeds. The logits stay on the device.
        """
        given = call_inputs(tokens, positions, slots, rows, tree, embeds)
        sheet = Sheet.of(given)
        with room():
            self._keep_last()
            inputs = sheet.filled(given, pinned=self._device == "cuda")
            plan = self._planned(sheet, inputs)
            run = partial(self._run, sheet, plan)
            if self._recorded is None or tokens.shape[1] > WIDEST or tokens.size > MOST_TOKENS:
                *found, best = run(inputs.to(self._device, non_blocking=True))
            else:
                key: Hashable = (sheet, *plan)
                *found, best = self._recorded(key, inputs, run)
            out = dict(zip(self._compiled.outputs, found, strict=True))
            return Outputs(self._read(out[LOGITS], best), self._wanted(out, want))

    def _planned(self, sheet: Sheet, inputs: Tensor) -> tuple[Any, ...]:
        """What branches of the host go by in a call, whose inputs lie in a piece of the host's memory."""
        flags = self._compiled.flags.values()
        if not flags:
            return tuple(self._plan.values())
        lie = {name: self._args[self._places[name]] for flag in flags for name in flag.inputs}
        told = self._plan | flags_of(self._compiled, lie | {**sheet.views(inputs)})
        return tuple(told[name] for name in self._compiled.plan)

    def _run(self, sheet: Sheet, plan: tuple[Any, ...], inputs: Tensor) -> tuple[Tensor, ...]:
        """What the step gives for the inputs that lie in a piece of the device's memory, and the best of its logits."""
        args = list(self._args)
        for name, value in sheet.views(inputs).items():
            args[self._places[name]] = value
        found = self._compiled(args, plan)
        return *found, _best(found[self._compiled.outputs.index(LOGITS)])

    def _read(self, logits: Tensor, best: Tensor) -> Logits:
        """The logits [B,N,V] of a step, of which the best [B,N,2] come to the host: here it waits."""
        here = best.cpu().numpy()
        lying = _Lying(logits)
        self._last = weakref.ref(lying)
        tokens, values = here[..., 0].astype(np.int64), here[..., 1].copy().view(np.float32)
        return cast(Logits, Distant.of(lying, tokens, values, logits.shape[2]))

    def _keep_last(self) -> None:
        """If somebody has the last step's logits still, they stay as they are."""
        if self._last is not None and (lying := self._last()) is not None:
            lying.keep()

    @staticmethod
    def _wanted(out: Mapping[str, Tensor], want: Collection[str]) -> Arrays:
        return {name: out[name].float().cpu().numpy().copy() for name in want}

    def part(self, entry: str, inputs: Arrays) -> Arrays:
        """See protocol.BackendSession."""
        with room():
            found = super().part(entry, inputs)
        self._bind()
        return found

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
        other._controls = {n: t.clone() for n, t in self._controls.items()}  # written in place
        other._plan = self._plan
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
        held = {**self._compiled.defaults, **self._controls, **self._adapters, **self._state}
        args = [held.get(name) for name in self._compiled.inputs]
        moved = len(args) != len(self._args) or any(
            new is not old for new, old in zip(args, self._args, strict=True)
        )
        self._args = args
        if moved and self._recorded is not None:
            self._recorded.drop()


class _Lying:
    """Logits [B,N,V] on the device, `distant.Source`."""

    def __init__(self, logits: Tensor):
        self._logits, self._own = logits, False

    def keep(self) -> None:
        """The next step writes over what this one gave."""
        if not self._own:
            self._logits, self._own = self._logits.clone(), True

    def whole(self) -> npt.NDArray[np.float32]:
        """See Source."""
        found: npt.NDArray[np.float32] = self._logits.flatten(0, 1).float().cpu().numpy()
        return found if self._logits.device.type == "cuda" else found.copy()

    def largest(self, count: int) -> tuple[Ints, npt.NDArray[np.float32]]:
        """See Source. Tokens and logits come in one piece."""
        found = self._logits.flatten(0, 1).float().topk(count)
        here = torch.stack([found.indices.int(), found.values.view(torch.int32)]).cpu().numpy()
        return here[0].astype(np.int64), here[1].view(np.float32)


def _best(logits: Tensor) -> Tensor:
    """Of logits [B,N,V] the likeliest token, of equals the first, and the bits of its logit, int32 [B,N,2]."""
    found = logits.float().max(2)
    return torch.stack([found.indices.int(), found.values.view(torch.int32)], 2)
