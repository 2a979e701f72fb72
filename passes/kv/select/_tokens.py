"""Selection of single tokens, with what a choice leaves for the next: a memory of the newest tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, fx

from accel.ir.ops.attention import Form, form_of, operands_of
from accel.ir.ops.kv import kv_append
from accel.ir.program import Editor, State
from accel.ir.region import Conditional, sizes
from accel.ir.sizes import FEW
from accel.ir.state import Part
from accel.passes.kv.select import SPARSE, Base, Sizes
from accel.passes.kv.select._build import Build, graph_of, region_call
from accel.passes.state.recurrent import buffer
from accel.passes.trained import Parts

RING = (
    FEW + 1
)  # entries of a memory: a call of FEW tokens does not overwrite that of the token before it
PLACES = "pos"


@dataclass(frozen=True)
class Tokens(Base):
    """Sparse attention over lists of tokens [B,G,T,K].

    A method says what of the state its choice reads (`reads`), and chooses (`choose`). It may keep numbers of each
    token for later ones: `memory`. These are `choice.<layer>.<name> [B,RING,…]`, of the newest tokens: an entry is of
    the position that `choice.<layer>.pos [B,RING]` says, so the last FEW tokens can be rewound. A call that reads
    everything (a prompt) leaves no entries. The session's observer is `runtime/session/state/choice.py`.

    What a choice says of each token for as long as the token is there are its `lasting` numbers, appended as keys are:
    `pages.<layer>.<name> [B,1,C/1]`, -1 of tokens that read everything. `choose` gives them with the memory.

    Where `sees_all` is set, the memory of a call also has `whole` (bool [B,T]): tokens that read everything. A call
    with such a token lists all slots for it, and reads them from the same list as others.

    Where `merges` is set, it also has `out` [B,H,T,Dv] and `lse` [B,H,T]: attention over other forms of keys than those
    of the list, and its log-sum-exp. Attention over the list is merged with it.
    """

    page: int = field(default=1, init=False)  # lists are of tokens
    sees_all: ClassVar[bool] = False  # whether some tokens of a call may read everything
    merges: ClassVar[bool] = False  # whether a token reads more than its list
    lasting: ClassVar[tuple[str, ...]] = ()  # numbers of each token, [B,T] of a call

    breaks = SPARSE  # nothing is made of keys

    @property
    @abstractmethod
    def count(self) -> int:
        """Tokens that a token reads at most."""

    def memory(self, heads: int, width: int, groups: int) -> dict[str, tuple[str, Sizes]]:
        """What is kept of a token, of its H queries of D numbers for G KV heads: name -> (dtype, sizes after [B,T])."""
        return {}

    @abstractmethod
    def operands(self, build: Build, node: fx.Node) -> dict[str, fx.Node]:
        """What `choose` reads beside queries and positions, of an attention."""

    def in_layer(self, layer: int, layers: tuple[int, ...], tables: Parts) -> Self:
        """The method as one of the `layers` that choose has it, by the constants of each."""
        return self

    @abstractmethod
    def choose(
        self, x: Mapping[str, Tensor], mask: Form, before: Mapping[str, Tensor], known: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The slots that tokens read [B,G,T,K], -1: none, each once; and the memory of these tokens [B,T,…].

        x: queries [B,T,H,D], positions [B,T] of the call and k_pos [B,C] in the slots, the call's first slots [B],
        what `operands` gives and the layer's constants. before: the memory [B,…] of the token before the call, where it
        is `known` (bool [B]).
        """

    def parts(self, width: int) -> dict[str, tuple[str, Sizes]]:
        return {}

    def summary(self, keys: Tensor) -> dict[str, Tensor]:
        return {}

    def score(self, queries: Tensor, parts: dict[str, Tensor]) -> Tensor:
        """queries [B,G,M,D], the parts [B,G,U,…] -> what each unit is worth to them [B,G,M,U]."""
        return queries.float() @ parts["mean"].transpose(-1, -2)

    def _list(self, build: Build, node: fx.Node) -> fx.Node:
        """The list of tokens that an attention chooses."""
        program = build.program
        editor, x = Editor(program, program.step.graph), operands_of(node)
        layer, groups = node.meta["layer"], int(sizes(x.k)[1])
        heads, width = int(sizes(x.q)[1]), int(sizes(x.q)[3])
        method = self.in_layer(layer, build.layers, build.tables)
        read = self.operands(build, node)
        with editor.graph.inserting_before(node):
            table = build.tables.get(layer, {})
            read |= {n: editor.param(constant(layer, n), t) for n, t in table.items()}
        declared = self.memory(heads, width, groups)
        states = [
            State(Part.CHOICE, layer, dtype, ("B", RING, *tail), detail=name)
            for name, (dtype, tail) in declared.items()
        ]
        if states:
            states.append(State(Part.CHOICE, layer, "int64", ("B", RING), -1, detail=PLACES))
        held = [buffer(program, editor, state, build.letters) for state in states]
        longer = [
            State(Part.PAGES, layer, "float32", ("B", 1, "C/1"), -1, detail=name)
            for name in self.lasting
        ]
        noted = [buffer(program, editor, state, build.letters) for state in longer]
        with editor.graph.inserting_before(node):
            by_token = editor.call(torch.ops.aten.transpose.int, x.q, 1, 2, like=node)
            slots = program.step.input("slots")
            given = (build.chooses, by_token, x.q_pos, x.k_pos, slots, *read.values(), *held)
            mask = form_of(x)
            choose = partial(method._chosen, list(read), list(declared), mask)
            key = "choose", method, mask, *read
            merges = int(sizes(x.v)[3]) if self.merges else 0
            nothing = partial(_everything, groups, self.sees_all, merges, len(held), len(noted))
            region = Conditional(
                f"choose.{layer}",
                graph_of(program, layer, choose, given, key),
                graph_of(program, layer, nothing, given, ("everything", *nothing.args)),
            )
            pages, *after = region_call(editor, region, given, node)
            if self.sees_all:
                whole = after.pop(0)
                some = editor.call(torch.ops.aten.any.default, whole, like=node)
                given = some, pages, whole, x.k_pos, slots
                region = Conditional(
                    f"whole.{layer}",
                    graph_of(program, layer, _with_whole, given, "with whole"),
                    graph_of(program, layer, _as_chosen, given, "as chosen"),
                )
                (pages,) = region_call(editor, region, given, node)
            if self.merges:
                out, lse, *after = after
                node.kwargs = {**node.kwargs, "beside": out, "beside_lse": lse}
            for i, old in enumerate(noted, len(states)):
                after[i] = editor.call(kv_append.default, old, after[i], slots, like=node)
        states += longer
        build.outputs |= {state.output: new for state, new in zip(states, after, strict=True)}
        return pages

    def _chosen(
        self, names: list[str], kept: list[str], mask: Form, *operands: Tensor
    ) -> tuple[Tensor, ...]:
        """What `choose` lists, and the memory as it is after the call."""
        own = ("queries", "positions", "k_pos", "slots", *names)
        x = dict(zip(own, operands, strict=False))
        held = operands[len(own) :]
        positions = x["positions"]
        if not kept:
            listed, new = self.choose(x, mask, {}, positions[:, 0] < 0)
            return (
                listed,
                *self._beside(new),
                *(new[name].float()[:, None] for name in self.lasting),
            )
        *values, places = held
        last = positions[:, :1] - 1  # [B,1]
        at = last.clamp(min=0).remainder(RING)
        known = (places.gather(1, at) == last)[:, 0] & (last[:, 0] >= 0)
        before = {n: _entry(v, at)[:, 0] for n, v in zip(kept, values, strict=True)}
        listed, new = self.choose(x, mask, before, known)
        # entry i is of the token of the call whose position is i modulo RING, if there is one
        token = (torch.arange(RING, device=at.device) - positions[:, :1]).remainder(
            RING
        )  # [B,RING]
        index = token.clamp(max=positions.shape[1] - 1)
        place = positions.gather(1, index)
        here = (token < positions.shape[1]) & (place >= 0)
        written = []
        for name, old in zip(kept, values, strict=True):
            there = here.reshape(*here.shape, *[1] * (old.dim() - 2))
            written.append(torch.where(there, _entry(new[name], index), old))
        return (
            listed,
            *self._beside(new),
            *written,
            torch.where(here, place, places),
            *(new[name].float()[:, None] for name in self.lasting),
        )

    def _beside(self, new: Mapping[str, Tensor]) -> list[Tensor]:
        """What the memory of a call has beside what is kept."""
        names = (*(["whole"] if self.sees_all else []), *(["out", "lse"] if self.merges else []))
        return [new[name] for name in names]


def constant(layer: int, name: str) -> str:
    """The parameter that is a layer's constant of this name."""
    return f"choice.{layer}.{name}"


def _with_whole(pages: Tensor, whole: Tensor, k_pos: Tensor, slots: Tensor) -> Tensor:
    """Lists [B,G,T,C+K]: of tokens that read everything (bool [B,T]) all slots up to their own, of others pages
    [B,G,T,K].
    """
    own = slots[:, None] + torch.arange(whole.shape[1], device=slots.device)
    places = torch.arange(k_pos.shape[1], device=slots.device)
    every = torch.where(whole[..., None] & (places <= own[..., None]), places, -1)
    every = every[:, None].expand(-1, pages.shape[1], -1, -1)
    return torch.cat((every, pages.masked_fill(whole[:, None, :, None], -1)), dim=3)


def _as_chosen(pages: Tensor, whole: Tensor, k_pos: Tensor, slots: Tensor) -> Tensor:
    """The lists as they are: no token reads everything."""
    return pages.clone()


def _entry(values: Tensor, at: Tensor) -> Tensor:
    """values [B,N,…] at [B,M] -> [B,M,…]."""
    index = at.reshape(*at.shape, *[1] * (values.dim() - 2))
    return values.gather(1, index.expand(*at.shape, *values.shape[2:]))


def _everything(
    groups: int,
    sees_all: bool,
    merges: int,
    held: int,
    lasting: int,
    queries: Tensor,
    q_pos: Tensor,
    *rest: Tensor,
) -> Any:
    """No list of tokens [B,G,0,1], since everything is read; and no memory of the call, or of others."""
    none = q_pos.new_zeros((q_pos.shape[0], groups, 0, 1))
    first = [none, *([q_pos < -1] if sees_all else [])]  # whoever has no list needs none of all
    if merges:
        heads = queries[..., 0].transpose(1, 2).float()  # [B,H,T]
        first.append(torch.zeros_like(heads)[..., None].expand(-1, -1, -1, merges).clone())
        first.append(torch.full_like(heads, torch.finfo(torch.float32).min))
    last = [torch.full_like(q_pos[:, None], -1, dtype=torch.float32) for _ in range(lasting)]
    if not held:
        return (*first, *last)
    *values, places = rest[len(rest) - held :]
    return (*first, *(torch.zeros_like(v) for v in values), torch.full_like(places, -1), *last)


def searches(queries: Tensor, before: Tensor, known: Tensor, least: float) -> Tensor:
    """Which query each token of a call chooses by [B,T]: 0, that of before the call [B,E], or i + 1, its i-th [B,T,E].
    A token takes that of the token before it, where the cosine with its own is `least` or more; or else its own.

    Token after token: a token's rule maps what the one before it took to what it takes, and rules are composed.
    """
    tokens = queries.shape[1]
    both = torch.cat((before[:, None], queries), dim=1)
    norms = both.square().sum(-1).sqrt().clamp(min=1e-12)
    like = queries @ both.transpose(1, 2) / (norms[:, 1:, None] * norms[:, None])  # [B,T,1+T]
    numbers = torch.arange(tokens + 1, device=queries.device)
    may = known[:, None] | (numbers > 0)
    rule = torch.where((like >= least) & may[:, None], numbers, numbers[1:, None])
    ahead = 1
    while ahead < FEW:
        token = numbers[1:] - 1 - ahead
        earlier = rule.index_select(1, token.clamp(min=0))
        both_rules = rule.gather(2, earlier)
        rule = torch.where((token >= 0)[:, None], both_rules, rule)
        ahead *= 2
    return rule[..., 0]
