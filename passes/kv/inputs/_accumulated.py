"""Values per slot that every call updates by the attention of its queries: state, and the step that writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from accel.ir.ops import ragged
from accel.ir.ops.attention import operands_of
from accel.ir.ops.mass import attention_weights, drawn_attention
from accel.ir.program import Editor, Program, State
from accel.ir.region import sizes
from accel.ir.state import CacheRegion, Part
from accel.ir.trace import trace
from accel.passes.kv._shared.cached import cache_of
from accel.passes.kv.inputs import Site, call, parameters
from accel.passes.state.recurrent import buffer

_STEPS = "steps"  # detail of the state value, and the parameter


class Draw(Protocol):
    """What slots draw of a call's queries, as attention computes it anyway."""

    def __call__(self, share: Tensor | None = None, **noisy: Any) -> Tensor:
        """[B,G,S], of all heads of a group; each query counts share [B,T] times, or once. `noisy`: the operands
        `temperature` [B], `layer`, `noise` and `seed` of a softmax with noise (see `drawn_attention`).
        """


def _kept(
    program: Program, editor: Editor, site: Site, name: str, detail: str, steps: bool
) -> tuple[tuple[State, State, State], dict[str, fx.Node]]:
    """The state that is kept of a layer's slots, and what the step reads of it; `steps`: how many single tokens came,
    too.
    """
    keys, where = cache_of(site.node, Part.KEYS), site.kept_values["pos"].meta["val"]
    groups, letter = int(sizes(keys)[1]), f"P{site.layer}"
    letters = {"B": where.shape[0], "C": keys.meta["val"].shape[2], letter: where.shape[2]}
    shape = ("B", site.lists, letter)
    kept = State(Part.MASS, site.layer, "float32", shape, 0, CacheRegion.KEPT, detail)
    recent = State(Part.MASS, site.layer, "float32", ("B", groups, "C"), detail=detail)
    words = ".".join(word for word in (detail, _STEPS) if word)
    count = State(Part.MASS, site.layer, "float32", ("B",), detail=words)
    site.kept_values[name] = buffer(program, editor, kept, letters)
    site.kept_values[f"{name}.recent"] = buffer(program, editor, recent, letters)
    before = {"kept": site.kept_values[name], "recent": site.kept_values[f"{name}.recent"]}
    if steps:
        before[_STEPS] = buffer(program, editor, count, letters)
    return (kept, recent, count), before


def _step(
    update: Callable[..., Tensor],
    name: str,
    before: Sequence[str],
    read: Sequence[str],
    rest: Mapping[str, Any],
    flat: bool,
) -> Callable[..., tuple[Tensor, ...]]:
    """What a call makes of the state `before` and of what attention reads: the next state. `rest`: attention's options.
    `flat`: heads have unequal numbers of slots, which lie behind each other.
    """

    def step(*values: Tensor) -> tuple[Tensor, ...]:
        old: Mapping[str, Tensor] = dict(zip(before, values, strict=False))
        x = dict(zip(read, values[len(before) :], strict=True))
        wide = old["kept"].shape[2]
        first = x["kept_pos"].shape[2] - wide  # tokens that were demoted come before
        groups = old["recent"].shape[1]
        slots = x["k_pos"][:, None].expand(-1, groups, -1)
        held, places = old["kept"], x["kept_pos"][..., first:]
        if flat:  # each head has all slots, but for those of others, which are empty
            numbers = torch.ones_like(places[0, 0]).cumsum(0) - 1
            mine = ragged.owned(x["kept_counts"], numbers)
            held = torch.where(mine, held, 0.0)
            places = torch.where(mine, places, -1)

        def drawn(share: Tensor | None = None, **noisy: Any) -> Tensor:
            share = torch.ones_like(x["q_pos"], dtype=torch.float32) if share is None else share
            found: Tensor = drawn_attention(**rest, **x, share=share, **noisy)
            return found[..., first:]

        named: dict[str, Any] = {
            **old,
            name: torch.cat((held, old["recent"]), dim=2),
            "drawn": drawn,
            "query_positions": x["q_pos"],
            "positions": torch.cat((places, slots), dim=2),
        }
        if "weights" in parameters(update):
            found = attention_weights(**rest, **x).unflatten(1, (groups, -1))
            named["weights"] = found[..., first:]
        more: tuple[Tensor, ...] = ()
        if _STEPS in old:
            tokens = (x["q_pos"] >= 0).sum(1)
            named[_STEPS] = (old[_STEPS] + tokens).masked_fill(tokens > 1, 0)
            more = (named[_STEPS],)
        new = call(update, named)
        kept_part = new[..., :wide]
        if flat:
            kept_part = torch.where(mine, kept_part, 0.0).sum(1, keepdim=True)
        return kept_part, new[..., wide:], *more

    return step


def accumulate(
    program: Program,
    site: Site,
    name: str,
    update: Callable[..., Tensor],
    key: Any,
    detail: str = "",
) -> None:
    """Keep `name` [B,G,S] of a layer's slots, which is `update` of itself and a call's attention. The parameters of
    `update` name what it reads:

    | parameter | |
    |---|---|
    | `name` [B,G,S] | before the call; 0 for its own tokens |
    | `drawn`, see `Draw` | the sum of the attention of the call's queries; 0 for padding |
    | `weights` [B,G,R,T,S] | the attention itself, R heads of each group: all of it in memory |
    | `query_positions` [B,T] | -1: padding |
    | `positions` [B,G,S] | position of each slot; -1: empty |
    | `steps` [B] | calls of one token since the last call of several, this one among them |
    | `layer` [] | number of the layer |

    `key`: hashable; updates of one key are the same function.
    """
    editor, outputs = Editor(program, program.step.graph), program.step.output_nodes()
    wanted, flat = parameters(update), "counts" in site.kept_values
    states, before = _kept(program, editor, site, name, detail, _STEPS in wanted)
    end = editor.graph.find_nodes(op="output")[0]  # outside of any layer
    if "layer" in wanted:
        with editor.graph.inserting_before(end):
            number = torch.tensor(site.layer)
            before["layer"] = editor.param(f"{name}.{site.layer}.layer", number)
    form = vars(operands_of(site.node))
    read = {operand: n for operand, n in form.items() if isinstance(n, fx.Node)}
    rest = {operand: value for operand, value in form.items() if operand not in read}

    step = _step(update, name, list(before), list(read), rest, flat)
    with editor.graph.inserting_before(end):
        found = trace(
            editor,
            states[0].name,
            step,
            *before.values(),
            *read.values(),
            like=site.node,
            key=(name, key, flat, *rest.items(), *read),
        )
    outputs |= {state.output: new for state, new in zip(states, found, strict=False)}
    program.step.set_outputs(outputs)
