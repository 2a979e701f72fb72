"""Make the KV cache explicit: attention reads slots of a buffer that the step writes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from accel.ir.errors import PassError
from accel.ir.ops.attention import attention
from accel.ir.ops.kv import kv_append
from accel.ir.program import Editor, LayerFacts, Program, State, ancestors
from accel.passes import Pass, Report
from accel.passes.recognise.attention import Attention
from accel.passes.recognise.region import Kinds, sizes
from accel.passes.recognise.rope import Rope

# Example sizes of the new symbolic axes; they only have to differ from each other and from 0 and 1.
_BATCH, _SLOTS = 53, 59


@dataclass(frozen=True)
class Cache(Pass):
    """attention(q, k, v, positions, positions) -> attention over `kv.<layer>.k/v` and `kv.pos`.

    Each layer gets a dense buffer [B,G,C,D]; all layers write the same slots, so one `kv.pos [B,C]`
    says which position each slot holds.
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
        refused = [
            f"{n.name}: a bidirectional mask"
            for n in sites
            if n.args[8] == "full" and n.args[5] is None
        ]
        if refused:
            raise PassError(
                f"{refused[0]} cannot be decoded token by token; accel needs causal attention"
            )
        slots = editor.placeholder("slots", (_BATCH,), (True,), torch.int64)
        outputs = step.output_nodes()
        pos = self._buffer(program, editor, "kv.pos", "pos", None, (), torch.int64, -1)
        first = min(sites, key=list(graph.nodes).index)
        with graph.inserting_before(first):
            all_pos = editor.call(kv_append.default, pos, step.input("positions"), slots)
        outputs["kv.pos.next"] = all_pos
        for layer, node in enumerate(sites):
            for index, part in ((1, "k"), (2, "v")):
                new = node.args[index]
                assert isinstance(new, fx.Node)
                groups, width = int(sizes(new)[1]), int(sizes(new)[3])
                name = f"kv.{layer}.{part}"
                buffer = self._buffer(
                    program, editor, name, part, layer, (groups, width), torch.float32, 0
                )
                with graph.inserting_before(node):
                    stored = editor.call(kv_append.default, buffer, new, slots, like=node)
                node.update_arg(index, stored)
                outputs[f"{name}.next"] = stored
            node.update_arg(4, all_pos)
            node.meta["layer"] = layer
            program.facts.layers.append(_facts(node))
        step.set_outputs(outputs)
        return Report(changed=len(sites))

    def _buffer(
        self, program: Program, editor: Editor, name: str, role: str, layer: int | None,
        inner: tuple[int, ...], dtype: torch.dtype, fill: float,
    ) -> fx.Node:  # fmt: skip
        shape: tuple[int | str, ...] = ("B", inner[0], "C", inner[1]) if inner else ("B", "C")
        state = State(name, role, layer, str(dtype).removeprefix("torch."), shape, fill)
        program.state.append(state)
        examples = {"B": _BATCH, "C": _SLOTS}
        numbers = tuple(examples[d] if isinstance(d, str) else d for d in shape)
        dynamic = tuple(isinstance(d, str) for d in shape)
        node = editor.placeholder(name, numbers, dynamic, dtype)
        slot_axis = 2 if inner else 1
        program.dims.setdefault(str(node.meta["val"].shape[0]), "B")
        program.dims.setdefault(str(node.meta["val"].shape[slot_axis]), "C")
        return node


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
    from accel.ir.program import evaluate

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
