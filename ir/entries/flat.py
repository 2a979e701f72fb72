"""`flat`: the step over the tokens of all rows in one row, without padding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel.ir.entries import EntryKind

if TYPE_CHECKING:
    from torch import Tensor

OWNER = "owner"


class _Flat(EntryKind):
    def example(self, program: Any, name: str) -> dict[str, Tensor]:
        """Three rows of an empty cache: two tokens, none, and some more, with logits for all."""
        import torch

        from accel.ir.entries._values import call, empty_state, numbers, taken

        entry = program.entries[name]
        long = min(11, program.facts.max_context)
        counts = [min(2, long), 0, long]
        given = call(program, 1, sum(counts))
        positions = torch.cat([torch.arange(n) for n in counts])
        rows = torch.arange(3).repeat_interleave(torch.tensor(counts))
        given |= {
            "positions": positions[None],
            "slots": numbers([0, 0, 0]),
            "rows": torch.arange(sum(counts))[None],
            OWNER: torch.stack((rows, positions), 1),
        }
        return taken(entry, given, empty_state(program, entry, 3))


FLAT = _Flat("flat", variants=True, rounds=True)
