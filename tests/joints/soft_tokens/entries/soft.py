"""`soft.embed`: tokens [B,T] -> `stream` [B,T,E]; `soft.step`: the step over a stream."""

from typing import Any

from accel.ir.entries import EntryKind


class _Soft(EntryKind):
    def example(self, program: Any, name: str) -> dict[str, Any]:
        from accel.ir.entries._values import some_layers

        return some_layers(program, name)


SOFT = _Soft("soft", rounds=True)
