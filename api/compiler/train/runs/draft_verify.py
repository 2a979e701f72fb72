"""The plan of `draft-verify` (arXiv:2309.08168): attentions and MLPs are left out one by one, each time the one without
which drafts are expected to be fastest, of those that change the residual stream least; the best plan seen stays. What
a plan is worth is expected of the share of a text's tokens for which its likeliest token is the model's, and of the
weights that it reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from accel.compiler.measure import duration, watched
from accel.compiler.over_state import shared
from accel.compiler.pipeline import pipeline
from accel.compiler.train.host import HELD, HostKind, batches, save_part
from accel.compiler.train.kind import Made
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.source import Source
from accel.compiler.train.whole import Whole
from accel.ir.depth import RUN_ATTN, RUN_MLP
from accel.ir.program import Program, ancestors
from accel.passes import Pass, run
from accel.passes.depth._branches import Branches, branches
from accel.passes.depth._joint import layers
from accel.passes.depth.sublayer_skip import ATTENTION, influence
from accel.passes.stream import Stream, stream_after
from accel.runtime.decode.trained_part import sample
from accel.runtime.draft._plans import Branch, Plan
from accel.runtime.draft.draft_verify import DraftVerify

TRIED = 8  # branches before each that is left out, those that change the stream least
LONGEST = 12  # tokens of a draft
USELESS = 0.2  # the share of tokens below which no further branch is left out
AT_ONCE = 512  # tokens that run through a layer together


class Searched(HostKind):
    """The text is read once for each plan that is tried."""

    of = DraftVerify

    @classmethod
    def make(cls, method: Any, source: Source, options: TrainOptions) -> Made:
        """See Kind."""
        one, read = watched(method)
        options = replace(options, length=min(options.length, source.program.facts.max_context))
        texts = torch.cat([ids[:, :-1] for ids, _ in batches(source, options)])
        held = torch.arange(len(texts)) % HELD == HELD - 1
        program = passed(source)
        with torch.no_grad(), program.params.read_once():
            search = Search(program, texts[~held])
            best = search.run(search.proposals, source.progress, source.say)
            told = {"speed": best.speed, "likeliest": best.share, "cost": best.cost}
            if held.any():
                told["held"] = Search(program, texts[held]).tried(best.left_out).share
        plan = Plan.without(best.left_out, len(search.calls))
        told |= {"attentions": float((~plan.attn).sum()), "MLPs": float((~plan.mlp).sum())}
        part = {
            "attn": torch.from_numpy(plan.attn).float(),
            "mlp": torch.from_numpy(plan.mlp).float(),
        }
        part["cost"] = torch.tensor([best.cost])
        samples = {"model": sample(lambda: Whole(source.program))}
        return save_part(one, read, part, samples, told, options)


def passed(source: Source, *more: Pass) -> Program:
    """The source's model behind the passes of every model, and more."""
    program = source.program.copy()
    steps = pipeline(program.facts.encoder is not None, more)
    done = shared(steps)
    run(program, steps[done:], done=steps[:done])
    return program


@dataclass(frozen=True)
class Tried:
    """A plan: what it leaves out, the share of tokens that it has right, and what a drafted token costs, in steps."""

    left_out: frozenset[Branch]
    share: float
    cost: float

    @property
    def speed(self) -> float:
        """What decoding is expected to gain, at the best length of drafts."""
        return max(expected(self.share, self.cost, length) for length in range(1, LONGEST + 1))


def expected(share: float, cost: float, length: int) -> float:
    """Tokens of a round for its cost in plain steps, where each of `length` drafted tokens stands, if those before it
    do, so often; its verification costs a step.
    """
    tokens = sum(share**place for place in range(length + 1))
    return tokens / (length * cost + 1)


class Search:
    """Plans of a program whose layers are regions, on rows of tokens [n,T]."""

    def __init__(self, program: Program, tokens: Tensor):
        self.program, self.tokens = program, tokens
        self.calls = layers(program)
        self.layered = [branches(program, call) for call in self.calls]
        rows = max(1, AT_ONCE // tokens.shape[1])
        self.streams = [Stream(program, self.calls, part) for part in tokens.split(rows)]
        self._branch_costs, whole = costs(program, self.calls, self.layered)
        self._whole = whole
        self._before: list[
            list[Tensor]
        ] = []  # of a plan, the stream before each layer, of each part
        self._set_out(frozenset())

    @cached_property
    def likeliest(self) -> list[Tensor]:
        """The model's tokens [n,T]."""
        return [s.logits(x).argmax(-1) for s, x in zip(self.streams, self._whole_end, strict=True)]

    @property
    def proposals(self) -> list[Branch]:
        """All branches but those of the first layer, first those that change the stream least."""
        found = influence(self.program, self.calls, self.layered, self.tokens[:1])
        order = sorted(found, key=lambda one: found[one])
        return [(RUN_ATTN if kind == ATTENTION else RUN_MLP, i) for kind, i in order if i]

    def run(
        self,
        proposals: Sequence[Branch],
        progress: Callable[[str, float], None],
        say: Callable[[str], None],
    ) -> Tried:
        """The best plan of those that leave out one branch or more."""
        left, out, best = list(proposals), frozenset[Branch](), list[Tried]()
        start, count = time.monotonic(), len(left)
        while left:
            number = count - len(left)
            progress(f"branch {number + 1} of {count}", number / count)
            trials = [self.tried(out | {one}) for one in left[:TRIED]]
            step = max(trials, key=lambda one: one.speed)
            best = [max([*best, step], key=lambda one: one.speed)]
            if not number:
                most = duration((time.monotonic() - start) * count)
                say(f"{count} branches take {most} at most")
            if step.share < USELESS:
                break
            left = [one for one in left if one not in step.left_out]
            out = step.left_out
            self._set_out(out)
        return best[0]

    def tried(self, left_out: frozenset[Branch]) -> Tried:
        """A plan that leaves out what the last one that stayed does, and more."""
        first = min((i for _, i in left_out - self._out), default=0)
        right = 0
        for stream, before, model in zip(self.streams, self._before, self.likeliest, strict=True):
            x = before[first]
            for index in range(first, len(self.calls)):
                x = self._layer(stream, index, x, left_out)
            right += int((stream.logits(x).argmax(-1) == model).sum())
        cost = self._whole - sum(self._branch_costs[one] for one in left_out)
        return Tried(left_out, right / self.tokens.numel(), cost / self._whole)

    def _set_out(self, left_out: frozenset[Branch]) -> None:
        self._out = left_out
        states = []
        for stream in self.streams:
            before = [stream.start]
            for index in range(len(self.calls)):
                before.append(self._layer(stream, index, before[-1], left_out))
            states.append(before)
        self._before = states
        if not left_out:
            self._whole_end = [before[-1] for before in states]

    def _layer(self, stream: Stream, index: int, x: Tensor, left_out: Collection[Branch]) -> Tensor:
        """The stream behind a layer without some branches."""
        of, off = self.layered[index], list[fx.Node]()
        for kind, terms in ((RUN_ATTN, of.attention), (RUN_MLP, of.mlp)):
            if (kind, index) in left_out:
                off += [term.value for term in terms]
        return stream.without(index, x, off) if off else stream.layer(index, x)


def costs(
    program: Program, calls: Sequence[fx.Node], layered: Sequence[Branches]
) -> tuple[dict[Branch, float], float]:
    """The numbers of weights of each branch, and of all that a step reads: branches and the head. What several layers
    read counts for none.
    """
    reads: dict[Branch, set[str]] = {}
    for index, of in enumerate(layered):
        for kind, terms in ((RUN_ATTN, of.attention), (RUN_MLP, of.mlp)):
            members = [node for term in terms for node in of.members(term)]
            reads[kind, index] = _weights(p for node in members for p in node.all_input_nodes)
    times: dict[str, int] = {}
    for names in reads.values():
        for name in names:
            times[name] = times.get(name, 0) + 1

    def size(names: Collection[str]) -> float:
        return float(sum(program.params.blank(n).numel() for n in names if times.get(n, 1) == 1))

    logits = program.step.output_nodes()["logits"]
    head = _weights(ancestors([logits], stop={stream_after(calls[-1])}))
    each = {branch: size(names) for branch, names in reads.items()}
    return each, sum(each.values()) + size(head)


def _weights(nodes: Any) -> set[str]:
    return {str(node.target) for node in nodes if node.op == "get_attr"}
