"""Make the KV cache explicit: attention reads slots of a buffer that the step writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from accel.ir.errors import PassError
from accel.ir.ops.attention import attention
from accel.ir.ops.kv import kv_append
from accel.ir.program import DTYPES, Editor, LayerFacts, Program, State, ancestors, evaluate
from accel.passes import Pass, Report
from accel.passes.recognise.attention import Attention
from accel.passes.recognise.mask import HIDDEN
from accel.passes.recognise.region import Kinds, sizes
from accel.passes.recognise.rope import Rope

_SLOTS = 59  # example number of slots while shapes are worked out


@dataclass(frozen=True)
class Cache(Pass):
    """attention(q, k, v, positions, positions) -> attention over `kv.<layer>.k/v` and `kv.pos`.

    Each layer gets a dense buffer [B,G,C,D] (one, where its keys and values are the same); all layers
    write the same slots, so one `kv.pos [B,C]` says which position each slot holds.
    """

    after = (Attention, Rope)
    must_change = True

    def run(self, program: Program) -> Report:
        step, graph = program.step, program.step.graph
        editor = Editor(program, graph)
        sites = graph.find_nodes(op="call_function", target=attention.default)
        mixed = mixes_tokens(program)
        if mixed:
            raise PassError(
                f"{mixed}: this mixes tokens outside attention, and only attention can be cached"
            )
        for node in sites:
            if _looks_ahead(program, node):
                raise PassError(
                    f"{node.name} lets a token see later ones, so it cannot be decoded token by token; "
                    "accel needs causal attention"
                )
        letters = {"B": step.input("tokens").meta["val"].shape[0], "C": editor.symbol("C", _SLOTS)}
        slots = editor.placeholder("slots", (letters["B"],), torch.int64)
        outputs = step.output_nodes()
        pos = _buffer(
            program, editor, State("kv.pos", "pos", None, "int64", ("B", "C"), -1), letters
        )
        first = min(sites, key=list(graph.nodes).index)
        with graph.inserting_before(first):
            all_pos = editor.call(kv_append.default, pos, step.input("positions"), slots)
        outputs["kv.pos.next"] = all_pos
        for layer, node in enumerate(sites):
            once = node.args[1] is node.args[2]  # a latent, which keys and values share
            for index, part in ((1, "k"), (2, "v")):
                new = node.args[index]
                if once and part == "v":
                    node.update_arg(index, node.args[1])
                    continue
                assert isinstance(new, fx.Node)
                groups, width = int(sizes(new)[1]), int(sizes(new)[3])
                name = f"kv.{layer}.{part}"
                state = State(name, part, layer, "float32", ("B", groups, "C", width), 0)
                buffer = _buffer(program, editor, state, letters)
                with graph.inserting_before(node):
                    stored = editor.call(kv_append.default, buffer, new, slots, like=node)
                node.update_arg(index, stored)
                outputs[f"{name}.next"] = stored
            node.update_arg(4, all_pos)
            node.meta["layer"] = layer
            program.facts.layers.append(_facts(node))
        step.set_outputs(outputs)
        return Report(changed=len(sites))


def _buffer(program: Program, editor: Editor, state: State, sizes: dict[str, Any]) -> fx.Node:
    """Declare a state value and its input."""
    program.state.append(state)
    shape = [sizes[d] if isinstance(d, str) else d for d in state.shape]
    return editor.placeholder(state.name, shape, DTYPES[state.dtype])


def _looks_ahead(program: Program, node: fx.Node) -> bool:
    """Whether a mask shows a query the keys after it."""
    bias = node.args[5]
    if node.args[8] != "full":
        return False
    if not isinstance(bias, fx.Node):
        return True
    table = program.params[str(bias.target)]
    return table.dim() == 2 or bool((table > HIDDEN).triu(1).any())


def mixes_tokens(program: Program) -> str | None:
    """The first value, attention aside, in which one token's result depends on another's; none found: None.

    Checked on numbers: with every attention's result held fixed, changing one token must change that
    token's logits only.
    """
    graph = program.step.graph
    sites = graph.find_nodes(op="call_function", target=attention.default)
    kinds = Kinds(graph)
    logits = program.step.output_nodes()["logits"]
    if logits not in ancestors([logits], set()) or kinds[logits] != "data":
        return f"{logits.name} does not depend on the tokens"
    length = min(7, program.facts.max_context)
    tokens = torch.arange(length)[None] % program.facts.vocab_size
    other = tokens.clone()
    other[0, length // 2] = (other[0, length // 2] + 1) % program.facts.vocab_size
    positions = torch.arange(length)[None]
    inputs = {"tokens": tokens, "positions": positions}
    with torch.no_grad():
        fixed = dict(zip(sites, evaluate(sites, program.params, inputs), strict=True))
        wanted = [logits, *(a for s in sites for a in s.args[:3] if isinstance(a, fx.Node))]
        before = evaluate(wanted, program.params, inputs, fixed)
        after = evaluate(wanted, program.params, {**inputs, "tokens": other}, fixed)
    for node, a, b in zip(wanted, before, after, strict=True):
        axis = 1 if node is logits else 2
        differs = (a - b).abs().movedim(axis, 0).flatten(1).amax(1)
        differs[length // 2] = 0
        if float(differs.max()) > 1e-5 * max(1.0, float(a.abs().max())):
            return node.name
    return None


def _facts(node: fx.Node) -> LayerFacts:
    q, k = sizes(node.args[0]), sizes(node.args[1])  # type: ignore[arg-type]
    kind, window = node.args[8], node.args[9]
    assert isinstance(kind, str) and isinstance(window, int)
    return LayerFacts(kind, window, int(q[1]), int(k[1]), int(q[3]))
