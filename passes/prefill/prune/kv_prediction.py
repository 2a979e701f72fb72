"""KV Prediction (arXiv:2410.08391): a smaller model reads the prompt, and linear maps make the cache of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from accel.ir.errors import PassError, RecipeError
from accel.ir.invariants import Invariant
from accel.ir.ops.op import operand_of
from accel.ir.ops.rope import rope
from accel.ir.program import Editor, Program
from accel.ir.region import Entry, Region
from accel.ir.state import Part
from accel.ir.tables import Observed, Rows, Sizes, Tables
from accel.ir.trace import trace
from accel.passes import Report
from accel.passes.kv._shared.tables import appended, attentions
from accel.passes.prefill._entry import added, layer_calls
from accel.passes.prefill.prune import Base
from accel.passes.prefill.prune._fill import filling, layers_with_state
from accel.passes.prefill.prune._heads import attends
from accel.passes.trained import constants

_RIDGE = 1e-4  # of the mean square of an input


@dataclass(frozen=True)
class KvPrediction(Tables, Base):
    """The smaller model is the first half of the layers, which all tokens of a prompt but its last run through. Keys
    (before RoPE) and values of each layer above are a linear map, with a bias, of those of the last layer that ran. The
    last token, and all later ones, run through the whole model.

    The maps are least squares over a text: the part of the paper's loss that is of keys and values, without its L1 and
    without training the smaller model. Calls that leave fewer than `least` tokens to it run whole.
    """

    least: int = 16
    key: ClassVar[str] = "kv-prediction"
    small: ClassVar[Mapping[str, Any]] = {"least": 1}

    by_position = True  # no token is chosen
    relies = Base.relies | {
        Invariant.ALL_LAYERS_RUN,
        Invariant.CHAINS,
        Invariant.FIXED_LAYERS,
        Invariant.PLAIN_KEYS,
        Invariant.UNIFORM_SLOTS,
    }
    breaks = frozenset({Invariant.BATCH_INVARIANCE, Invariant.CALL_INDEPENDENT})

    def __post_init__(self) -> None:
        if self.least < 1:
            raise RecipeError(
                f"prefill.prune.kv-prediction: least is {self.least}; give at least 1"
            )

    def sizes(self, width: int, heads: int) -> Sizes:
        """`map` [F+1,2 G D] of the F numbers that it is predicted from; a layer that runs has none."""
        return {"map": (-1, 2 * heads * width)}

    def measure(self, rows: Iterable[Rows]) -> dict[int, dict[str, Tensor]]:
        """Least squares of each layer above the first half on the last one of that half."""
        squares: dict[int, Tensor] = {}
        products: dict[int, Tensor] = {}
        widths: dict[int, int] = {}
        for row in rows:
            source, above = split(sorted(row.layers))
            known = _numbers(row.layers[source])
            squares[source] = squares.get(source, 0) + known.mT @ known
            for layer, x in row.layers.items():
                wanted = _numbers(x)[:, :-1]
                widths[layer] = wanted.shape[1]
                if layer in above:
                    products[layer] = products.get(layer, 0) + known.mT @ wanted
        (square,) = squares.values()
        square = square + _RIDGE * square.diagonal().mean() * torch.eye(len(square))
        found = {i: torch.linalg.solve(square, p).float() for i, p in products.items()}
        return {i: {"map": found.get(i, torch.zeros(0, w))} for i, w in widths.items()}

    def run(self, program: Program) -> Report:
        source, above = _layers(program)
        sites = attentions(program)
        tables = constants(self, program, {i: appended(node) for i, node in sites.items()})
        entry = program.copy().step
        calls = layer_calls(program, entry)
        _predict(program, entry, calls, source, {i: tables[i]["map"] for i in above})
        filling(program, entry, self.least)
        program.facts.notes.append(
            f"kv-prediction predicts a prompt's keys and values of layers {above[0]}..{above[-1]} from layer {source}"
        )
        return Report(changed=len(above))


def split(layers: list[int]) -> tuple[int, list[int]]:
    """The last of the first half of these, rounded up, and those behind it."""
    half = (len(layers) + 1) // 2
    return layers[half - 1], layers[half:]


def _layers(program: Program) -> tuple[int, list[int]]:
    """The layer that is predicted from, and those that are. Raises PassError."""
    facts, layers = program.facts.layers, layers_with_state(program)
    shared = any(layer.shares is not None for layer in facts)
    if program.facts.encoder is not None:
        reason = "the prompt of an encoder-decoder is a few tokens; leave prefill.prune out for it"
    elif any(layer.attention == "recurrent" for layer in facts):
        reason = "recurrent state is a sum over the tokens, not one value of each; use the recipe gemfilter"
    elif shared:
        reason = "upper layers of this model read caches of lower ones; use the recipe yoco, which is exact for it"
    elif len(layers) < 2:
        reason = "this model has one layer; leave prefill.prune out for it"
    else:
        return split(layers)
    raise PassError(f"kv-prediction: {reason}")


def _predict(
    program: Program,
    entry: Entry,
    calls: list[fx.Node],
    source: int,
    maps: Mapping[int, Tensor],
) -> None:
    """Let layers of an entry append what is predicted of the keys and values of a layer below."""
    first = _appended(calls[source], source)
    k, v = (added(calls[source], node) for node in first)
    heads = {layer: _heads(_appended(calls[layer], layer)) for layer in maps}
    with entry.graph.inserting_before(calls[min(maps)]):
        known = trace(Editor(program, entry.graph), "known", joined, k, v)
    for layer, found in maps.items():
        call, (keys, values) = calls[layer], _appended(calls[layer], layer)
        region = call.target
        assert isinstance(region, Region)
        if len(found) != known.meta["val"].shape[2] + 1:
            raise PassError(
                f"kv-prediction: the map of layer {layer} takes {len(found) - 1} numbers of a token, but layer "
                f"{source} has {known.meta['val'].shape[2]}; measure it again for this model"
            )
        with region.graph.inserting_after(list(region.graph.find_nodes(op="placeholder"))[-1]):
            holder = region.graph.placeholder("known")
        holder.meta["val"] = known.meta["val"]
        call.args = (*call.args, known)
        users = {node: list(node.users) for node in (keys, values)}
        readers = {user for each in users.values() for user in each}
        before = next(n for n in region.graph.nodes if n in readers)
        with region.graph.inserting_before(before):
            made = trace(
                Editor(program, region.graph),
                f"{region.name}.predicted",
                mapped(found, *heads[layer]),
                holder,
            )
        for node, new in zip((keys, values), made, strict=True):
            for user in users[node]:
                user.replace_input_with(node, new)


def joined(keys: Tensor, values: Tensor) -> Tensor:
    """Keys [B,G,T,D] and values [B,G,T,Dv] as one row of each token: [B,T,G D + G Dv]."""
    return torch.cat([x.transpose(1, 2).flatten(2) for x in (keys, values)], dim=2)


def mapped(weight: Tensor, keys: tuple[int, int], values: tuple[int, int]) -> Any:
    """A function of rows [B,T,F]: keys and values of these numbers of heads and widths, by a map [F+1,…]."""
    matrix, bias = weight[:-1].mT.contiguous(), weight[-1].contiguous()

    def found(known: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.nn.functional.linear(known, matrix, bias)
        k, v = out.split([keys[0] * keys[1], values[0] * values[1]], dim=2)
        return (
            k.unflatten(2, list(keys)).transpose(1, 2),
            v.unflatten(2, list(values)).transpose(1, 2),
        )

    return found


def _appended(call: fx.Node, layer: int) -> tuple[fx.Node, fx.Node]:
    """The keys of a layer before RoPE, and its values, that it appends. Raises PassError."""
    node = attends(call)
    stored = None if node is None else [operand_of(node, part) for part in (Part.KEYS, Part.VALUES)]
    if stored is None or stored[0] is stored[1]:
        raise PassError(
            f"kv-prediction: layer {layer} has no keys and values apart from each other; leave prefill.prune out"
        )
    keys, values = (operand_of(append, "new") for append in stored)
    assert isinstance(keys, fx.Node) and isinstance(values, fx.Node)
    if keys.target is rope.default:
        keys = keys.all_input_nodes[0]
    return keys, values


def _heads(nodes: Iterable[fx.Node]) -> list[tuple[int, int]]:
    """Numbers of heads and widths of keys and values [B,G,T,D]."""
    shapes = [node.meta["val"].shape for node in nodes]
    return [(int(shape[1]), int(shape[3])) for shape in shapes]


def _numbers(x: Observed) -> Tensor:
    """Of each token the keys before RoPE, the values, and 1: [tokens,F+1]."""
    keys = x.keys if x.unrotated is None else x.unrotated
    rows = joined(keys, x.values).double().flatten(0, 1)
    found: Tensor = torch.cat([rows, torch.ones_like(rows[:, :1])], dim=1)
    return found
