"""One run of a program over text, layer by layer, during which its weights may be exchanged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from accel.ir.capture.encoder import INPUT_POSITIONS, INPUTS
from accel.ir.capture.examples import adapter_example, encoder_example
from accel.ir.program import Program, ancestors, compute, operand
from accel.ir.region import Region
from accel.ir.state import state_of

Visit = Callable[..., None]  # (node, *its operands that are no parameters)


def calibrate(program: Program, tokens: Tensor, nodes: Collection[fx.Node], visit: Visit) -> None:
    """Run tokens [n,T] from empty caches; `visit(node, *inputs)` before each wanted node is computed.

    What `visit` puts in the node's place is what later nodes are computed from. Values are freed
    after their last use, and what no wanted node needs (the logits) is not computed.
    """
    tokens = tokens[:, : program.facts.max_context]  # a pass may have found the model's own end
    for name in ("encode", "step"):
        if name in program.entries:
            run = _Run(program, set(nodes), visit)
            run.graph(program.entries[name].graph, feeds(program, name, tokens), False)


def all_values(program: Program, tokens: Tensor) -> Iterator[tuple[fx.Graph, dict[fx.Node, Any]]]:
    """Each graph of the program and the values of all its nodes: for a few tokens only. Rows use different adapters."""
    for name in ("encode", "step"):
        if name in program.entries:
            found: list[tuple[fx.Graph, dict[fx.Node, Any]]] = []
            given = {**feeds(program, name, tokens), **adapter_example(program, len(tokens))}
            _keep(program.entries[name].graph, program, given, found)
            yield from found


def feeds(program: Program, entry: str, tokens: Tensor) -> dict[str, Tensor]:
    """Inputs of an entry for tokens [n,T], from empty caches, with logits for every token."""
    if entry == "encode":
        return _encoder_inputs(program, tokens)
    side = side_of(program, tokens)
    batch, length = tokens.shape
    places = torch.arange(length).repeat(batch, 1)
    state = {s.name: s.allocate(B=batch, C=length) for s in program.state if not s.cross}
    slots = torch.zeros(batch, dtype=torch.int64)
    given = {"tokens": tokens, "positions": places, "slots": slots, "rows": places}
    return {**program.entries[entry].defaults, **given, **side, **state}


def side_of(program: Program, tokens: Tensor) -> dict[str, Tensor]:
    """What the step takes from the encoder's side for tokens [n,T]; nothing where there is none."""
    side = _encoder_inputs(program, tokens)
    if "encode" not in program.entries:
        return side
    out = program.run("encode", side)
    return {state_of(name): value for name, value in out.items()}


def _encoder_inputs(program: Program, tokens: Tensor) -> dict[str, Tensor]:
    """The same text for the encoder, where it takes such tokens; otherwise random inputs."""
    encoder = program.facts.encoder
    given = encoder_example(encoder, len(tokens))
    if encoder is None or INPUTS not in given or int(tokens.max()) >= encoder.vocab_size:
        return given
    inputs = tokens[:, : encoder.max_length].contiguous()
    places = torch.arange(inputs.shape[1]).repeat(len(inputs), 1)
    return {INPUTS: inputs, INPUT_POSITIONS: places}


class _Run:
    """The interpreter of `calibrate`, for one entry."""

    def __init__(self, program: Program, pending: set[fx.Node], visit: Visit):
        self.params, self.pending, self.visit = program.params, pending, visit

    def graph(self, graph: fx.Graph, inputs: Mapping[str, Any], whole: bool) -> tuple[Any, ...]:
        """What the graph returns; nothing unless it is asked for `whole`."""
        values: dict[fx.Node, Any] = {}
        skipped = set() if whole else set(graph.nodes) - ancestors(self._targets(graph), set())
        done: set[fx.Node] = set(skipped)
        node = next(iter(graph.nodes))
        while node.op != "output":
            if node in self.pending:
                self.pending.discard(node)
                before = node.prev
                given = (a for a in node.args if isinstance(a, fx.Node) and a.op != "get_attr")
                self.visit(node, *(operand(a, self.params, values) for a in given))
                node = before.next  # what stands in its place now, or the node itself
                continue
            if skipped and not self._holds(node) and skipped.issuperset(node.users):
                skipped.add(node)
            if node.op != "get_attr" and node not in skipped:
                values[node] = self._compute(node, inputs, values)
            done.add(node)
            for source in node.all_input_nodes:
                if done.issuperset(source.users):
                    values.pop(source, None)
            node = node.next
        if not whole:
            return ()
        returned = map_arg(node.args[0], lambda n: operand(n, self.params, values))
        return tuple(returned)

    def _targets(self, graph: fx.Graph) -> list[fx.Node]:
        """The wanted nodes of a graph, and the regions that hold some."""
        return [n for n in graph.nodes if n in self.pending or self._holds(n)]

    def _holds(self, node: fx.Node) -> bool:
        target = node.target
        return isinstance(target, Region) and bool(self._targets(target.graph))

    def _compute(
        self, node: fx.Node, inputs: Mapping[str, Any], values: Mapping[fx.Node, Any]
    ) -> Any:
        if not isinstance(node.target, Region):
            with torch.no_grad():
                return compute(node, self.params, inputs, values)
        graph = node.target.graph
        args = map_arg(node.args, lambda n: operand(n, self.params, values))
        return self.graph(graph, _named(graph, args), True)


def _named(graph: fx.Graph, args: Any) -> dict[str, Any]:
    """Arguments of a region's call, by the names of its placeholders."""
    names = [str(p.target) for p in graph.find_nodes(op="placeholder")]
    return dict(zip(names, args, strict=True))


def _keep(
    graph: fx.Graph,
    program: Program,
    inputs: Mapping[str, Any],
    runs: list[tuple[fx.Graph, dict[fx.Node, Any]]],
) -> Any:
    """Run a graph and note every value of it, and of the regions in it."""
    values: dict[fx.Node, Any] = {}
    runs.append((graph, values))
    for node in graph.nodes:
        if node.op == "output":
            return map_arg(node.args[0], lambda n: operand(n, program.params, values))
        if node.op == "get_attr":
            continue
        if isinstance(node.target, Region):
            args = map_arg(node.args, lambda n: operand(n, program.params, values))
            inner = node.target.graph
            values[node] = _keep(inner, program, _named(inner, args), runs)
        else:
            with torch.no_grad():
                values[node] = compute(node, program.params, inputs, values)
    raise ValueError("the graph returns nothing")
