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

        from accel.ir.entries._values import SLOTS, cached, numbers, random, taken

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
        every = torch.arange(SLOTS).expand(2, -1)
        places = torch.where(every < slots[:, None], every, -1)
        for state in program.state:
            given[state.name] = cached(state, state.allocate(B=2, C=SLOTS), places, generator)
        return taken(entry, given)


AUGMENT = _Augment("augment", variants=True, rounds=True, feature="prefill")
