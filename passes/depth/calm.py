"""CALM (arXiv:2207.07061): early exit; a token skips the remaining layers when the model is confident of the
next token.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from accel.ir.axis import option
from accel.ir.depth import PROPAGATE, Depth
from accel.ir.errors import PassError
from accel.ir.ops.rows import take_rows
from accel.ir.program import Editor, Program, ancestors
from accel.ir.region import Conditional
from accel.ir.trace import trace
from accel.passes import Report
from accel.passes.depth import Base
from accel.passes.depth._joint import conditions, holders, layers
from accel.passes.depth._threshold import (
    even,
    gap,
    least_threshold,
    leaving,
    likeness,
    near_one,
    observed,
)

aten = torch.ops.aten
THRESHOLD = "threshold"
NEVER = 2.0  # above any confidence
MEASURES = SOFTMAX, STATE = ("softmax", "state")


@dataclass(frozen=True)
class Calm(Base):
    """After every `every`-th layer from `first` on (0: the middle layer) a token may leave: the layers above compute
    its keys and values alone, from the output of the exit layer. It leaves where the confidence of each row of the call
    is at least `threshold`.

    The confidence (`by`) is how far the probabilities of the two likeliest tokens are apart (`softmax`), for which each
    exit computes the LM head; or the cosine of the residual stream before and after the layer of the exit (`state`),
    for which the head is computed once. This applies in decoding, token by token; a prompt runs all layers.

    A `threshold` of 0 is measured on the calibration text: the least at which a share of at least `agreement` of all
    tokens are those of the whole model, with a `probability` that holds for text like it (the tokens before one have
    run all layers). Where there is none, the model has no exits.
    """

    threshold: float = option(0.0, least=0)
    by: str = option(SOFTMAX, one_of=MEASURES)
    agreement: float = option(0.95, above=0, below=1)
    probability: float = option(0.95, above=0, below=1)
    first: int = option(0, least=0)
    every: int = option(4, least=1)
    lacks = "the trained classifier as confidence, and thresholds that fall with the position"
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
        threshold = self.threshold or self._measured(program, exits)
        calls = conditions(program, PROPAGATE)
        if threshold is None:  # a call may still say which layers run
            program.facts.depth = Depth((True,) * count, PROPAGATE)
            return Report(changed=len(calls))
        limit = Editor(program, program.step.graph).placeholder(THRESHOLD, (), torch.float32)
        program.step.defaults[THRESHOLD] = torch.tensor(NEVER)
        head = _head(program) if self.by == SOFTMAX else []
        done: fx.Node | None = None
        for index, call in enumerate(calls):
            if done is not None:
                _unless(program, call, done)
            if index in exits:
                done = _exit(program, call, head, limit, done)
        program.facts.depth = Depth((True,) * count, PROPAGATE, threshold)
        return Report(changed=len(exits))

    def _measured(self, program: Program, exits: range) -> float | None:
        """The threshold that the text gives, which the facts note."""
        by_state, share = self.by == STATE, 1 - self.agreement
        sure, same = observed(
            program,
            layers(program),
            exits,
            (lambda _, after, before: likeness(after, before))
            if by_state
            else (lambda logits, *_: gap(logits)),
        )
        tried = near_one() if by_state else even()
        limit = least_threshold(sure, same, tried, share, 1 - self.probability)
        left = leaving(sure, same, NEVER if limit is None else limit)
        count = sure.shape[1]
        holds = f"at most {share:.2g} of tokens are others than the whole model's, with {self.probability:g}"
        where = f"by {count:,} tokens of the calibration text"
        if not left.numel():
            program.facts.notes.append(
                f"calm: no exits, for at no threshold does it hold that {holds} ({where}); give a threshold, "
                "more text, less agreement, or a model that was trained for early exits"
            )
        else:
            program.facts.notes.append(
                f"calm: threshold {limit:.5g}, {where}: {len(left) / count:.0%} leave early, "
                f"{int((~left).sum()) / count:.1%} of all are others; {holds}"
            )
        return limit if left.numel() else None


def _gap_of(logits: Tensor, limit: Tensor) -> Tensor:
    """Whether the two likeliest tokens of every row [B,N,V] are `limit` apart; bool []."""
    return gap(logits).min() >= limit


def _alike(after: Tensor, before: Tensor, limit: Tensor) -> Tensor:
    """Whether a layer changes the direction of no row's stream [B,T,E] by more than a cosine of `limit`; bool []."""
    return likeness(after, before).min() >= limit


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
    """Let a layer say as its last result whether what leaves it is sure: by the head, or where none is given by how
    little the layer changed it; where the layer is left out, what was said before.
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
    stream = next((n.args[0] for n in head if n.target is take_rows.default), None)
    given = [n for n in outer if n is not stream] + [limit, done]
    for graph in (region.graph, region.otherwise):
        inside = holders(graph, call, given)
        (out,) = graph.find_nodes(op="output")
        results = out.args[0]
        assert isinstance(results, tuple)
        last = inside[done]
        if graph is region.graph:
            with graph.inserting_before(out):
                editor = Editor(program, graph)
                if head:
                    logits = _copied(editor, head, {**inside, stream: results[0]})  # type: ignore[dict-item]
                    last = trace(editor, region.name, _gap_of, logits, inside[limit])
                else:
                    before = inside[call.args[1]]  # type: ignore[index]
                    last = trace(editor, region.name, _alike, results[0], before, inside[limit])
        out.args = ((*results, last),)
    call.args = (*call.args, *(n for n in given if n not in call.args))
    call.meta["val"] = (*call.meta["val"], done.meta["val"])
    place = len(call.meta["val"]) - 1
    with call.graph.inserting_after(call):
        item = call.graph.call_function(operator.getitem, (call, place))
    item.meta["val"] = done.meta["val"]
    return item


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
