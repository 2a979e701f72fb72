"""`head`: hidden states `stream` [B,T,E] -> logits."""

from typing import Any

from accel.ir.entries import EntryKind


class _Head(EntryKind):
    def example(self, program: Any, name: str) -> dict[str, Any]:
        from accel.ir.entries._values import some_layers

        return some_layers(program, name)


HEAD = _Head("head")
