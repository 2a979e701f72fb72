"""One session with ONNX Runtime on the CPU: one set of bound state buffers.

State is bound once, each buffer as input `name` and as output (`ir.state`), so that appends happen
in place and a decode step costs Python the same whatever the number of layers. A graph may read
recurrent state after it wrote the next one, so that has two buffers, which change places after
each call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.ir.adapters import ROWS
from accel.ir.entries.compress import COMPRESS
from accel.ir.entries.embed import EMBED, EMBEDDED, EMBEDS
from accel.ir.entries.flat import FLAT
from accel.ir.entries.step import LOGITS, is_extra
from accel.ir.sizes import FEW, grows
from accel.ir.state import Part, StateValue, output_of, state_of
from accel.runtime.backends.buffers import (
    drop,
    forgettable,
    kept_slots,
    moved,
    rearrange,
    recent_slots,
    sizes_of,
    trimmed,
)
from accel.runtime.backends.onnx.mapped import advise, memory_of
from accel.runtime.backends.onnx.open import (
    aligned,
    copied,
    fill,
    made,
    ort_value,
)
from accel.runtime.backends.onnx.part import Parts
from accel.runtime.backends.protocol import Compression, alike, call_inputs
from accel.runtime.call import Arrays, Embeds, Logits, Outputs
from accel.runtime.inputs.ints import Bools, Ints


@dataclass(frozen=True, eq=False)
class Graphs:
    """What the sessions of a model share.

    step, encoder: onnxruntime.InferenceSessions. entries: the names of all graphs. other: the InferenceSession of one
    beside the step. controls: the inputs that hold from call to call, and what they are at first. trees: whether a step
    takes any. spread: the step's InferenceSession for calls of so many threads.
    """

    step: Any
    state: tuple[StateValue, ...]
    width: int
    entries: Collection[str]
    other: Callable[[str], Any]
    spread: Callable[[int], Any]
    encoder: Any = None
    tile: int = 1
    controls: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    trees: bool = False


class OrtSession:
    """State buffers of one session and the bindings over them: decode (T = N = `tile`) and every
    other shape, for each choice of extra outputs; where there is recurrent state, each for both directions.
    """

    def __init__(self, graphs: Graphs, batch: int):
        self._graphs = graphs
        self._session = graphs.step  # of the number of threads that it runs with
        self._state, self._width = graphs.state, graphs.width
        self.tile, self.trees, self.entries = graphs.tile, graphs.trees, graphs.entries
        self.flat = FLAT.name in graphs.entries
        self.alike = alike(graphs.state)
        self._parts = Parts(graphs.other)
        self._plain = {n: ort_value(a) for n, a in _plain(graphs).items()}
        self._extra = {
            o.name: tuple(o.shape[2:]) for o in graphs.step.get_outputs() if is_extra(o.name)
        }
        self._buffers: dict[str, npt.NDArray[Any]] = {}
        self._wide: dict[
            str, npt.NDArray[Any]
        ] = {}  # arrays with room for more rows; buffers are their first
        self._spare: dict[str, npt.NDArray[Any]] = {}  # what the next call writes in their place
        self._values: list[Any] = []  # OrtValues over the buffers: must outlive the bindings
        self._bytes: tuple[Any, int, int] = (
            None,
            0,
            0,
        )  # buffers, how large they are, those in files
        self._mapped: list[npt.NDArray[Any]] = []  # those in files
        self._few = True  # whether the system knows that few of their pages are read
        self._pairs: list[
            tuple[dict[str, Any], dict[str, Any]]
        ] = []  # state before and after a call; that of the next one first
        # bindings over these, by the extra outputs that they give
        self._decode: dict[tuple[str, ...], list[Any]] = {}
        self._other: dict[tuple[str, ...], list[Any]] = {}
        self._sized(batch)
        self._controls = {n: aligned(a.shape, a.dtype.name) for n, a in graphs.controls.items()}
        self._control_values = {n: ort_value(a) for n, a in self._controls.items()}
        self._adapters: dict[str, npt.NDArray[Any]] = {}
        self._adapter_values: dict[str, Any] = {}
        self.control(graphs.controls)

    def _sized(self, batch: int) -> None:
        """What a decode step is given and gives, for so many rows."""
        tile, self._batch = self.tile, batch
        self._small: dict[str, npt.NDArray[Any]] = {
            name: aligned((batch,) if name == "slots" else (batch, tile), "int64", 0)
            for name in ("tokens", "positions", "slots", "rows")
        }
        self._logits: Logits = aligned((batch, tile, self._width), "float32", 0)
        self._small_values = {n: ort_value(a) for n, a in self._small.items()}
        self._logits_value = ort_value(self._logits)
        self._given: Arrays = {}  # extra outputs of a decode step

    def control(self, values: Mapping[str, npt.NDArray[Any]]) -> None:
        """See protocol.BackendSession: written into memory that is bound already, where it has that size."""
        anew = [n for n, array in values.items() if self._controls[n].shape != array.shape]
        for name in anew:
            self._controls[name] = aligned(values[name].shape, values[name].dtype.name)
            self._control_values[name] = ort_value(self._controls[name])
        for name, array in values.items():
            self._controls[name][...] = array
        if anew and self._pairs:
            self._bind(self._buffers)

    def adapt(self, arrays: Mapping[str, npt.NDArray[Any]], rows: npt.NDArray[Any]) -> None:
        """See protocol.BackendSession. Sessions share the arrays a and b; `rows` is this one's own."""
        self._adapters = {n: np.ascontiguousarray(a) for n, a in {**arrays, ROWS: rows}.items()}
        self._adapter_values = {n: ort_value(a) for n, a in self._adapters.items()}
        self._parts.extra_inputs = self._adapters
        if self._pairs:
            self._bind(self._buffers)

    def resize(self, capacity: int, *later: int) -> None:
        """New buffers of `capacity` slots with the old contents; bindings are made anew. Raises StorageError, and
        leaves all as it was.
        """
        buffers, new = dict(self._buffers), dict[str, npt.NDArray[Any]]()
        letters = {"B": self._batch, "C": capacity}  # nothing is kept at first
        letters |= {f"C{i}": slots for i, slots in enumerate(later, start=1)}
        for value in self._state:
            if value.cross:
                continue
            old = buffers.get(value.name)
            if old is None or grows(value.shape):
                rows = self._room(value)
                there = None if old is None else old.shape
                sizes = sizes_of(value, letters | {"B": rows}, there)
                if old is not None and self._lies_wide(value) and old.shape[1:] == sizes[1:]:
                    continue  # rows joined or left, and it has slots enough
                new[value.name] = buffers[value.name] = made(value, sizes, value.fill)
                if rows > self._batch:
                    self._wide[value.name] = buffers[value.name]
                    buffers[value.name] = buffers[value.name][: self._batch]
        self._unbind()
        # memory that is not written is not taken: so one buffer at a time is there twice
        for name, array in new.items():
            fill(array, self._buffers.pop(name, None))
        self._buffers = buffers
        self._bind(buffers)

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
        """See protocol.BackendSession; `resize` comes first."""
        if self._mapped and self._few != (tokens.shape[1] <= FEW):
            self._few = not self._few
            advise(self._mapped, self._few)
        asked, plain = tuple(want), tree is None and embeds is None
        if plain and tokens.shape[1] == self.tile == rows.shape[1]:
            small = self._small
            small["tokens"][:] = tokens
            small["positions"][:] = positions
            small["slots"][:] = slots
            small["rows"][:] = rows
            bindings = self._decode.get(asked) or self._decoding(asked)
            self._session.run_with_iobinding(bindings[0])
            self._swap()
            return Outputs(self._logits.copy(), {n: self._given[n].copy() for n in asked})
        logits: Logits = aligned((self._batch, rows.shape[1], self._width), "float32")
        given = call_inputs(tokens, positions, slots, rows, tree, embeds)
        held = {name: ort_value(np.ascontiguousarray(array)) for name, array in given.items()}
        held = {**self._plain, **held}
        if asked not in self._other:
            self._other[asked] = [self._bound(*pair) for pair in self._pairs]
        binding = self._other[asked][0]
        for name, value in held.items():
            binding.bind_ortvalue_input(name, value)
        out = ort_value(logits)
        binding.bind_ortvalue_output(LOGITS, out)
        sizes = (self._batch, tokens.shape[1])
        extra = {name: aligned((*sizes, *self._extra[name]), "float32") for name in want}
        for name, array in extra.items():
            binding.bind_ortvalue_output(name, ort_value(array))
        self._session.run_with_iobinding(binding)
        if tokens.shape[1] > 1:  # of a prompt they may be large, and nobody else is to hold them
            for name in extra:
                binding.bind_output(name, "cpu")
        self._swap()
        return Outputs(logits, extra)

    @property
    def extra(self) -> Collection[str]:
        """See protocol.BackendSession."""
        return self._extra

    def _decoding(self, want: tuple[str, ...]) -> list[Any]:
        """The bindings of decode steps that give these outputs, too, made and kept."""
        for name in want:
            if name not in self._given:
                self._given[name] = aligned(
                    (self._batch, self.tile, *self._extra[name]), "float32", 0
                )
        given = {name: ort_value(self._given[name]) for name in want}
        self._decode[want] = [self._bound(*pair) for pair in self._pairs]
        for binding in self._decode[want]:
            for name, value in self._small_values.items():
                binding.bind_ortvalue_input(name, value)
            for name, value in {LOGITS: self._logits_value, **given}.items():
                binding.bind_ortvalue_output(name, value)
        return self._decode[want]

    def spread(self, threads: int) -> None:
        """See protocol.BackendSession. The state stays where it is; its bindings are made anew."""
        session = self._graphs.spread(threads)
        if session is not self._session:
            self._session = session
            if self._pairs:
                self._bind(self._buffers)

    def part(self, entry: str, inputs: Arrays) -> Arrays:
        """See protocol.BackendSession. State is written where it lies; what recurs may be read after it is written."""
        out = self._parts.run(entry, inputs, self._buffers, self._spare)
        for name in self._spare:
            if output_of(name) in out:
                np.copyto(self._buffers[name], out.pop(output_of(name)))
        return out

    def encode(self, inputs: Mapping[str, npt.NDArray[Any]]) -> None:
        """See protocol.BackendSession. The cross state is bound as the encoder gave it."""
        names = [value.output for value in self._state if value.cross]
        given = {n: np.ascontiguousarray(a) for n, a in inputs.items()}
        found = dict(zip(names, self._graphs.encoder.run(names, given), strict=True))
        buffers = dict(self._buffers)
        for name, array in found.items():
            held = aligned(array.shape, array.dtype.name)
            np.copyto(held, array)
            buffers[state_of(name)] = held
        if len(buffers) == len(self._state):
            self._bind(buffers)
        else:
            self._buffers = buffers  # bound by the first resize

    def compress(self, eviction: Compression, seen: Ints) -> None:
        """See protocol.BackendSession."""
        recent = recent_slots(self._state, self._buffers)
        slots = kept_slots(self._state, self._buffers)
        given = {**self._buffers, **eviction.compress_inputs(seen, recent, slots)}
        session = self._graphs.other(COMPRESS.name)
        names = [o.name for o in session.get_outputs()]
        wanted = {i.name: given[i.name] for i in session.get_inputs()}
        out = dict(zip(names, session.run(names, wanted), strict=True))
        found = trimmed(self._state, {state_of(n): a for n, a in out.items()})
        held = {v.name for v in self._state if not grows(v.shape)}
        buffers = {n: a for n, a in self._buffers.items() if n in held}
        for name, array in found.items():
            buffers[name] = aligned(array.shape, array.dtype.name)
            np.copyto(buffers[name], array)
        self._buffers = buffers  # bound by the next resize

    def drop(self, first: Ints) -> None:
        """See protocol.BackendSession."""
        drop(self._state, self._buffers, first)

    def rearrange(self, rows: Ints, to: Ints, source: Ints) -> None:
        """See protocol.BackendSession."""
        rearrange(self._state, self._buffers, rows, to, source)

    def forget(self, rows: npt.NDArray[np.bool_]) -> None:
        """See protocol.BackendSession. Of what forks may share, a copy is changed. Buffers that are not there, such as
        the recent ones after `compress`, are empty when they are made.
        """
        values = [v for v in self._state if forgettable(v) and v.name in self._buffers]
        if not rows.any() or not values:
            return
        buffers = dict(self._buffers)
        for value in values:
            old = buffers[value.name]
            buffers[value.name] = aligned(old.shape, old.dtype.name)
            np.copyto(buffers[value.name], old)
            buffers[value.name][rows] = value.fill
        if len(buffers) == len(self._state):
            self._bind(buffers)
        else:
            self._buffers = buffers  # bound by the next resize

    def buffers(self) -> dict[str, npt.NDArray[Any]]:
        """See protocol.BackendSession."""
        return self._buffers

    def put(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """See protocol.BackendSession."""
        self._buffers = {**self._buffers, **arrays}  # bound by the next resize

    def copy(self, rows: Ints | None = None) -> OrtSession:
        """See protocol.BackendSession."""
        other = OrtSession(self._graphs, self._batch if rows is None else rows.size)
        other._session = self._session
        other.control(self._controls)
        if self._adapters:
            arrays = {n: a for n, a in self._adapters.items() if n != ROWS}
            used = self._adapters[ROWS]
            other.adapt(arrays, used.copy() if rows is None else used[rows])
        copies = copied(self._state, self._buffers, rows)
        advise(self._mapped, self._few)
        if copies and len(copies) == len(self._state):
            other._bind(copies)
        else:
            other._buffers = copies  # bound by the next resize
        return other

    def join(self, other: OrtSession) -> None:
        """See protocol.BackendSession. Where there is no room for its rows, there is for as many again."""
        batch = self._batch + other._batch
        buffers = dict(self._buffers)
        for value in self._state:
            if value.pooled or value.name not in buffers:
                continue
            mine, its = buffers[value.name], other._buffers[value.name]
            sizes = tuple(map(max, mine.shape[1:], its.shape[1:]))
            wide = self._wide.get(value.name)
            if self._room(value) < batch or wide is None or wide.shape[1:] != sizes:
                wide = made(value, (max(2 * self._batch, batch), *sizes))
                wide[: self._batch] = value.fill
                wide[(slice(self._batch), *map(slice, mine.shape[1:]))] = mine
            new = wide[self._batch : batch]
            if its.shape != new.shape:
                new[...] = value.fill
            new[(slice(None), *map(slice, its.shape[1:]))] = its
            self._wide[value.name], buffers[value.name] = wide, wide[:batch]
        if self._adapters:
            self._adapters[ROWS] = np.concatenate([self._adapters[ROWS], other._adapters[ROWS]])
        other.close()
        self._renewed(buffers, batch)

    def leave(self, rows: Ints) -> None:
        """See protocol.BackendSession. What forks may share is copied whole."""
        moved, shared = (
            np.flatnonzero(rows != np.arange(rows.size)),
            {v.name for v in self._state if v.written_between_steps},
        )
        buffers = dict(self._buffers)
        for value in self._state:
            if value.pooled or value.name not in buffers:
                continue
            array = buffers[value.name]
            if value.name in shared:
                buffers[value.name] = array[rows]
                continue
            array[moved] = array[rows[moved]]
            if value.name not in self._wide:
                self._wide[value.name] = array
            buffers[value.name] = array[: rows.size]
        if self._adapters:
            self._adapters[ROWS] = self._adapters[ROWS][rows]
        self._renewed(buffers, rows.size)

    def _renewed(self, buffers: dict[str, npt.NDArray[Any]], batch: int) -> None:
        """Other buffers, of so many rows, which the next resize binds."""
        self._decode, self._other, self._pairs = {}, {}, []
        self._parts.forget()
        self._buffers, self._spare = buffers, {}
        self._sized(batch)
        if self._adapters:
            self._adapter_values = {n: ort_value(a) for n, a in self._adapters.items()}

    def _room(self, value: StateValue) -> int:
        """Rows that there is room for where a buffer of the state lies."""
        return len(self._wide[value.name]) if self._lies_wide(value) else self._batch

    def _lies_wide(self, value: StateValue) -> bool:
        """Whether a buffer is the first rows of one that rows may join."""
        wide, now = self._wide.get(value.name), self._buffers.get(value.name)
        return wide is not None and now is not None and wide.ctypes.data == now.ctypes.data

    def move(self, rows: Ints, slots: tuple[int, int] | None) -> None:
        """See protocol.BackendSession."""
        if self._adapters:
            self._adapters[ROWS][...] = self._adapters[ROWS][rows]
        if anew := moved(self._state, self._buffers, rows, slots):
            self._bind({**self._buffers, **anew})

    @property
    def recurrent(self) -> bool:
        """Whether any state value is one."""
        return any(value.part is Part.RECURRENT for value in self._state)

    def snapshot(self) -> dict[str, npt.NDArray[Any]]:
        """See protocol.BackendSession."""
        return {name: self._buffers[name].copy() for name in self._spare}

    def restore(self, snapshot: dict[str, npt.NDArray[Any]] | None, rows: Any) -> None:
        """See protocol.BackendSession."""
        for value in self._state:
            if value.name in self._spare:
                now = self._buffers[value.name]
                now[rows] = value.fill if snapshot is None else snapshot[value.name][rows]

    @property
    def kv_bytes(self) -> int:
        """Bytes of all state buffers but a pool's."""
        return self._counted()[1]

    @property
    def kv_mapped(self) -> int:
        """See protocol.BackendSession."""
        return self._counted()[2]

    def _counted(self) -> tuple[Any, int, int]:
        """The buffers, and bytes of all but a pool's, and of those in files."""
        if self._bytes[0] is not self._buffers:
            own = [
                self._wide[v.name] if self._room(v) > self._batch else self._buffers[v.name]
                for v in self._state
                if v.name in self._buffers and not v.pooled
            ]
            here = sum(a.nbytes for a in (*own, *self._spare.values()))
            there = sum(a.nbytes for a in own if memory_of(a) is not None)
            self._bytes = self._buffers, here, there
        return self._bytes

    def close(self) -> None:
        """Drop bindings before the buffers that they point into."""
        self._unbind()
        self._buffers, self._spare, self._wide = {}, {}, {}
        self._bytes = None, 0, 0

    def _bind(self, buffers: dict[str, npt.NDArray[Any]]) -> None:
        """Bind each buffer as input and as output, in all bindings; take them over only when all
        went well.
        """
        self._wide = {
            n: a
            for n, a in self._wide.items()
            if n in buffers and a.ctypes.data == buffers[n].ctypes.data
        }
        recurrent = {v.name for v in self._state if v.part is Part.RECURRENT}
        spare = {n: aligned(a.shape, a.dtype.name, 0) for n, a in buffers.items() if n in recurrent}
        here = {name: ort_value(array) for name, array in buffers.items()}
        there = here | {name: ort_value(array) for name, array in spare.items()}
        pairs = [(here, there), (there, here)] if spare else [(here, here)]
        self._parts.forget()
        self._pairs, self._decode, self._other = pairs, {}, {}
        self._values, self._buffers, self._spare = [*here.values(), *there.values()], buffers, spare
        self._mapped = [a for a in buffers.values() if memory_of(a) is not None]
        advise(self._mapped, self._few)

    def _bound(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> Any:
        """A binding of a step over the state, which reads `before` and writes `after`."""
        read_only = {v.name for v in self._state if v.read_only}
        binding = self._session.io_binding()
        for name, value in before.items():
            binding.bind_ortvalue_input(name, value)
            if name not in read_only:
                binding.bind_ortvalue_output(output_of(name), after[name])
        for name, value in {**self._control_values, **self._adapter_values}.items():
            binding.bind_ortvalue_input(name, value)
        return binding

    def _unbind(self) -> None:
        """Let go of the buffers, but for `_buffers`."""
        self._parts.forget()
        self._decode, self._other, self._pairs = {}, {}, []
        self._values, self._mapped = [], []

    def _swap(self) -> None:
        """After a call the spare buffers hold the recurrent state."""
        if self._spare:
            for bindings in (self._pairs, *self._decode.values(), *self._other.values()):
                bindings.reverse()
            for name, array in self._spare.items():
                self._buffers[name], self._spare[name] = array, self._buffers[name]


def _plain(graphs: Graphs) -> Arrays:
    """What a step without a tree and without embeddings has for these inputs, whatever a call before it gave."""
    found: Arrays = {"tree": np.ones((1, 1, 1), np.bool_)} if graphs.trees else {}
    if EMBED.name in graphs.entries:
        optional = graphs.step.get_overridable_initializers()
        (width,) = (value.shape[2] for value in optional if value.name == EMBEDS)
        found |= {EMBEDS: np.zeros((1, 1, width), np.float32), EMBEDDED: np.zeros((1, 1), np.bool_)}
    return found
