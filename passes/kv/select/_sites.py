"""Which attentions may choose and read lists, and where lies what they read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from accel.ir.ops.attention import Operands, operands_of
from accel.ir.ops.pages import fetch_pages
from accel.ir.program import Editor, Program
from accel.ir.region import sizes
from accel.ir.state import POSITIONS, CacheRegion, Home, Part, output_of

Lists = Mapping[int, tuple[fx.Node, fx.Node]]  # layer -> its attention, its list


def dense(program: Program, node: fx.Node) -> str:
    """Why an attention can neither choose nor read a list; nothing where it can."""
    x = operands_of(node)
    layer = node.meta.get("layer")
    states = {s.name for s in program.state}
    if layer is None or POSITIONS not in states or not _reads_recent(program, x):
        return "it does not read a cache that steps append to"
    if x.bias is not None:
        return "the score bound of a page does not include a position bias (ALiBi, T5)"
    if x.tree is not None:
        return "tokens of a draft tree are not in position order"
    shares = program.facts.layers[layer].shares
    if shares is not None:
        return f"it reads the cache of layer {shares}, whose pages belong to that layer"
    return ""


def set_homes(program: Program, sites: list[fx.Node], homes: Mapping[Part, Home]) -> None:
    """Say where keys and values lie of layers that no attention reads all of in each call, and what is fetched."""
    listed: set[int | None] = set()
    whole: set[int | None] = set()
    for node in sites:
        layer = node.meta.get("layer")
        shares = None if layer is None else program.facts.layers[layer].shares
        used = listed if operands_of(node).pages is not None else whole
        used.add(layer if shares is None else shares)
    for i, state in enumerate(program.state):
        own = state.region is CacheRegion.RECENT and state.stored and state.part in homes
        if own and state.layer in listed - whole:
            program.state[i] = replace(state, home=homes[state.part])
    editor = Editor(program, program.step.graph)
    for node in sites:
        x = operands_of(node)
        if x.pages is None:
            continue
        read = x.pages
        with editor.graph.inserting_before(node):
            for part, held in ((Part.KEYS, x.k), (Part.VALUES, x.v)):
                if part in homes:
                    read = editor.call(fetch_pages.default, read, held, x.page, like=node)
        node.kwargs = {**node.kwargs, "pages": read}


def other_list(lists: Lists, node: fx.Node, layer: int) -> str:
    """Why an attention cannot read the list that a layer chose; nothing where it can."""
    if layer not in lists:
        return f"layer {layer}, whose list it would read, chooses none"
    x, y = operands_of(node), operands_of(lists[layer][0])
    if (x.mask, x.window, x.k_pos) != (y.mask, y.window, y.k_pos):
        return f"it sees other tokens than layer {layer}, whose list it would read"
    if sizes(x.k)[1] != sizes(y.k)[1]:
        return f"it has other KV heads than layer {layer}, whose list it would read"
    return ""


def as_cached(node: fx.Node, plain: bool) -> str:
    """Why a method that takes rows of keys and values for what the cache has cannot choose for an attention; nothing
    where it can. plain: see `Base.refusal`.
    """
    if plain and operands_of(node).kept_k is None:  # blocks of a codec
        return ""
    return (
        "kv.codec encodes its keys, or they are made of a latent, and the method takes rows of them as they "
        "are; leave kv.codec out, or use kv.select = 'quest'"
    )


def _reads_recent(program: Program, x: Operands[Any]) -> bool:
    """Whether it reads what steps append to `kv.pos`."""
    return isinstance(x.k_pos, fx.Node) and x.k_pos is program.step.output_nodes().get(
        output_of(POSITIONS)
    )
