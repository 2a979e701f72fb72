"""`encode`: the encoder's input -> the cross state, once for a session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel.ir.entries import EntryKind

if TYPE_CHECKING:
    from torch import Tensor


class _Encode(EntryKind):
    def example(self, program: Any, name: str) -> dict[str, Tensor]:
        """Two rows of different lengths."""
        from accel.ir.capture.examples import encoder_example

        return encoder_example(program.facts.encoder, batch=2)


ENCODE = _Encode("encode", in_place=False, feature="encoder")
