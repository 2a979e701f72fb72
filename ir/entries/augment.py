"""`augment.0`, `augment.1`: a second model reads the cache of a prompt and gives embeddings; the step takes these in
place of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from accel.ir.entries import EntryKind

if TYPE_CHECKING:
    from torch import Tensor

    from accel.ir.facts import Facts

COPROCESS, EMBEDDED = "augment.0", "augment.1"
LATENTS = "latents"  # what the first gives [B,T,E], which the second takes as `stream`
_HELD = 9, 5  # tokens of the example's rows


class _Augment(EntryKind):
    def names(self, facts: Facts) -> Sequence[str]:
        """By the plan of the prompt."""
        there = facts.prefill is not None and facts.prefill.latents
        return [COPROCESS, EMBEDDED] if there else []

    def example(self, program: Any, name: str) -> dict[str, Tensor]:
        """Two rows behind random keys and values, of which the second has fewer."""
        import torch

        from accel.ir.entries._values import SLOTS, filled, numbers, random, taken

        entry, count, generator = program.entries[name], program.facts.prefill.latents, random()
        columns, slots = torch.arange(count).expand(2, -1), numbers(_HELD)
        given = {
            "tokens": columns,
            "positions": slots[:, None] + columns,
            "slots": slots,
            "rows": columns,
        }
        if "stream" in entry.inputs:
            width = int(entry.input("stream").meta["val"].shape[2])
            given["stream"] = torch.randn(2, count, width, generator=generator)
        for state in program.state:
            blank = state.allocate(B=2, C=SLOTS)
            if state.positions:
                places = torch.arange(SLOTS).expand(2, -1)
                given[state.name] = torch.where(places < slots[:, None], places, -1)
            elif blank.dtype in (torch.float32, torch.int8):
                value = filled(blank.shape, blank.dtype, generator)
                plain = state.stored or blank.dtype is torch.int8
                given[state.name] = value if plain else value.abs() + 0.1  # scales
            else:
                given[state.name] = blank
        return taken(entry, given)


AUGMENT = _Augment("augment", variants=True, rounds=True, feature="prefill")
