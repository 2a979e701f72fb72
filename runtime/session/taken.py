"""A session that begins with what another one holds: keys and values of the same weights, run once for both."""

from __future__ import annotations

import numpy as np

from accel.ir.state import CacheRegion, Part, StateValue
from accel.runtime.call import Arrays
from accel.runtime.inputs.ints import Ints
from accel.runtime.session.core import SessionCore, of_kind
from accel.runtime.session.rows import Kin
from accel.runtime.session.state.layer_schedule import LayerSchedule


def take(core: SessionCore, source: SessionCore, lengths: Ints) -> bool:
    """Let an empty session hold the first `lengths` [B] tokens of each row of another, whose model has the same
    weights. Whether it does: not where their caches store tokens in different ways, or the other one dropped some, or
    left out a layer for one.
    """
    if core.origin is None or source.origin is None or np.any(source.base):
        return False
    state = [value for value in core.origin.state if not value.written_between_steps]
    there = {value.name: value.to_json() for value in source.origin.state}
    if not all(is_plain(value) and there.get(value.name) == value.to_json() for value in state):
        return False
    source.catch_up()
    if not all(one.complete(lengths) for one in of_kind(source.observers, LayerSchedule)):
        return False
    found: Arrays = {}
    buffers, most = source.backend.buffers(), int(lengths.max())
    for value in state:
        where = (slice(None),) * value.shape.index("C")
        found[value.name] = buffers[value.name][(*where, slice(most))].copy()
        if value.positions:
            found[value.name][np.arange(most) >= lengths[:, None]] = value.fill
    core.put(found)
    core.lengths, core.kin = lengths.copy(), Kin.copies(np.arange(core.batch), lengths)
    return True


def is_plain(value: StateValue) -> bool:
    """Whether each token has a slot of its own in it, which nothing but the token decides."""
    own = value.part in (Part.POSITIONS, Part.KEYS, Part.VALUES) and not value.shared
    return own and value.region is CacheRegion.RECENT and "C" in value.shape
