"""Tokens that stay take positions from 0 on: their keys are rotated back, by the step's own tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from accel.ir.errors import PassError
from accel.ir.ops.attention import operands_of
from accel.ir.ops.op import operand_of
from accel.ir.ops.rope import rope
from accel.ir.program import Editor, Program
from accel.ir.tables import Tables
from accel.passes.kv._shared.rotation import rotated
from accel.passes.kv._shared.shift import rotations, tables
from accel.passes.kv.inputs import Site

COS, SIN = "turn.cos", "turn.sin"  # operands: tables of positions -(M-1) .. M-1 [2M-1,R/2]
_LONGEST = 20  # budgets are looked at up to so many powers of 2


@dataclass(frozen=True)
class Turn:
    """How a layer's keys are rotated; layers of one `number` have one table."""

    number: int
    tables: tuple[Tensor, Tensor]
    interleaved: bool

    def operands(self, editor: Editor) -> dict[str, fx.Node]:
        """The tables as operands of the layer."""
        names = (COS, SIN)
        return {
            name: editor.param(f"compress.{self.number}.{name}", table)
            for name, table in zip(names, self.tables, strict=True)
        }


def turn(keys: Tensor, delta: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Keys [B,G,N,D] at positions that are `delta` [B,G,N] later, or earlier."""
    at = (delta + cos.shape[0] // 2).flatten(0, 1)
    found: Tensor = rope(keys.flatten(0, 1)[:, None], at, cos, sin, interleaved)
    return found[:, 0].view_as(keys)


def unturned(keys: Tensor, where: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Keys [B,G,S,D] at positions `where` [B,G,S] as they were before rotation. Not by `rope`, which ONNX Runtime takes
    for no more slots than its tables have rows.
    """
    at = cos.shape[0] // 2 - where.clamp(min=0)
    return rotated(keys, cos[at], sin[at], interleaved)


def turned(program: Program, sites: Sequence[Site], step: Any) -> dict[int, Turn]:
    """How keys of each layer are rotated, for the methods of `step`. Raises PassError."""
    what = _what(step)
    _check(program, sites, step)
    found: dict[int, Turn] = {}
    known: dict[Any, Turn] = {}
    for layer, node in rotations(program, what).items():
        cos, sin = operand_of(node, "cos"), operand_of(node, "sin")
        interleaved = bool(operand_of(node, "interleaved"))
        key = cos, sin, interleaved
        if key not in known:
            known[key] = Turn(len(known), tables(program, layer, cos, sin, what), interleaved)
        found[layer] = known[key]
    return found


def _what(step: Any) -> str:
    """The keep, as a recipe names it."""
    return "kv.keep = " + type(step.keep).__module__.rpartition(".")[2].replace("_", "-")


def _check(program: Program, sites: Sequence[Site], step: Any) -> None:
    """All layers and heads keep equally many tokens, and nothing else goes by position."""
    count, what = len(program.facts.layers), _what(step)
    if len(sites) != count:
        raise PassError(
            f"only {len(sites)} of {count} layers have a key cache, and the state of the others does not move with it; "
            f"leave {what} out for this model"
        )
    for site in sites:
        if operands_of(site.node).window:
            raise PassError(
                f"layer {site.layer} sees a window of the tokens, and would hold fewer than others; leave {what} out "
                "for this model"
            )
    budget, score = step.budget, step.score
    uneven = not budget.even or budget.across is not None or isinstance(budget, Tables)
    if not uneven:
        sizes = ({budget.tokens(1 << n, i, count) for i in range(count)} for n in range(_LONGEST))
        uneven = any(len(layer) > 1 for layer in sizes)
    if uneven:
        raise PassError(
            f"{what}: layers or heads would hold different numbers of tokens with this kv.budget; use 'uniform', "
            "without dense_layers"
        )
    if score.lookahead or score.repeats:
        raise PassError(
            f"{what} moves tokens, but this kv.score runs some aside at their old positions; use another score, such "
            "as 'snapkv'"
        )
    if lasting := [name for one in step.inputs if one.lasting for name in one.marks]:
        raise PassError(
            f"{what} moves tokens, but a method of the recipe goes by `{lasting[0]}`, which says positions that last; "
            "use kv.keep = drop"
        )


def check_made(sites: Sequence[Site], step: Any) -> None:
    """Raise PassError where something is known of each token, and the keep makes tokens that nobody read."""
    known = [
        name for site in sites for name in site.kept_values if f"{name}.recent" in site.kept_values
    ]
    if step.keep.makes and known:
        raise PassError(
            f"{_what(step)} makes tokens that were never read, and a method of the recipe goes by `{known[0]}` of each "
            "token; use kv.score = 'streaming-llm'"
        )
