"""`rank.<number>`: what lies between two attentions of the step, for the tokens of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from accel.ir.entries import EntryKind

if TYPE_CHECKING:
    from torch import Tensor

    from accel.ir.facts import Facts


def between(number: int) -> str:
    """The entry from the attention of layer `number` - 1 to that of layer `number`."""
    return f"{RANK.name}.{number}"


class _Rank(EntryKind):
    def names(self, facts: Facts) -> Sequence[str]:
        """By the plan of the prompt: one more than layers."""
        plan = facts.prefill.ranks if facts.prefill is not None else None
        return [between(i) for i in range(len(plan.forms) + 1)] if plan is not None else []

    def example(self, program: Any, name: str) -> dict[str, Tensor]:
        """Two rows of tokens, behind random attention."""
        import torch

        from accel.ir.entries._values import call, random, taken

        entry, generator = program.entries[name], random()
        given = call(program, 2, min(13, program.facts.max_context))
        batch, length = given["tokens"].shape
        for holder in entry.graph.find_nodes(op="placeholder"):
            shape = list(holder.meta["val"].shape)
            if holder.target == "stream":
                given["stream"] = torch.randn(batch, length, int(shape[2]), generator=generator)
            elif holder.target == "attended":
                sizes = batch, int(shape[1]), length, int(shape[3])
                given["attended"] = torch.randn(sizes, generator=generator)
            elif holder.target == "lse":
                given["lse"] = torch.randn(batch, int(shape[1]), length, generator=generator)
        return taken(entry, given)


RANK = _Rank("rank", rounds=True, feature="prefill")
