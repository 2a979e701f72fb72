"""`attends` and `form`: the layer's attention of queries over its slots, with its own scale, cap, sink and mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor, fx

from accel.ir.ops.attention import Form, operands_of
from accel.passes.kv.inputs import EntryInputs, Input, Site


class Attends(Protocol):
    """What queries give to the slots, as the layer's attention computes it."""

    def __call__(
        self, queries: Tensor, query_positions: Tensor, ahead: Tensor | None = None
    ) -> Tensor:
        """Queries [B,H,W,D] at [B,W] (-1: not there, gives nothing) -> [B,G,R,W,S], 0 of what a query does not see.

        `ahead` [B,G,S]: see the parameter of this name; slots that it names count, too. Without it, slots from `seen`
        on are empty.
        """


class Attention(Input):
    """The sink is a parameter of the step; what else there is of the attention are constants."""

    names = ("attends", "form")

    def placeholders(
        self, entry: EntryInputs, site: Site, methods: Sequence[Any]
    ) -> dict[str, fx.Node]:
        """See Input."""
        sink = operands_of(site.node).sink
        return {} if sink is None else {"sink": entry.param(str(sink.target))}


def attention_over(
    form: Form, operands: Mapping[str, Tensor], keys: Tensor, key_positions: Tensor
) -> dict[str, Any]:
    """The parameters, of a layer's operands, and its keys [B,G,S,D] whose tokens are at `key_positions` [B,G,S]."""
    whole = replace(form, sink=operands.get("sink"))

    def attends(queries: Tensor, query_positions: Tensor, ahead: Tensor | None = None) -> Tensor:
        where = key_positions if ahead is None else key_positions.maximum(ahead)
        return whole.weights(queries, query_positions, keys, where)

    return {"attends": attends, "form": whole}
