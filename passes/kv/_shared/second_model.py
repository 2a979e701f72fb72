"""What another model makes of the same tokens: the keys and values of its layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx

from accel.ir.errors import PassError
from accel.ir.ops.attention import attention, operands_of
from accel.ir.ops.rope import rope
from accel.ir.program import Program, evaluate

Reader = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


def joined(keys: Tensor, values: Tensor) -> Tensor:
    """Keys [B,G,T,D] and values [B,G,T,Dv] as one row of each token: [B,T,G D + G Dv]."""
    return torch.cat([x.transpose(1, 2).flatten(2) for x in (keys, values)], dim=2)


def reader(second_model: Program) -> Reader:
    """A function of tokens and positions [B,T] (-1: padding): of each layer that attends its keys before RoPE and its
    values [B,T,F], by a program without state. Raises PassError where it has none.
    """
    sites = second_model.nodes(attention.default, entry=second_model.step)
    if not sites or second_model.facts.encoder is not None:
        raise PassError(
            f"{second_model.facts.name} has no layer that attends to its tokens alone; name a decoder with attention"
        )
    wanted: list[fx.Node] = []
    for site in sites:
        keys = operands_of(site).k
        wanted += [keys.all_input_nodes[0] if keys.target is rope.default else keys]
        wanted += [operands_of(site).v]

    def read(tokens: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        given = {"tokens": tokens, "positions": positions}
        found = evaluate(wanted, second_model.params, given)
        return tuple(joined(*found[i : i + 2]) for i in range(0, len(found), 2))

    return read
