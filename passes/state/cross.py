"""Split an encoder-decoder: what depends on the encoder's input alone is computed once, by an entry of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from accel.ir.capture.encoder import FEATURES, INPUT_POSITIONS, INPUTS
from accel.ir.errors import PassError
from accel.ir.ops.attention import attention, operands_of
from accel.ir.program import DTYPES, Editor, Program, State, ancestors
from accel.ir.region import Entry, sizes
from accel.ir.state import CacheRegion, Part
from accel.passes import Pass, Report
from accel.passes.clean.clean import Clean
from accel.passes.recognise.attention import Attention
from accel.passes.recognise.rope import Rope

aten = torch.ops.aten
_ENCODER = (INPUTS, INPUT_POSITIONS, FEATURES)


@dataclass(frozen=True)
class Cross(Pass):
    """step(tokens, positions, inputs) -> encode(inputs) and step(tokens, positions, cross state).

    `encode` holds the encoder and each layer's cross-attention keys and values, which become the
    state `cross.<layer>.k/v [B,G,X,D]` and `cross.pos [B,X]`: `encode` writes them, the step reads them.
    """

    after = (Attention, Rope)

    def run(self, program: Program) -> Report:
        step = program.step
        encoder_inputs = [
            n for n in step.graph.find_nodes(op="placeholder") if n.target in _ENCODER
        ]
        if not encoder_inputs:
            return Report()
        _unify_batch(program, encoder_inputs)
        decoder = _depending(step.graph, {step.input("tokens"), step.input("positions")})
        sites = step.graph.find_nodes(op="call_function", target=attention.default)
        crossing = [n for n in sites if n in decoder and not decoder.intersection(_read(n))]
        if not crossing:
            raise PassError(
                f"{program.facts.name} has no cross-attention that accel recognises, so its encoder "
                "cannot run separately from its decoder"
            )
        cross_states = _wanted([n for n in sites if n in decoder], crossing)
        program.entries["encode"] = _encode(program, encoder_inputs, cross_states)
        self._read(program, encoder_inputs[0], crossing, cross_states)
        left = [u.name for n in encoder_inputs for u in n.users]
        if left:
            raise PassError(
                f"the decoder reads the encoder outside cross-attention, by {', '.join(left[:3])}; "
                "accel caches only the keys and values of cross-attention"
            )
        for node in encoder_inputs:
            step.graph.erase_node(node)
        return Report(changed=len(crossing))

    def _read(
        self,
        program: Program,
        encoder_input: fx.Node,
        crossing: list[fx.Node],
        cross_states: dict[fx.Node, State],
    ) -> None:
        """Let cross-attention read state where it read what the encoder's entry computes now."""
        editor = Editor(program, program.step.graph)
        letters = dict(zip("BX", encoder_input.meta["val"].shape, strict=False))
        for value, state in cross_states.items():
            program.state.append(state)
            shape = [letters[d] if isinstance(d, str) else d for d in state.shape]
            holder = editor.placeholder(state.name, shape, DTYPES[state.dtype])
            for node in crossing:
                node.replace_input_with(value, holder)
        Clean().run(program)


def _unify_batch(program: Program, encoder_inputs: list[fx.Node]) -> None:
    """B is read off the tokens in the step, and off the encoder's input where only that is at hand."""
    graph, tokens = program.step.graph, program.step.input("tokens")
    editor = Editor(program, graph)
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        batch = editor.call(aten.sym_size.int, tokens, 0)
    for node in graph.find_nodes(op="call_function", target=aten.sym_size.int):
        if node is not batch and str(node.meta["val"]) == str(batch.meta["val"]):
            node.replace_all_uses_with(batch)
            graph.erase_node(node)


def _is_batch(node: fx.Node) -> bool:
    """Whether a node is B, the one size that both halves share."""
    return bool(node.target is aten.sym_size.int and node.args[1] == 0)


def _depending(graph: fx.Graph, roots: set[fx.Node]) -> set[fx.Node]:
    """The nodes computed from some inputs, B aside."""
    found = set(roots)
    for node in graph.nodes:
        if not _is_batch(node) and found.intersection(node.all_input_nodes):
            found.add(node)
    return found


def _read(site: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Keys and values of an attention."""
    x = operands_of(site)
    return x.k, x.v


def _wanted(sites: list[fx.Node], crossing: list[fx.Node]) -> dict[fx.Node, State]:
    """Value that cross-attention reads -> the state that holds it; layers count self-attentions."""
    found: dict[fx.Node, State] = {}
    layer = -1
    for site in sites:
        if site not in crossing:
            layer += 1
            continue
        x = operands_of(site)
        pos = x.k_pos
        width = _letter(pos, 1)
        found.setdefault(
            pos, State(Part.POSITIONS, None, "int64", ("B", width), -1, CacheRegion.CROSS)
        )
        for part, value in ((Part.KEYS, x.k), (Part.VALUES, x.v)):
            assert isinstance(value, fx.Node)
            shape = ("B", int(sizes(value)[1]), _letter(value, 2), int(sizes(value)[3]))
            state = State(part, max(layer, 0), "float32", shape, region=CacheRegion.CROSS)
            found.setdefault(value, state)
    return found


def _letter(node: fx.Node, axis: int) -> int | str:
    """X, or the number that it always is."""
    size = sizes(node)[axis]
    return int(size) if size.isdigit() else "X"


def _encode(
    program: Program, encoder_inputs: list[fx.Node], cross_states: dict[fx.Node, State]
) -> Entry:
    """The encoder, and the values that cross-attention reads."""
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for node in encoder_inputs:
        copied[node] = graph.placeholder(str(node.target))
        copied[node].meta = dict(node.meta)
    editor = Editor(program, graph)
    batch = editor.call(aten.sym_size.int, copied[encoder_inputs[0]], 0)
    needed = ancestors(cross_states, stop=set())
    for node in program.step.graph.nodes:
        if node not in needed or node in copied or node.op == "placeholder":
            continue
        copied[node] = batch if _is_batch(node) else graph.node_copy(node, copied.__getitem__)
        copied[node].meta = copied[node].meta or dict(node.meta)
    outputs = {state.output: copied[node] for node, state in cross_states.items()}
    graph.output(tuple(outputs.values()))
    return Entry(graph, list(outputs))
