"""What the sessions of a model keep beside their caches, in the order in which they ask it."""

from __future__ import annotations

from accel.ir.depth import Depth
from accel.ir.prefill import Prefill
from accel.runtime.backends.protocol import Stepper
from accel.runtime.session.observers.blocks import keeper
from accel.runtime.session.observers.eviction import KvPlan
from accel.runtime.session.observers.layers import Plans
from accel.runtime.session.observers.observer import Companion
from accel.runtime.session.observers.prefix_cache import Pages
from accel.runtime.session.observers.pruning import Pruner
from accel.runtime.session.observers.recurrent import Past


def companions(
    stepper: Stepper,
    batch: int,
    depth: Depth | None = None,
    kv: KvPlan | None = None,
    prefill: Prefill | None = None,
    pages: Pages | None = None,
) -> tuple[Companion, ...]:
    """Those that a session of `batch` rows needs. Their order:

    1. `Past` first, since a state that goes forward has gone, whatever another one does after the step.
    2. `Keeper` or `Blocks`, which may compress the slots; then `Pruner` and `Pages`, which know of others.
    3. `Plans` last: what a call ran counts only when all else about it went well.
    """
    found = (
        Past(batch) if stepper.recurrent else None,
        None if kv is None else keeper(kv, batch),
        Pruner(prefill.stages, batch) if prefill is not None and prefill.stages else None,
        pages,
        None if depth is None else Plans(depth, batch),
    )
    return tuple(one for one in found if one is not None)
