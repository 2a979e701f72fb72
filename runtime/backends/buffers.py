"""State buffers: where rows differ, what is copied between rows, what compression leaves, what a new row forgets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.ir.sizes import each, in_numbers
from accel.ir.state import CacheRegion, Part, StateValue, name_of
from accel.ir.window import SLOTS
from accel.runtime.call import Arrays
from accel.runtime.inputs.ints import Ints

STEP = 256  # the KV buffers grow by this many slots
Range = tuple[int, int]


def sizes_of(
    value: StateValue, letters: Mapping[str, int], old: Sequence[int] | None
) -> tuple[int, ...]:
    """The sizes of a state buffer, no smaller along any slots than one that is there: `put` and what compression gives
    bring buffers of their own sizes.
    """
    sizes = in_numbers(value.shape, letters)
    return sizes if old is None else (sizes[0], *map(max, sizes[1:], old[1:]))


def moving(
    state: Sequence[StateValue], slots: Range | None
) -> Iterator[tuple[StateValue, tuple[slice, ...]]]:
    """The state values that rows have of their own, and where beside axis B rows may differ, if they do in
    `slots` alone.
    """
    for value in state:
        if value.pooled or (slots is not None and (value.written_between_steps or value.cross)):
            continue
        where = [slice(None)] * (len(value.shape) - 1)
        # rows of the same tokens may have been grouped, or their keys factored, at other times; choices say of the
        # newest tokens what may be of any slot, and later tokens leave a mass in all slots
        if value.part in (Part.UNITS, Part.LOW_RANK, Part.CHOICE, Part.MASS):
            yield value, tuple(where)
            continue
        for axis, size in enumerate(value.shape[1:]):
            if slots is not None and isinstance(size, str) and size.partition("/")[0] == "C":
                where[axis] = slice(slots[0] // each(size), -(-slots[1] // each(size)))
        yield value, tuple(where)


def moved(
    state: Sequence[StateValue],
    buffers: Mapping[str, npt.NDArray[Any]],
    rows: Ints,
    slots: Range | None,
) -> dict[str, npt.NDArray[Any]]:
    """Let row i of each buffer hold what row rows[i] does, in place; what forks may share is given anew."""
    found, there = {}, np.flatnonzero(rows != np.arange(rows.size))
    source = rows[there]
    for value, where in moving(state, slots):
        buffer = buffers.get(value.name)
        if buffer is None:
            continue
        if value.written_between_steps:
            found[value.name] = buffer[rows]
        else:
            part = buffer[(slice(None), *where)]
            part[there] = part[source]
    return found


def stages_of(state: Sequence[Any]) -> dict[int, int]:
    """How many stages of prompt pruning are before each layer with a cache: C1 are the slots behind the first. A layer
    that keeps a window is as behind one.
    """
    return {
        value.layer: int(size.partition("/")[0][1:] or 0)
        for value in state
        if value.part is Part.KEYS
        and value.region is CacheRegion.RECENT
        and value.layer is not None
        for size in value.shape
        if isinstance(size, str) and size.startswith("C")
    }


def recent_slots(state: Sequence[Any], buffers: Mapping[str, Any]) -> dict[int, int]:
    """How many slots each layer has that steps append to."""
    return {
        layer: int(buffers[name_of(Part.POSITIONS, detail=str(stage or ""))].shape[1])
        for layer, stage in stages_of(state).items()
    }


def kept_slots(state: Sequence[Any], buffers: Mapping[str, Any]) -> dict[int, int]:
    """How many slots each layer has of what was kept; the most of a head, where these are unequal numbers."""
    found = {v.layer or 0: int(buffers[v.name].shape[2]) for v in state if v.kept_positions}
    return found | {v.layer: int(buffers[v.name].max()) for v in state if v.ragged}


def kept_heads(state: Sequence[Any]) -> dict[int, int]:
    """The KV heads of each layer that evicts."""
    found = {v.layer: v.shape[1] for v in state if v.kept_positions and v.layer is not None}
    return found | {v.layer: v.shape[1] for v in state if v.ragged}


def drop(state: Sequence[StateValue], buffers: Mapping[str, npt.NDArray[Any]], first: Ints) -> None:
    """See protocol.BackendSession, over buffers."""
    for value in state:
        if SLOTS not in value.shape or value.name not in buffers:
            continue
        axis, buffer = value.shape.index(SLOTS), buffers[value.name]
        for row in np.flatnonzero(first):
            slots = np.moveaxis(buffer[row], axis - 1, 0)
            stay = len(slots) - int(first[row])
            slots[:stay] = slots[-stay:].copy() if stay else slots[:0]
            if value.positions:
                slots[stay:] = value.fill


def rearrange(
    state: Sequence[StateValue], buffers: Mapping[str, Any], rows: Any, to: Any, source: Any
) -> None:
    """See protocol.BackendSession, over buffers, arrays or tensors."""
    for value in state:
        if "C" in value.shape and value.name in buffers:
            buffer = buffers[value.name]
            heads = (slice(None),) * (value.shape.index("C") - 1)
            buffer[(rows, *heads, to)] = buffer[(rows, *heads, source)]


def forgettable(value: Any) -> bool:
    """Whether a state value's slots may hold what rewinding alone does not hide: kept tokens, and the
    positions of layers that saw a prompt pruned; or it is of a whole row that starts anew.
    """
    return bool(
        value.written_between_steps
        or value.part in (Part.MASS, Part.HEADS)
        or (value.positions and "C" not in value.shape)
    )


def trimmed(state: Sequence[StateValue], arrays: Arrays) -> Arrays:
    """What the entry gave, by state name, without the slots of a layer behind the last one that is used."""
    slots = {v.name: str(v.shape[2]).partition("/")[0] for v in state if len(v.shape) > 2}
    used: dict[str, int] = {}
    for value in state:
        if value.part is Part.POSITIONS and value.layer is not None and value.name in arrays:
            filled = np.flatnonzero((arrays[value.name] >= 0).any(axis=(0, 1)))
            used[slots[value.name]] = int(filled[-1]) + 1 if filled.size else 0
    shapes = {v.name: v.shape for v in state}
    return {
        name: array[:, :, : _entries(shapes[name], used[slots[name]])]
        if slots.get(name) in used and array.ndim > 2
        else array
        for name, array in arrays.items()
    }


def _entries(shape: Sequence[int | str], slots: int) -> int:
    """How many entries of a state value hold so many slots: one for each, or for each block of them."""
    size = shape[2]
    return -(-slots // each(size)) if isinstance(size, str) else slots
