"""KV Prediction (arXiv:2410.08391): a smaller model reads the prompt, and linear maps make the cache of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from accel.ir.axis import option
from accel.ir.errors import PassError
from accel.ir.invariants import Invariant
from accel.ir.ops.op import operand_of
from accel.ir.ops.rope import rope
from accel.ir.program import Editor, Program
from accel.ir.region import Region
from accel.ir.state import Part
from accel.ir.tables import Observed, Rows, Sizes, Tables
from accel.ir.trace import trace
from accel.passes import Report
from accel.passes.kv._shared.second_model import joined, reader
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

    aux: the folder of a smaller model of the same tokens, which then reads the prompt of an empty session in one call.
    Keys and values of all layers are maps of those of its layers, which are spread evenly over them.

    The maps are least squares over a text: the part of the paper's loss that is of keys and values, without its L1 and
    without training the smaller model. Calls that leave fewer than `least` tokens to it run whole.
    """

    least: int = option(16, least=1)
    aux: str = ""
    lacks = "training of the smaller model"
    key: ClassVar[str] = "kv-prediction"
    small: ClassVar[Mapping[str, Any]] = {"least": 1}

    stage = -1  # products have their own weights yet
    by_position = True  # no token is chosen
    relies = Base.relies | {
        Invariant.ALL_LAYERS_RUN,
        Invariant.CHAINS,
        Invariant.FIXED_LAYERS,
        Invariant.PLAIN_KEYS,
        Invariant.UNIFORM_SLOTS,
    }
    breaks = frozenset(
        {Invariant.BATCH_INVARIANCE, Invariant.CALL_INDEPENDENT, Invariant.EVERY_TOKEN_RUNS}
    )

    @property
    def second_model_folder(self) -> str:
        """See Pass."""
        return self.aux

    def sizes(self, width: int, heads: int) -> Sizes:
        """`map` [F+1,2 G D] of the F numbers that it is predicted from; a layer that runs has none."""
        return {"map": (-1, 2 * heads * width)}

    def measure(self, rows: Iterable[Rows]) -> dict[int, dict[str, Tensor]]:
        """Least squares of each layer above the first half on the last one of that half; or of each layer on one of
        the model beside.
        """
        squares: dict[int, Tensor] = {}
        products: dict[int, Tensor] = {}
        widths: dict[int, int] = {}
        for row in rows:
            layers = sorted(row.layers)
            source, above = split(layers)
            known = {source: _numbers(row.layers[source])}
            sources = dict.fromkeys(above, source)
            if self.aux:
                known = {j: _with_one(x) for j, x in enumerate(row.second_layers)}
                sources = spread(layers, len(known))
            for j, x in known.items():
                squares[j] = squares.get(j, 0) + x.mT @ x
            for layer in layers:
                wanted = _numbers(row.layers[layer])[:, :-1]
                widths[layer] = wanted.shape[1]
                if layer in sources:
                    product = known[sources[layer]].mT @ wanted
                    products[layer] = products.get(layer, 0) + product
        found = {}
        for layer, product in products.items():
            square = squares[sources[layer]]
            square = square + _RIDGE * square.diagonal().mean() * torch.eye(len(square))
            found[layer] = torch.linalg.solve(square, product).float()
        return {i: {"map": found.get(i, torch.zeros(0, w))} for i, w in widths.items()}

    def run(self, program: Program) -> Report:
        if self.aux:
            return self._by_another(program)
        source, above = _layers(program)
        tables = self._maps(program)
        entry = program.copy().step
        calls = layer_calls(program, entry)
        k, v = (added(calls[source], node) for node in _appended(calls[source], source))
        with entry.graph.inserting_before(calls[above[0]]):
            known = trace(Editor(program, entry.graph), "known", joined, k, v)
        _predict(program, calls, dict.fromkeys(above, known), {i: tables[i] for i in above})
        filling(program, entry, self.least)
        program.facts.notes.append(
            f"kv-prediction predicts a prompt's keys and values of layers {above[0]}..{above[-1]} from layer {source}"
        )
        return Report(changed=len(above))

    def _by_another(self, program: Program) -> Report:
        """Let the model beside read prompts."""
        _check(program)
        if program.second_model is None:
            raise PassError("kv-prediction: the model of `aux` was not read; build the recipe")
        layers, maps = layers_with_state(program), self._maps(program)
        entry = program.copy().step
        calls = layer_calls(program, entry)
        given = (entry.input(name) for name in ("tokens", "positions"))
        with entry.graph.inserting_before(calls[0]):
            rows = trace(
                Editor(program, entry.graph), "beside", reader(program.second_model), *given
            )
        sources = spread(layers, len(rows))
        _predict(program, calls, {i: rows[j] for i, j in sources.items()}, maps)
        filling(program, entry, self.least, whole=True)
        program.facts.notes.append(
            f"kv-prediction predicts a prompt's keys and values from the {len(rows)} layers of "
            f"{program.second_model.facts.name}, which has {program.second_model.facts.parameters:,} parameters"
        )
        return Report(changed=len(layers))

    def _maps(self, program: Program) -> dict[int, Tensor]:
        """Those of this model."""
        sites = attentions(program)
        tables = constants(self, program, {i: appended(node) for i, node in sites.items()})
        return {i: table["map"] for i, table in tables.items()}


def split(layers: list[int]) -> tuple[int, list[int]]:
    """The last of the first half of these, rounded up, and those behind it."""
    half = (len(layers) + 1) // 2
    return layers[half - 1], layers[half:]


def spread(layers: list[int], count: int) -> dict[int, int]:
    """Layer -> which of `count` layers of another model it is predicted from: in order, evenly."""
    return {layer: place * count // len(layers) for place, layer in enumerate(layers)}


def _layers(program: Program) -> tuple[int, list[int]]:
    """The layer that is predicted from, and those that are. Raises PassError."""
    _check(program)
    layers = layers_with_state(program)
    if len(layers) < 2:
        raise PassError("kv-prediction: this model has one layer; leave prefill.prune out for it")
    return split(layers)


def _check(program: Program) -> None:
    """Raise PassError where keys and values cannot be predicted."""
    facts = program.facts.layers
    shared = any(layer.shares is not None for layer in facts)
    if program.facts.encoder is not None:
        reason = "the prompt of an encoder-decoder is a few tokens; leave prefill.prune out for it"
    elif any(layer.attention == "recurrent" for layer in facts):
        reason = "recurrent state is a sum over the tokens, not one value of each; use the recipe gemfilter"
    elif shared:
        reason = "upper layers of this model read caches of lower ones; use the recipe yoco, which is exact for it"
    else:
        return
    raise PassError(f"kv-prediction: {reason}")


def _predict(
    program: Program,
    calls: list[fx.Node],
    sources: Mapping[int, fx.Node],
    maps: Mapping[int, Tensor],
) -> None:
    """Let layers append what is predicted of their sources [B,T,F]."""
    for layer, weight in maps.items():
        call, (keys, values) = calls[layer], _appended(calls[layer], layer)
        known, heads = sources[layer], _heads((keys, values))
        region = call.target
        assert isinstance(region, Region)
        if len(weight) != known.meta["val"].shape[2] + 1:
            raise PassError(
                f"kv-prediction: the map of layer {layer} takes {len(weight) - 1} numbers of a token, but the layer "
                f"that it is predicted from has {known.meta['val'].shape[2]}; measure it again for this model"
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
                mapped(weight, *heads),
                holder,
            )
        for node, new in zip((keys, values), made, strict=True):
            for user in users[node]:
                user.replace_input_with(node, new)


def mapped(weight: Tensor, keys: tuple[int, int], values: tuple[int, int]) -> Any:
    """A function of rows [B,T,F]: keys and values of these numbers of heads and widths, by a map [F+1,…]."""
    matrix, bias = weight[:-1].mT.contiguous(), weight[-1].contiguous()

    def predicted(known: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.nn.functional.linear(known, matrix, bias)
        k, v = out.split([keys[0] * keys[1], values[0] * values[1]], dim=2)
        return (
            k.unflatten(2, list(keys)).transpose(1, 2),
            v.unflatten(2, list(values)).transpose(1, 2),
        )

    return predicted


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
    return _with_one(joined(keys, x.values))


def _with_one(rows: Tensor) -> Tensor:
    """Rows [B,T,F] and 1: [tokens,F+1]."""
    rows = rows.double().flatten(0, 1)
    return torch.cat([rows, torch.ones_like(rows[:, :1])], dim=1)
