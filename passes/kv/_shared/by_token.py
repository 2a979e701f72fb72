"""What moving keys asks of a model: that caches of keys and values by token are all that it keeps."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from accel.ir.errors import PassError
from accel.ir.ops.attention import operands_of
from accel.ir.ops.kv import kv_append
from accel.ir.ops.op import operand_of
from accel.ir.program import Program
from accel.ir.state import POSITIONS, Part


def check_by_token(
    program: Program,
    sites: Sequence[fx.Node],
    why: str,
    what: str = "kv.reuse",
    recurrent: bool = False,
) -> None:
    """Raise PassError where the model keeps more of its tokens than the caches that attention at `sites` reads, or
    positions act on scores beside. `why`: what a method cannot do with other state; `what` is to be left out then.
    `recurrent`: it can with recurrent state.
    """
    for node in sites:
        if operands_of(node).bias is not None:
            raise PassError(
                f"{node.name}: attention with a bias by position (ALiBi, T5) cannot read reused keys yet; "
                f"leave {what} out for this model"
            )
    known = {POSITIONS, *(name for node in sites for name in _caches(node))}
    if recurrent:
        known |= {s.name for s in program.state if s.part is Part.RECURRENT}
    if other := [s.name for s in program.state if s.name not in known]:
        raise PassError(
            f"'{other[0]}' is state other than a per-token cache of keys and values, {why}; leave "
            f"{what} out for this model"
        )
    if not sites and not program.state:
        raise PassError(f"no layer of this model has a key cache; leave {what} out for it")


def _caches(node: fx.Node) -> list[str]:
    """State that holds keys and values which an attention reads."""
    x = operands_of(node)
    stored = [n for n in (x.k, x.v) if n.target is kv_append.default]
    return [str(operand_of(n, "buffer").target) for n in stored]
