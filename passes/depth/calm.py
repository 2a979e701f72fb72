"""CALM (arXiv:2207.07061): early exit; a token skips the remaining layers when the model is confident of the
next token.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from accel.ir.axis import option
from accel.ir.calibration import Calibration
from accel.ir.depth import PROPAGATE, RUN_LAYERS, Depth
from accel.ir.errors import PassError
from accel.ir.ops.rows import take_rows
from accel.ir.program import Editor, Program, ancestors
from accel.ir.region import Conditional
from accel.ir.trace import trace
from accel.passes import Report
from accel.passes.calibrate import feeds
from accel.passes.depth import Base
from accel.passes.depth._joint import conditions

aten = torch.ops.aten
THRESHOLD = "threshold"
_NEVER = 2.0  # above any difference of two probabilities
_TOKENS = 512  # of text that a threshold is measured on
_STEPS = 200  # thresholds that are tried
_FEWEST = 16  # tokens that leave early, of which a share tells something


@dataclass(frozen=True)
class Calm(Base):
    """After every `every`-th layer from `first` on (0: the middle layer) the LM head is applied. If the
    probabilities of
    the two most likely tokens differ by at least `threshold` for every row of the call, the layers above only compute
    their keys and values, from the output of the exit layer.

    This applies in decoding, token by token; a prompt runs all layers. The head is computed once more at each of
    these layers.

    A `threshold` of 0 is measured: the least from which on `agreement` of the tokens that leave early have the
    likeliest token of the whole model, on the calibration text (the paper calibrates it, too, with a bound that
    holds with a given probability). A model whose middle layers are over-sure then never leaves early.
    """

    threshold: float = option(0.0, least=0)
    agreement: float = option(0.95, above=0, most=1)
    first: int = option(0, least=0)
    every: int = option(4, least=1)
    lacks = "a threshold with a bound that holds with a given probability"
    reads_text = True
    small: ClassVar[Mapping[str, Any]] = {"threshold": 0.05, "first": 1, "every": 1}

    def run(self, program: Program) -> Report:
        count = len(program.facts.layers)
        first = self.first or max(1, count // 2)
        exits = range(first - 1, count - 1, self.every)
        if not exits:
            raise PassError(
                f"calm: no exit after layer {first} of {count}; give a first below {max(count, 2)}"
            )
        calls = conditions(program, PROPAGATE)
        limit = Editor(program, program.step.graph).placeholder(THRESHOLD, (), torch.float32)
        program.step.defaults[THRESHOLD] = torch.tensor(_NEVER)
        head = _head(program)
        done: fx.Node | None = None
        for index, call in enumerate(calls):
            if done is not None:
                _unless(program, call, done)
            if index in exits:
                done = _exit(program, call, head, limit, done)
        threshold = self.threshold or self._measured(program, exits)
        program.facts.depth = Depth((True,) * count, PROPAGATE, threshold)
        return Report(changed=len(exits))

    def _measured(self, program: Program, exits: range) -> float:
        """The threshold that the text gives, which the facts note."""
        sure, same = observed(program, exits)
        limit = least_threshold(sure, same, self.agreement)
        left = leaving(sure, same, limit)
        where = f"on {sure.shape[1]:,} tokens of the calibration text"
        if not left.numel():
            program.facts.notes.append(
                f"calm: all layers run, for at no threshold do {self.agreement:.0%} of the tokens that leave early "
                f"agree with the whole model ({where}); give a threshold, or a model that was trained for early exits"
            )
        else:
            agree = float(left.float().mean())
            program.facts.notes.append(
                f"calm: threshold {limit:.3g}, {where}: {len(left) / sure.shape[1]:.0%} leave early, {agree:.0%} "
                "of them with the likeliest token of the whole model"
            )
        return limit


def observed(program: Program, exits: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Of each exit and token [E,N] of the calibration text how far its two likeliest tokens are apart, and whether the
    first is that of the whole model. Tokens before have gone as deep as it.
    """
    count = len(program.facts.layers)
    longest = min(_TOKENS, program.facts.max_context)
    text = program.calibration or Calibration.random(program.facts.vocab_size, longest)
    sure, same = [], []
    for row in text.tokens[: max(1, _TOKENS // text.tokens.shape[1]), :longest].split(1):
        given = feeds(program, "step", row)
        best, depths = [], [*exits, count - 1]
        for depth in depths:
            given[RUN_LAYERS] = torch.arange(count) <= depth
            logits = program.run("step", given)["logits"].float()
            best.append(logits.softmax(-1).topk(2))
        sure.append(torch.cat([b.values[..., 0] - b.values[..., 1] for b in best[:-1]]))
        last = best[-1].indices[..., 0]
        same.append(torch.cat([b.indices[..., 0] == last for b in best[:-1]]))
    return torch.cat(sure, 1), torch.cat(same, 1)


def leaving(sure: Tensor, same: Tensor, limit: float) -> Tensor:
    """Of the tokens that leave early by `sure` [E,N] whether each is the `same` [E,N] as the whole model's, [n]."""
    out = sure >= limit
    found: Tensor = same.gather(0, out.int().argmax(0)[None])[0][out.any(0)]
    return found


def least_threshold(sure: Tensor, same: Tensor, agreement: float) -> float:
    """The least threshold from which on so many of the tokens that leave early agree; where there is none, one
    that no token reaches.
    """
    least = _NEVER
    for limit in torch.linspace(1, 0, _STEPS + 1)[1:-1].tolist():
        left = leaving(sure, same, limit)
        if len(left) >= _FEWEST and float(left.float().mean()) < agreement:
            break
        if len(left) >= _FEWEST:
            least = limit
    return least


def _confident(logits: Tensor, limit: Tensor) -> Tensor:
    """Whether the two likeliest tokens of every row [B,N,V] are `limit` apart; bool []."""
    best = logits.float().softmax(-1).topk(2).values
    return (best[..., 0] - best[..., 1]).min() >= limit


def _head(program: Program) -> list[fx.Node]:
    """The nodes from the residual stream to the logits, the choice of rows among them, in order."""
    graph, logits = program.step.graph, program.step.output_nodes()["logits"]
    chosen = next((n for n in graph.nodes if n.target is take_rows.default), None)
    needed = ancestors([logits], stop={chosen} if chosen else set())
    below: set[fx.Node] = {chosen} if chosen else set()
    fixed: set[fx.Node] = set()  # parameters, and casts of them
    found = []
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "get_attr" or (
            node.op == "call_function" and inputs and fixed.issuperset(inputs)
        ):
            fixed.add(node)
        if node in needed and (node in below or below.intersection(inputs)):
            below.add(node)
            found.append(node)
        elif node in needed and node in fixed and node.op != "get_attr":
            found.append(node)
    if not found or found[-1] is not logits:
        raise PassError(
            "calm: the LM head, which gives the confidence, was not found; build without calm"
        )
    return found


def _unless(program: Program, call: fx.Node, done: fx.Node) -> None:
    """A layer runs where it is asked for and nothing below was sure."""
    flag = call.args[0]
    with call.graph.inserting_before(call):
        editor = Editor(program, call.graph)
        open_ = editor.call(aten.logical_not.default, done)
        call.update_arg(0, editor.call(aten.logical_and.default, flag, open_))


def _exit(
    program: Program, call: fx.Node, head: list[fx.Node], limit: fx.Node, done: fx.Node | None
) -> fx.Node:
    """Let a layer say as its last result whether the head is sure of what leaves it; where the layer
    is left out, what was said before.
    """
    region = call.target
    assert isinstance(region, Conditional)
    if done is None:
        with call.graph.inserting_before(call):
            done = Editor(program, call.graph).call(aten.full.default, [], False, dtype=torch.bool)
    members = set(head)
    outer = dict.fromkeys(
        n for node in head for n in node.all_input_nodes if n not in members and n.op != "get_attr"
    )
    stream = next(n.args[0] for n in head if n.target is take_rows.default)
    given = [n for n in outer if n is not stream] + [limit, done]
    for graph in (region.graph, region.otherwise):
        holders = _holders(graph, call, given)
        (out,) = graph.find_nodes(op="output")
        results = out.args[0]
        assert isinstance(results, tuple)
        last = holders[done]
        if graph is region.graph:
            with graph.inserting_before(out):
                editor = Editor(program, graph)
                logits = _copied(editor, head, {**holders, stream: results[0]})  # type: ignore[dict-item]
                last = trace(editor, region.name, _confident, logits, holders[limit])
        out.args = ((*results, last),)
    call.args = (*call.args, *(n for n in given if n not in call.args))
    call.meta["val"] = (*call.meta["val"], done.meta["val"])
    place = len(call.meta["val"]) - 1
    with call.graph.inserting_after(call):
        item = call.graph.call_function(operator.getitem, (call, place))
    item.meta["val"] = done.meta["val"]
    return item


def _holders(graph: fx.Graph, call: fx.Node, values: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    """The placeholder of each value in a region's graph; those that it lacks come after the others."""
    there = list(graph.find_nodes(op="placeholder"))
    found = dict(zip(call.args, there, strict=True))
    for node in values:
        if node not in found:
            with graph.inserting_after(list(graph.find_nodes(op="placeholder"))[-1]):
                found[node] = graph.placeholder(
                    str(node.target) if node.op == "placeholder" else node.name
                )
            found[node].meta["val"] = node.meta["val"]
    return found  # type: ignore[return-value]


def _copied(editor: Editor, nodes: list[fx.Node], env: dict[fx.Node, fx.Node]) -> fx.Node:
    """The same computation of other values."""
    env = dict(env)
    for node in nodes:
        for parent in node.all_input_nodes:
            if parent.op == "get_attr" and parent not in env:
                env[parent] = editor.param(str(parent.target))
        env[node] = editor.graph.node_copy(node, env.__getitem__)
        env[node].meta = dict(node.meta)
    return env[nodes[-1]]
