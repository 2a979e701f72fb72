"""`output` [H,D,E]: the part of the layer's output projection that each head's result goes through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from accel.ir.errors import PassError
from accel.ir.region import sizes
from accel.passes.kv.inputs import EntryInputs, Input, Site

aten = torch.ops.aten
_VIEWS = {
    aten.transpose.int, aten.permute.default, aten.reshape.default, aten.view.default, aten.flatten.using_ints,
    aten.contiguous.default, aten.clone.default,
}  # fmt: skip


class Output(Input):
    """The weight of the linear layer behind the attention, which the entry reads as the step does."""

    names = ("output",)

    def prepare(self, program: Any, sites: Sequence[Site], methods: Sequence[Any]) -> None:
        """See Input."""
        for site in sites:
            weight_of(site)

    def placeholders(
        self, entry: EntryInputs, site: Site, methods: Sequence[Any]
    ) -> dict[str, fx.Node]:
        """See Input."""
        return {"output": entry.param(str(weight_of(site).target))}

    def read(self, operands: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See Input."""
        weight = operands["output"].unflatten(1, (-1, operands["kept_v"].shape[3]))
        return {"output": weight.permute(1, 2, 0)}


def weight_of(site: Site) -> fx.Node:
    """The weight [E,H D]. Raises PassError."""
    heads, _, width = sizes(site.node)[1:]
    node, shape = site.node, sizes(site.node)
    while True:
        for user in node.users:
            weight = user.args[1] if user.target is aten.linear.default else None
            if not isinstance(weight, fx.Node) or weight.op != "get_attr":
                continue
            if len(shape) == 3 and int(sizes(weight)[1]) == int(heads) * int(width):
                return weight
        ways = [user for user in node.users if user.target in _VIEWS]
        if not ways or "v" not in site.kept_values:
            why = "values are a latent (MLA)" if "v" not in site.kept_values else _read_by(node)
            raise PassError(
                f"layer {site.layer} has no plain output projection behind its attention: {why}; leave out the "
                "method that reads `output` (as critical-kv), or take another"
            )
        node, shape = ways[0], sizes(ways[0])


def _read_by(node: fx.Node) -> str:
    users = ", ".join(str(user.target) for user in node.users) or "nothing"
    return f"{node.name} is read by {users}"
