"""`skips`: which layers to leave out so that a token's residual stream comes out most alike (arXiv:2505.24196)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel.ir.entries import EntryKind

if TYPE_CHECKING:
    from torch import Tensor

STREAMS = "streams"  # input [B,L+1,E]: a token's stream before each layer, and behind the last
SKIPS, LIKENESS = "skips", "likeness"  # outputs [B,L,N+1] and [B,N+1]
_HELD = 9, 5  # tokens of the example's rows
_MOST = 3  # layers that it leaves out


class _Skips(EntryKind):
    def example(self, program: Any, name: str) -> dict[str, Tensor]:
        """A token of two rows behind random keys and values, of which the second has fewer."""
        import torch

        from accel.ir.entries._values import SLOTS, cached, numbers, random, taken

        entry, generator, slots = program.entries[name], random(), numbers(_HELD)
        sizes = [int(size) for size in entry.input(STREAMS).meta["val"].shape[1:]]
        given = {
            STREAMS: torch.randn(2, *sizes, generator=generator).cumsum(1),
            "positions": slots[:, None].expand(-1, _MOST + 1),
            "slots": slots,
            "tree": torch.eye(_MOST + 1, dtype=torch.bool).expand(2, -1, -1),
        }
        every = torch.arange(SLOTS).expand(2, -1)
        places = torch.where(every < slots[:, None], every, -1)
        for state in program.state:
            given[state.name] = cached(state, state.allocate(B=2, C=SLOTS), places, generator)
        return taken(entry, given)


SKIPPING = _Skips("skips", variants=True, rounds=True, chooses=True)
