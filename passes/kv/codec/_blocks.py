"""Codecs that encode tokens in blocks: what is old lies in codes, what is new as it is until a block of it is whole."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from accel.ir.entries.compress import COMPRESS
from accel.ir.errors import PassError
from accel.ir.kv import COARSE, KvFacts
from accel.ir.ops.attention import attention, operands_of
from accel.ir.ops.rows import take_rows
from accel.ir.program import Editor, Program, State
from accel.ir.region import Conditional, Entry, sizes
from accel.ir.state import POSITIONS, CacheRegion, Part, name_of, output_of
from accel.ir.trace import trace
from accel.passes import Report
from accel.passes.entry_inputs import EntryInputs
from accel.passes.kv._shared.cached import appends, cache_of
from accel.passes.kv.codec._layer import Layer, layers
from accel.passes.kv.codec._method import AcrossLayers, Codec
from accel.passes.kv.codec._readers import Decoded, note_decoding
from accel.passes.kv.codec._spans import Spanning, blocks_of
from accel.passes.state.recurrent import buffer

STORED = name_of(Part.POSITIONS, region=CacheRegion.KEPT)  # the positions in blocks
_BLOCKS, _OLD, _NEW, _STORED, _TAIL = 31, 37, 5, 41, 43  # example sizes while shapes are worked out


@dataclass
class _Cache:
    """The keys or values of one layer: the step's buffer, and the parts of what is stored."""

    layer: Layer
    state: State
    recent: fx.Node
    parts: list[State]
    stored: list[fx.Node]
    products: fx.Node | None = None  # of the queries, where the codec asks


def hold(codec: Codec, program: Program) -> Report:
    """attention over `kv.<layer>` -> attention over `kept.<layer>` in codes and `kv.<layer>`; an entry
    `compress` moves whole blocks of tokens from the latter to the former.

    Its inputs, beside the state: `fresh [F,R]`, the slots of F new blocks; `places [B,P]`, which block each
    row has in each place, new ones counted after old ones (-1: none); `tail [B,M]`, the slots of what
    stays (-1: nothing). All layers hold the same tokens, so one `kept.pos [B,1,P,R]` says which.
    """
    asks, sites = codec.storage, _sites(program)
    if not sites:
        raise PassError(
            f"{type(codec).__name__}: {program.facts.name} has no cache of keys and "
            "values to quantise; leave kv.codec out"
        )
    editor = Editor(program, program.step.graph)
    batch = program.step.input("tokens").meta["val"].shape[0]
    letters = {"B": batch, "P": editor.symbol("P", _BLOCKS)}
    shape = ("B", 1, "P", asks.block)
    where = State(Part.POSITIONS, None, "int64", shape, -1, CacheRegion.KEPT)
    positions = buffer(program, editor, where, letters)
    seen, caches = layers(codec, program), dict[str, _Cache]()
    for node in sites:
        for part in (Part.KEYS, Part.VALUES):
            recent = cache_of(node, part)
            name = str(recent.target)
            if name not in caches:
                caches[name] = _declare(seen[name], program, editor, recent, letters)
    coarse = None
    if asks.coarse:
        coarse = editor.placeholder(COARSE, (), torch.bool)
        program.step.defaults[COARSE] = torch.tensor(False)
    spanning, decoded = Spanning(), Decoded()
    for node in sites:
        decoded += _read(editor, node, caches, positions, coarse, spanning)
    note_decoding(program, decoded)
    _note_queries(program, editor, sites, caches, letters)
    program.facts.kv = KvFacts(flush=asks.block, sinks=asks.sinks, coarse=bool(asks.coarse))
    program.entries[COMPRESS.name] = _entry(codec, program, list(caches.values()), positions)
    return Report(changed=len(caches))


def _sites(program: Program) -> list[fx.Node]:
    """Attention over slots that the step appends to, that of several layers over one cache included."""
    found = []
    for node in program.nodes(attention.default, entry=program.step):
        if not appends(node):
            continue
        if operands_of(node).bias is not None:
            raise PassError(
                f"{node.name}: attention with a bias by position (ALiBi, T5) cannot read quantised "
                "blocks yet; use a per-token codec (kv-int8), or leave kv.codec out"
            )
        found.append(node)
    return found


def _declare(
    layer: Layer, program: Program, editor: Editor, recent: fx.Node, letters: dict[str, Any]
) -> _Cache:
    """State for what is stored of a buffer."""
    state = next(s for s in program.state if s.name == recent.target)
    if state.shape[2] != "C":
        raise PassError(
            f"layer {state.layer} has its own slots after prefill.prune, but a block kv.codec "
            "stores the same tokens in every layer; use a per-token codec (kv-int8), or leave one of the two out"
        )
    layout = []
    for part, (dtype, inner) in layer.parts().items():
        shape: tuple[int | str, ...] = ("B", layer.groups, "P", *inner)
        kept = State(state.part, state.layer, dtype, shape, 0, CacheRegion.KEPT, part)
        layout.append(kept)
    stored = [buffer(program, editor, s, letters) for s in layout]
    return _Cache(layer, state, recent, layout, stored)


def _read(
    editor: Editor,
    node: fx.Node,
    caches: dict[str, _Cache],
    positions: fx.Node,
    coarse: fx.Node | None,
    spanning: Spanning,
) -> Decoded:
    """Attention reads what is stored, which is returned, before what is new; of all parts or, where the call says so,
    `coarse` ones.
    """
    found: dict[str, fx.Node] = {}
    with editor.graph.inserting_before(node):
        for part in (Part.KEYS, Part.VALUES):
            cache = caches[str(cache_of(node, part).target)]
            if part is Part.VALUES and cache is caches[str(cache_of(node, Part.KEYS).target)]:
                found["v"] = found["k"]
                continue
            given = list(cache.stored)
            if cache.layer.turned:
                given.append(
                    trace(
                        editor, STORED, lambda x: x.flatten(1), positions, like=node, key=("where",)
                    )
                )
            if isinstance(cache.layer.codec, AcrossLayers):
                found[part] = _spanning(editor, cache, given, spanning, node)
            elif coarse is None:
                found[part] = _decoded(editor, cache, given, node)
            else:
                found[part] = _chosen(editor, cache, coarse, given, node)
        layer, heads = (
            caches[str(cache_of(node, Part.KEYS).target)].layer,
            int(sizes(found["k"])[1]),
        )
        flat = trace(
            editor, STORED, lambda x: x.flatten(2).expand(-1, heads, -1), positions, like=node
        )
        unread = layer.codec.unread(layer.at(layer.tensors)) if layer.codec.storage.block else None
        if unread is not None and unread.any():
            none = editor.param(f"codec.{layer.number}.unread", unread)
            flat = trace(editor, STORED, _hidden, flat, none, like=node, key="unread")
    node.kwargs = {**node.kwargs, "kept_k": found["k"], "kept_v": found["v"], "kept_pos": flat}
    return [
        (caches[str(cache_of(node, part).target)].layer, found[part])
        for part in (Part.KEYS, Part.VALUES)
    ]


def _hidden(positions: Tensor, unread: Tensor) -> Tensor:
    """Positions [B,G,P], none of heads that are `unread` [G]."""
    return positions.masked_fill(unread[:, None], -1)


def _decoded(
    editor: Editor, cache: _Cache, operands: list[fx.Node], like: fx.Node, coarse: bool = False
) -> fx.Node:
    """What is stored of a buffer [B,G,P R,D]. operands: its parts, and the positions where keys are turned."""
    layer = cache.layer
    turned = layer.tables(editor) if layer.turned else []
    decode = layer.decode_coarse if coarse else layer.decode
    found: fx.Node = trace(
        editor,
        f"{cache.state.name}.stored",
        decode,
        *operands,
        *turned,
        *layer.operands(editor),
        like=like,
        key=(decode.__name__, layer),
    )
    return found


def _spanning(
    editor: Editor, cache: _Cache, operands: list[fx.Node], spanning: Spanning, like: fx.Node
) -> fx.Node:
    """The same of a codec that reads it by what other layers were read as."""
    layer = cache.layer
    turned = layer.tables(editor) if layer.turned else []
    near, constants = spanning.near(layer, written=False), layer.operands(editor)
    found, spanning.read[layer.number, layer.role] = trace(
        editor,
        f"{cache.state.name}.stored",
        layer.decode_both,
        *(*operands, *turned, *near, *constants),
        like=like,
        key=("decode both", layer),
    )
    assert isinstance(found, fx.Node)
    return found


def _chosen(
    editor: Editor, cache: _Cache, coarse: fx.Node, operands: list[fx.Node], like: fx.Node
) -> fx.Node:
    """The same, coarsely where the bool `coarse` [] holds: then the other parts are not read."""
    graphs = []
    for part in (True, False):
        graph = fx.Graph()
        holders = [graph.placeholder(str(node.target)) for node in (coarse, *operands)]
        for holder, node in zip(holders, (coarse, *operands), strict=True):
            holder.meta["val"] = node.meta["val"]
        inner = Editor(editor.program, graph)
        graph.output((_decoded(inner, cache, holders[1:], like, part),))
        graphs.append(graph)
    call = editor.graph.call_function(
        Conditional(f"read.{cache.state.name}", *graphs), (coarse, *operands)
    )
    (value,) = next(iter(graphs[0].find_nodes(op="output"))).args[0]
    call.meta |= {"val": (value.meta["val"],), "layer": like.meta["layer"]}
    return editor.call(operator.getitem, call, 0, like=like)


def _note_queries(
    program: Program,
    editor: Editor,
    sites: list[fx.Node],
    caches: dict[str, _Cache],
    letters: dict[str, Any],
) -> None:
    """State `mass.<layer>.query.recent` [B,G,D,D] of each layer of keys whose codec asks: the sum of the outer products
    of all queries, to which each call adds its own. Of layers over one cache those of the first count.
    """
    outputs, end = program.step.output_nodes(), editor.graph.find_nodes(op="output")[0]
    for node in sites:
        cache = caches[str(cache_of(node, Part.KEYS).target)]
        if not cache.layer.asks or cache.products is not None:
            continue
        heads, width = cache.layer.heads, cache.layer.width
        shape = ("B", heads, width, width)
        state = State(Part.MASS, cache.state.layer, "float32", shape, detail="query")
        cache.products = buffer(program, editor, state, letters)
        x = operands_of(node)
        with editor.graph.inserting_before(end):
            outputs[state.output] = trace(
                editor, state.name, partial(_products, heads), x.q, x.q_pos, cache.products,
                like=node, key=("query products", heads),
            )  # fmt: skip
    program.step.set_outputs(outputs)


def _products(heads: int, queries: Tensor, positions: Tensor, old: Tensor) -> Tensor:
    """The sum [B,G,D,D] with the queries [B,H,T,D] at `positions` [B,T] (-1: padding)."""
    real = queries.float().masked_fill((positions < 0)[:, None, :, None], 0)
    flat = real.unflatten(1, (heads, -1)).flatten(2, 3)
    found: Tensor = old + flat.mT @ flat
    return found


def _entry(codec: Codec, program: Program, caches: list[_Cache], positions: fx.Node) -> Entry:
    """The graph that moves blocks."""
    graph = fx.Graph()
    inputs = EntryInputs(program, graph)
    batch, symbol = inputs.batch, inputs.source.symbol
    fresh = inputs.new("fresh", symbol("F", _NEW), codec.storage.block)
    places = inputs.new("places", batch, symbol("N", _STORED))
    tail = inputs.new("tail", batch, symbol("M", _TAIL))
    held, where = inputs.shared(POSITIONS), inputs.placeholder(STORED, positions.meta["val"])
    given = [
        [inputs.placeholder(str(n.target), n.meta["val"]) for n in (cache.recent, *cache.stored)]
        for cache in caches
    ]
    editor = Editor(program, graph)
    moved = trace(editor, "compress.pos", _moved_positions, where, held, fresh, places, tail)
    outputs = {output_of(STORED): moved[0], output_of(POSITIONS): moved[1]}
    rows: dict[int, Any] = {}  # of so many heads, by their number
    spanning, across = Spanning(), isinstance(codec, AcrossLayers)
    if across:
        for cache, nodes in zip(caches, given, strict=True):
            spanning.hold(editor, cache.layer, cache.state.name, fresh, nodes[0], held)
    for cache, nodes in zip(caches, given, strict=True):
        layer = cache.layer
        for groups in (layer.heads, layer.groups):
            if groups not in rows:
                rows[groups] = trace(editor, "compress", partial(_rows, groups), places, tail)
        if across:
            new = spanning.encode(editor, layer, cache.state.name)
            move, operands = partial(_put, len(new)), [*nodes, *new]
            *kept, left = trace(
                editor, f"compress.{cache.state.name}", move, rows[layer.groups][0], rows[layer.heads][1], *operands,
                key=("put", len(new)),
            )  # fmt: skip
            outputs |= {s.output: node for s, node in zip(cache.parts, kept, strict=True)}
            outputs[cache.state.output] = left
            continue
        turned = [held, *layer.tables(editor)] if layer.turned else []
        asked = [] if cache.products is None else [inputs.shared(str(cache.products.target))]
        *kept, left = trace(
            editor,
            f"compress.{cache.state.name}",
            partial(_move, layer),
            fresh,
            rows[layer.groups][0],
            rows[layer.heads][1],
            *nodes,
            *turned,
            *asked,
            *layer.operands(editor),
            key=("move", layer),
        )
        outputs |= {s.output: node for s, node in zip(cache.parts, kept, strict=True)}
        outputs[cache.state.output] = left
    graph.output(tuple(outputs.values()))
    return Entry(graph, list(outputs))


def _move(
    layer: Layer, fresh: Tensor, places: Tensor, tail: Tensor, recent: Tensor, *operands: Tensor
) -> tuple[Tensor, ...]:
    """What is stored of a buffer after whole blocks of it moved there, by part, and what is left of it. operands:
    what is stored of it, the positions [B,C] with cos and sin where keys are turned, the queries' products where
    the codec asks, constants.
    """
    names = list(layer.parts())
    stored, rest = operands[: len(names)], list(operands[len(names) :])
    blocks = blocks_of(recent, fresh)
    if layer.turned:
        held, *rest = rest
        where = blocks_of(held[:, None, :, None], fresh)[..., 0]  # [B,1,F,R]
        new = layer.encode_turned(blocks, where, *rest)
    else:
        new = layer.encode(blocks, *rest)
    kept = [
        _taken(torch.cat((a, new[part]), dim=2), places)
        for part, a in zip(names, stored, strict=True)
    ]
    return (*kept, _taken(recent, tail))


def _put(
    count: int, places: Tensor, tail: Tensor, recent: Tensor, *operands: Tensor
) -> tuple[Tensor, ...]:
    """The same, where the parts of the new blocks, the last `count` operands, are known."""
    stored, new = operands[:count], operands[count:]
    kept = [_taken(torch.cat((a, b), dim=2), places) for a, b in zip(stored, new, strict=True)]
    return (*kept, _taken(recent, tail))


def _rows(groups: int, *places: Tensor) -> tuple[Tensor, ...]:
    """places [B,P] (-1: any), of each [B*G,P]: the same slots of every head."""
    return tuple(x.clamp(min=0).repeat_interleave(groups, dim=0) for x in places)


def _taken(x: Tensor, rows: Tensor) -> Tensor:
    """x [B,G,C,n], rows [B*G,P] -> [B,G,P,n]; whole rows are copied, each in one."""
    found: Tensor = take_rows(x.flatten(0, 1), rows).unflatten(0, x.shape[:2])
    return found


def _moved_positions(
    stored: Tensor, recent: Tensor, fresh: Tensor, places: Tensor, tail: Tensor
) -> tuple[Tensor, Tensor]:
    """Positions of the blocks [B,1,P,R] and of what stays [B,M], -1 where there is nothing."""
    new = blocks_of(recent[:, None, :, None], fresh)[..., 0]
    (rows,) = _rows(1, places)
    kept = _taken(torch.cat((stored, new), dim=2), rows)
    kept = kept.masked_fill((places < 0)[:, None, :, None], -1)
    left = recent.gather(1, tail.clamp(min=0)).masked_fill(tail < 0, -1)
    return kept, left
