"""FFN-SkipLLM (arXiv:2404.03865): where an MLP hardly changes a token, those of the next layers are left out."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from accel.ir.axis import option
from accel.ir.depth import NESTED, Depth
from accel.ir.errors import PassError
from accel.ir.program import Editor, Program
from accel.ir.region import Conditional, Region
from accel.ir.trace import trace
from accel.passes import Report
from accel.passes.depth import Base
from accel.passes.depth._branches import Branches, branches
from accel.passes.depth._joint import branch_conditions, holders, layers
from accel.passes.depth._threshold import likeness, near_one, sample
from accel.passes.stream import Stream

aten = torch.ops.aten
THRESHOLD = "threshold"
NEVER = 2.0  # above any cosine


@dataclass(frozen=True)
class FfnSkip(Base):
    """Where the cosine of the residual stream before and after an MLP is at least `threshold`, for every row of the
    call, the MLPs of the next `span` layers are left out; then one runs again. Attention always runs, so every layer
    has keys and values of every token. The MLPs of `ends` layers at the bottom, and of as many at the top, always run,
    and so do all of a prompt and of the first `warmup` tokens after it.

    A `threshold` of 0 is measured: on the calibration text, tokens leave out the share `share` of the MLPs.
    """

    threshold: float = option(0.0, least=0)
    share: float = option(0.25, above=0, below=1)
    span: int = option(2, least=1, most=1024)
    ends: int = option(4, least=0)
    warmup: int = option(8, least=0)
    reads_text = True
    small: ClassVar[Mapping[str, Any]] = {"threshold": 0.01, "ends": 0, "warmup": 0}

    def run(self, program: Program) -> Report:
        """See Pass."""
        calls = layers(program)
        count = len(calls)
        middle = range(self.ends, count - self.ends)
        if len(middle) < 2:
            raise PassError(
                f"ffn-skip: of {count} layers {self.ends} at each end always run, and fewer than two are left; give "
                f"an ends of at most {max(0, (count - 2) // 2)}"
            )
        parts = [_only(branches(program, call), index) for index, call in enumerate(calls)]
        threshold = self.threshold or self._measured(program, calls, parts, middle)
        branch_conditions(program, NESTED)
        graph = program.step.graph
        limit = Editor(program, graph).placeholder(THRESHOLD, (), torch.float32)
        program.step.defaults[THRESHOLD] = torch.tensor(NEVER)
        with graph.inserting_before(calls[middle[0]]):
            left = Editor(program, graph).call(aten.full.default, [], 0.0, dtype=torch.float32)
        for index in middle:
            left = _carry(program, calls[index], parts[index], index, limit, left, self.span)
        every = (True,) * count
        program.facts.depth = Depth(every, NESTED, threshold, every, dense=self.warmup)
        return Report(changed=len(middle))

    def _measured(
        self, program: Program, calls: Sequence[fx.Node], parts: Sequence[Branches], middle: range
    ) -> float:
        """The threshold that the text gives, which the facts note."""
        near, count = observed(program, calls, parts, middle), len(calls)
        tried = ((x, left_out(near, x, self.span) / count) for x in near_one())
        limit, share = next(((x, s) for x, s in tried if s >= self.share), (0.0, 0.0))
        if not limit:
            most = left_out(near, -1.0, self.span) / count
            raise PassError(
                f"ffn-skip: at no threshold are {self.share:g} of the MLPs left out; give a share of at most "
                f"{most:.2g}, fewer ends (now {self.ends}) or a longer span (now {self.span})"
            )
        program.facts.notes.append(
            f"ffn-skip: threshold {limit:.5g}, at which {near.shape[1]:,} tokens of the calibration text leave out "
            f"{share:.0%} of the MLPs"
        )
        return limit


def observed(
    program: Program, calls: Sequence[fx.Node], parts: Sequence[Branches], middle: range
) -> Tensor:
    """Of the layers in the middle and the tokens of a text [M,N] how alike the stream before and after the MLP is,
    where all run.
    """
    found = []
    with torch.no_grad():
        for rows in sample(program):
            stream = Stream(program, calls, rows)
            x, near = stream.start, []
            for index, of in enumerate(parts):
                if index in middle:
                    base, change = stream.inside(index, x, [of.before(of.mlp[0]), of.mlp[0].value])
                    near.append(likeness(base + change, base).flatten())
                x = stream.layer(index, x)
            found.append(torch.stack(near))
    return torch.cat(found, 1)


def left_out(near: Tensor, limit: float, span: int) -> float:
    """How many MLPs a token leaves out, by how alike each of `near` [M,N] would leave its stream; the mean."""
    left, gone = torch.zeros(near.shape[1]), 0.0
    for row in near:
        runs = left <= 0
        gone += float((~runs).sum())
        left = torch.where(runs, (row >= limit) * float(span), left - 1)
    return gone / near.shape[1]


def _only(of: Branches, index: int) -> Branches:
    """The branches of a layer with one MLP. Raises PassError."""
    if len(of.mlp) != 1:
        raise PassError(
            f"ffn-skip: layer {index} adds {len(of.mlp)} terms that read no cache to its stream, and not one MLP; "
            "choose a method that skips whole layers, such as unified-skip"
        )
    return of


def _still(value: Tensor, before: Tensor, limit: Tensor, span: float) -> Tensor:
    """How many MLPs are left out after one that adds `value` [B,T,E] to `before`; float32 []."""
    near = likeness(before + value, before).min()
    return (near >= limit).float() * span


def _fewer(left: Tensor) -> Tensor:
    return left - 1


def _carry(
    program: Program,
    call: fx.Node,
    of: Branches,
    index: int,
    limit: fx.Node,
    left: fx.Node,
    span: int,
) -> fx.Node:
    """Let a layer run its MLP where none of `left` [] MLPs are to be left out, and say as its last result how many
    are then. That result.
    """
    region = call.target
    assert isinstance(region, Region)
    outer = holders(region.graph, call, [limit, left])
    call.args = (*call.args, limit, left)
    (inner,) = (
        n
        for n in region.graph.nodes
        if isinstance(n.target, Conditional) and n.target.name == f"mlp.{index}"
    )
    flag, base = inner.args[0], of.before(of.mlp[0])
    with region.graph.inserting_before(inner):
        editor = Editor(program, region.graph)
        open_ = editor.call(aten.le.Scalar, outer[left], 0)
        inner.update_arg(0, editor.call(aten.logical_and.default, flag, open_))
    after = _count(program, inner, base, outer[limit], outer[left], span)
    (out,) = region.graph.find_nodes(op="output")
    out.args = ((*out.args[0], after),)
    call.meta["val"] = (*call.meta["val"], left.meta["val"])
    with call.graph.inserting_after(call):
        item = call.graph.call_function(operator.getitem, (call, len(call.meta["val"]) - 1))
    item.meta["val"] = left.meta["val"]
    return item


def _count(
    program: Program, call: fx.Node, base: fx.Node, limit: fx.Node, left: fx.Node, span: int
) -> fx.Node:
    """The MLP's condition gives as its last result how many of the next are left out."""
    mlp = call.target
    assert isinstance(mlp, Conditional)
    for graph in (mlp.graph, mlp.otherwise):
        inside = holders(graph, call, [base, limit, left])
        (out,) = graph.find_nodes(op="output")
        with graph.inserting_before(out):
            editor = Editor(program, graph)
            if graph is mlp.graph:
                values = (out.args[0][0], inside[base], inside[limit])
                last = trace(
                    editor, mlp.name, lambda v, b, m: _still(v, b, m, float(span)), *values
                )
            else:
                last = trace(editor, mlp.name, _fewer, inside[left])
        out.args = ((*out.args[0], last),)
    call.args = (*call.args, *(n for n in (base, limit, left) if n not in call.args))
    call.meta["val"] = (*call.meta["val"], left.meta["val"])
    with call.graph.inserting_after(call):
        item = call.graph.call_function(operator.getitem, (call, len(call.meta["val"]) - 1))
    item.meta["val"] = left.meta["val"]
    return item
