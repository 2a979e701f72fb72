"""Trained routers: which branches of a layer a token takes, by the residual stream before them."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from accel.ir.depth import PROPAGATE, Depth
from accel.ir.errors import PassError
from accel.ir.invariants import Invariant
from accel.ir.program import Editor, Program
from accel.ir.region import Conditional, Region
from accel.ir.trace import trace
from accel.passes import Pass, Report, Rewriting
from accel.passes.depth import Base
from accel.passes.depth._branches import Branches, Term, branches
from accel.passes.depth._joint import branch_conditions, holders, layers
from accel.passes.kv._shared.tables import appended, attentions
from accel.passes.state.head import Head
from accel.passes.trained import Parts, Trained

aten = torch.ops.aten
ATTN, MLP = TARGETS = ("attn", "mlp")
THRESHOLD = "threshold"
NEVER = 2.0  # above any confidence
_EPSILON = 1e-6


@dataclass(frozen=True)
class Branch:
    """One branch of a layer, before it is under a condition."""

    layer: int
    target: str
    of: Branches
    term: Term

    @property
    def name(self) -> str:
        """As its condition, and its tensors in a trained part, are called."""
        return f"{self.target}.{self.layer}"

    @property
    def before(self) -> fx.Node:
        """The residual stream that its router reads."""
        return self.of.before(self.term)


@dataclass(frozen=True)
class Learns(Trained, Base, ABC):
    """A depth method whose trained part reads the residual stream of layers.

    A router reads the stream [B,T,E] over the root of its mean square: the weights of a norm are left to the router's
    own. `accel-compile train` starts with `start` and runs the model softly: `soft` is what a branch, or the change of
    a whole layer, is multiplied by, and `price` what is added to the loss of the text, over the mean of all routers.
    Of a branch the rest to 1 goes to what is `instead` of it. The model stays as it is.
    """

    relies = Base.relies | {Invariant.FIXED_LAYERS}
    # the share of the training behind which choices are fixed, and adapters learn
    settled: ClassVar[float] = math.inf

    @property
    @abstractmethod
    def targets(self) -> tuple[str, ...]:
        """The branches of each layer that have a router; none: the layer has one."""

    @property
    def holes(self) -> bool:
        """Whether later tokens do not read in a layer those that it did not take."""
        return False

    @abstractmethod
    def router(self, width: int) -> dict[str, tuple[int, ...]]:
        """Name -> size of the tensors of one router; -1: any."""

    @abstractmethod
    def begin(self, width: int, inner: int, generator: torch.Generator) -> dict[str, Tensor]:
        """The tensors of a router that has learnt nothing."""

    @abstractmethod
    def soft(self, x: Tensor, progress: float, **router: Tensor) -> tuple[Tensor, Tensor]:
        """[B,T,1] or [B,T,E], and the mean of what costs []. progress: the share of the training that is over."""

    def instead(self, x: Tensor, **router: Tensor) -> Tensor | None:
        """What is added to the stream in place of a branch that is left out, [B,T,E]; nothing."""
        return None

    @abstractmethod
    def price(self, mean: Tensor) -> Tensor:
        """What is added to the loss, [] of the mean over all routers []."""

    def sizes(self, width: int, heads: int) -> dict[str, tuple[int, ...]]:
        """See Trained."""
        names = self.targets or ("layer",)
        return {f"{t}.{n}": size for t in names for n, size in self.router(width).items()}

    def start(
        self, width: int, heads: int, inner: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """See Trained."""
        return {
            f"{target}.{name}": tensor
            for target in self.targets or ("layer",)
            for name, tensor in self.begin(width, inner, generator).items()
        }

    def steps(self) -> Sequence[Pass]:
        """See Rewriting. The part is read before weights are stored otherwise, by which the model is known."""
        return [Reads(self, self), self]

    def sites(self, program: Program, calls: Sequence[fx.Node]) -> list[list[Branch]]:
        """Of each layer the branches with a router, in the order that they run. Raises PassError."""
        found = []
        for layer, call in enumerate(calls):
            of, here = branches(program, call), []
            for target in self.targets:
                terms = of.attention if target == ATTN else of.mlp
                if len(terms) != 1:
                    raise PassError(
                        f"{self.use}: layer {layer} adds {len(terms)} terms of its {target} to its stream, and not "
                        "one; choose a method that skips whole layers, such as unified-skip"
                    )
                here.append(Branch(layer, target, of, terms[0]))
            found.append(here)
        return found


def of_target(part: Mapping[str, Tensor], target: str) -> dict[str, Tensor]:
    """The tensors of one router, out of those of its layer."""
    start = f"{target}."
    return {n.removeprefix(start): t for n, t in part.items() if n.startswith(start)}


def unit(x: Tensor) -> Tensor:
    """What a router reads of the residual stream [B,T,E]."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + _EPSILON)


@dataclass(frozen=True)
class Reads(Pass):
    """Finds the trained part of a method by the model as it is, for the pass that comes after its cache and its weights
    were stored otherwise.
    """

    of: Rewriting
    part: Trained
    after = (Head,)
    flat = True
    stage = -1

    @property
    def method(self) -> Rewriting:
        """See Pass."""
        return self.of

    def run(self, program: Program) -> Report:
        """See Pass."""
        keys = {layer: appended(node) for layer, node in attentions(program).items()}
        if len(keys) != len(program.facts.layers):
            raise PassError(
                f"{self.part.key}: {len(keys)} of {len(program.facts.layers)} layers have a cache of their own, by "
                f"which a trained part is known; build without {self.part.key}"
            )
        program.parts[self.part.key] = self.part.tensors(program, keys)
        return Report(changed=len(keys))


@dataclass(frozen=True)
class Routed(Learns, ABC):
    """Each token takes a branch, or leaves it out, by the stream before it; keys and values are those of all tokens. So
    a token's choice depends on no other, in a prompt, in a batch and alone. A branch runs where one token of the call
    takes it; to the streams of others it adds nothing, or what is `instead` of it. A branch that the caller's plan
    leaves out adds nothing to any.
    """

    @property
    def breaks(self) -> frozenset[Invariant]:
        """Keys of a branch that no token takes come of a narrower product, which may round otherwise."""
        return frozenset({Invariant.ALL_LAYERS_RUN, Invariant.BATCH_INVARIANCE})

    provides: ClassVar[Any] = frozenset({Invariant.LAYERS_BY_CALL, Invariant.BRANCHES_BY_CALL})

    @property
    @abstractmethod
    def limit(self) -> float:
        """The branch is left out above this confidence, where a call names no other."""

    @abstractmethod
    def spare(self, x: Tensor, **router: Tensor) -> Tensor:
        """How sure it is that a branch is not needed, 0 to 1: [B,T,E] -> [B,T]."""

    def scale(self, x: Tensor, **router: Tensor) -> Tensor | None:
        """What a branch that is taken is multiplied by, [B,T,E]; nothing."""
        return None

    def measured(
        self,
        program: Program,
        calls: Sequence[fx.Node],
        sites: Sequence[Sequence[Branch]],
        parts: Parts,
    ) -> Parts:
        """The parts, with what is measured of the model."""
        return parts

    def run(self, program: Program) -> Report:
        """See Pass."""
        calls = layers(program)
        sites = self.sites(program, calls)
        parts = self.measured(program, calls, sites, program.parts[self.key])
        branch_conditions(program, PROPAGATE)
        limit = Editor(program, program.step.graph).placeholder(THRESHOLD, (), torch.float32)
        program.step.defaults[THRESHOLD] = torch.tensor(NEVER)
        for call, here in zip(calls, sites, strict=True):
            for site in here:
                route(program, self, call, site, of_target(parts[site.layer], site.target), limit)
        every = (True,) * len(calls)
        program.facts.depth = Depth(every, PROPAGATE, self.limit, every, routed=True)
        return Report(changed=sum(map(len, sites)))


def takes(
    editor: Editor,
    name: str,
    method: Routed,
    stream: fx.Node,
    most: fx.Node,
    learnt: Mapping[str, fx.Node],
) -> Any:
    """Which tokens [B,T] need what a router with these tensors stands before: none of those that it can spare by more
    than `most`.
    """
    names = tuple(learnt)

    def taken(x: Tensor, most: Tensor, *values: Tensor) -> Tensor:
        return ~(method.spare(unit(x), **dict(zip(names, values, strict=True))) > most)

    given = stream, most, *learnt.values()
    return trace(editor, name, taken, *given, key=("takes", method, names))


def route(
    program: Program,
    method: Routed,
    call: fx.Node,
    site: Branch,
    router: Mapping[str, Tensor],
    limit: fx.Node,
) -> None:
    """x + if(flag, f(x), 0)  ->  x + where(takes(x), if(flag and any(takes(x)), f(x), 0), instead(x)), within a layer;
    where the flag is not set, instead(x) is 0, too.
    """
    region = call.target
    assert isinstance(region, Region)
    most = holders(region.graph, call, [limit])[limit]
    if limit not in call.args:
        call.args = (*call.args, limit)
    inner = next(
        n
        for n in region.graph.nodes
        if isinstance(n.target, Conditional) and n.target.name == site.name
    )
    value = next(u for u in inner.users if u.target is operator.getitem and u.args[1] == 0)
    before, users = site.before, set(value.users)
    editor = Editor(program, region.graph)
    with region.graph.inserting_before(inner):
        learnt = {n: editor.param(f"router.{site.name}.{n}", t) for n, t in router.items()}
        names, given = tuple(learnt), list(learnt.values())
        taken = takes(editor, site.name, method, before, most, learnt)
        some = editor.call(aten.any.default, taken)
        flag = inner.args[0]
        assert isinstance(flag, fx.Node)
        inner.update_arg(0, editor.call(aten.logical_and.default, flag, some))
    with region.graph.inserting_before(value.next):

        def added(taken: Tensor, value: Tensor, flag: Tensor, x: Tensor, *values: Tensor) -> Tensor:
            read, tensors = unit(x), dict(zip(names, values, strict=True))
            by, other = method.scale(read, **tensors), method.instead(read, **tensors)
            scaled = value if by is None else value * by.to(value.dtype)
            rest = torch.zeros_like(scaled)
            if other is not None:
                rest = torch.where(flag, other.to(value.dtype), rest)
            return torch.where(taken[..., None], scaled, rest)

        operands = (taken, value, flag, before, *given)
        out: Any = trace(editor, site.name, added, *operands, key=("added", method, names))
    value.replace_all_uses_with(out, delete_user_cb=users.__contains__)
