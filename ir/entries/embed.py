"""`embed`: what the step makes of its tokens before the first layer, a row for each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel.ir.entries import EntryKind

if TYPE_CHECKING:
    from torch import Tensor

EMBEDS, EMBEDDED = (
    "embeds",
    "embedded",
)  # inputs of the step: rows [B,T,E], and which of a call's are given [B,T]


class _Embed(EntryKind):
    def example(self, program: Any, name: str) -> dict[str, Tensor]:
        """Some tokens of two rows."""
        from accel.ir.entries._values import call

        return {"tokens": call(program, 2, 5)["tokens"]}


EMBED = _Embed("embed", rounds=True)
