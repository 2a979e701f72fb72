"""Embeddings in place of tokens: the step over a stream that a caller gives, and what tokens are in it."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from accel.ir.entries.step import LOGITS
from accel.ir.errors import PassError
from accel.ir.program import Editor, Program
from accel.ir.region import Entry
from accel.ir.state import writes_state
from accel.passes.clean.clean import remove_dead
from accel.passes.recognise.cuts import parted

aten = torch.ops.aten
STREAM = "stream"


def embedded(program: Program, method: str) -> Entry:
    """The step over the same state, that takes embeddings `stream` [B,T,E] in place of tokens. Raises PassError."""
    entry = program.copy().step
    found = embedding_of(entry, method)
    value = found.meta["val"]
    stream = Editor(program, entry.graph).placeholder(STREAM, value.shape, value.dtype)
    found.replace_all_uses_with(stream)
    for node in entry.graph.find_nodes(op="call_function", target=aten.sym_size.int):
        if node.args[0] is entry.input("tokens"):
            node.update_arg(0, entry.input("positions"))
    outputs = entry.output_nodes()
    entry.set_outputs({n: v for n, v in outputs.items() if n == LOGITS or writes_state(n)})
    tidy(entry)
    return entry


def embeddings(program: Program, method: str, whole: bool = True) -> Entry:
    """What the step makes of tokens [B,T]: `stream` [B,T,E]. whole: as of `embedding_of`. Raises PassError."""
    entry = program.copy().step
    entry.set_outputs({STREAM: embedding_of(entry, method, whole)})
    tidy(entry)
    return entry


def embedding_of(entry: Entry, method: str, whole: bool = True) -> fx.Node:
    """The one value [B,T,E] by which a step reads its tokens, whatever stands where. `method`: who asks. whole: it can
    stand for tokens; otherwise each layer may be given a part of another value of them (`parted`). Raises PassError.
    """
    tokens = entry.input("tokens")
    only: dict[fx.Node, None] = {tokens: None}
    for node in entry.graph.nodes:
        read = [n for n in node.all_input_nodes if n.op != "get_attr"]
        of_tokens = [n for n in read if n in only]
        if node.op == "call_function" and node.target is not aten.sym_size.int and of_tokens:
            if all(n in only or not isinstance(n.meta["val"], Tensor) for n in read):
                only[node] = None
    wanted = [
        n for n in only if any(u not in only and u.target is not aten.sym_size.int for u in n.users)
    ]
    if not whole:
        beside = set(parted(entry.graph))
        wanted = [n for n in wanted if beside.isdisjoint(n.all_input_nodes)]
    value = wanted[0].meta["val"] if len(wanted) == 1 else None
    if value is None or value.dim() != 3 or not value.is_floating_point():
        raise PassError(
            f"{method}: this model reads its tokens in {len(wanted)} ways, not as one embedding alone, so an embedding "
            f"cannot stand for a token; leave {method} out for it"
        )
    return wanted[0]


def tidy(entry: Entry) -> None:
    """Leave out what the outputs do not need."""
    remove_dead(entry.graph)
    for holder in entry.graph.find_nodes(op="placeholder"):
        if not holder.users and holder.target not in ("positions", "slots", "rows"):
            entry.graph.erase_node(holder)
    entry.defaults = {n: v for n, v in entry.defaults.items() if n in entry.inputs}
