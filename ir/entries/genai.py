"""`genai`: the step in onnxruntime-genai's convention, past keys and values in, longer ones out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel.ir.entries import EntryKind
from accel.ir.state import Part, StateValue

if TYPE_CHECKING:
    from torch import Tensor

_PARTS = {Part.KEYS: "key", Part.VALUES: "value"}


def past_of(state: StateValue) -> str:
    """The input that is a layer's keys or values so far."""
    return f"past_key_values.{state.layer}.{_PARTS[state.part]}"


def present_of(state: StateValue) -> str:
    """The output that is those and the call's own."""
    return f"present.{state.layer}.{_PARTS[state.part]}"


class _Genai(EntryKind):
    def example(self, program: Any, name: str) -> dict[str, Tensor]:
        """Two rows with nothing before them."""
        import torch

        from accel.ir.entries._values import call

        entry, given = program.entries[name], call(program, 2, min(13, program.facts.max_context))
        found = {
            "input_ids": given["tokens"],
            "position_ids": given["positions"],
            "attention_mask": torch.ones_like(given["tokens"]),
        }
        for holder in entry.graph.find_nodes(op="placeholder"):
            if holder.target not in {*found, *entry.defaults}:  # past keys and values
                _, heads, _, width = holder.meta["val"].shape
                found[str(holder.target)] = torch.zeros(2, heads, 0, width)
        return found


# the pass that makes it compares it, and another program runs it
GENAI = _Genai("genai", in_place=False, error=None)
