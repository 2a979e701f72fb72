"""Selection of single tokens, with what a choice leaves for the next: a memory of the newest tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, fx

from accel.ir.ops.attention import Form, form_of, operands_of
from accel.ir.ops.kv import kv_append
from accel.ir.region import sizes
from accel.ir.sizes import FEW
from accel.ir.state import Part
from accel.passes.kv._shared.more_keys import take_in
from accel.passes.kv.select import Base, Sizes
from accel.passes.kv.select._build import Build, Named, Stored, no_list

RING = (
    FEW + 1
)  # entries of a memory: a call of FEW tokens does not overwrite that of the token before it
PLACES = "pos"
_OLD = "old."  # what a memory holds before the call


@dataclass(frozen=True)
class Memory:
    """What a choice leaves of each token.

    entries: name -> (dtype, sizes after [B,T]), of the newest tokens. These are `choice.<layer>.<name> [B,RING,…]`: an
    entry is of the position that `choice.<layer>.pos [B,RING]` says, so the last FEW tokens can be rewound. A call
    that reads everything (a prompt) leaves no entries. The session's observer is `runtime/session/state/choice.py`.

    lasting: names of numbers [B,T] of each token for as long as it is there, appended as keys are:
    `pages.<layer>.<name> [B,1,C/1]`, -1 of tokens that read everything.

    whole: whether a choice also gives `whole` (bool [B,T]), tokens that read everything. A call with such a token lists
    all slots for it, and reads them from the same list as others.

    merged: whether it also gives `out` [B,H,T,Dv] and `lse` [B,H,T], attention over other forms of keys than those of
    the list, and its log-sum-exp. Attention over the list is merged with it.

    guessed: whether the first token of a call goes on from the entry of its own position, where a token that was
    guessed there left one and was dropped, rather than from that of the token before.
    """

    entries: Mapping[str, tuple[str, Sizes]] = field(default_factory=dict)
    lasting: tuple[str, ...] = ()
    whole: bool = False
    merged: bool = False
    guessed: bool = False

    @property
    def of_call(self) -> list[str]:
        """What a choice gives for the call alone."""
        return ["whole"] * self.whole + ["out", "lse"] * self.merged


@dataclass(frozen=True)
class Tokens(Base):
    """Sparse attention over lists of tokens [B,G,T,K]. A method says what of the step its choice reads (`operands`),
    what it leaves for later tokens (`memory`), and chooses (`choose`).
    """

    page: int = field(default=1, init=False)  # lists are of tokens

    def memory(self, heads: int, width: int, groups: int) -> Memory:
        """What is kept of a token, of its H queries of D numbers for G KV heads."""
        return Memory()

    @abstractmethod
    def operands(self, build: Build, node: fx.Node) -> dict[str, fx.Node]:
        """What `choose` reads beside queries and positions, of an attention."""

    @abstractmethod
    def choose(
        self, x: Mapping[str, Tensor], mask: Form, before: Mapping[str, Tensor], known: Tensor
    ) -> tuple[Tensor, Named]:
        """The slots that tokens read [B,G,T,K], -1: none, each once; and the memory of these tokens [B,T,…].

        x: queries [B,T,H,D], positions [B,T] of the call and k_pos [B,C] in the slots, the call's first slots [B],
        what `operands` gives and the layer's constants. before: the memory [B,…] of the token before the call, where it
        is `known` (bool [B]).
        """

    def listed(self, build: Build, node: fx.Node) -> fx.Node:
        x, editor = operands_of(node), build.editor
        layer, groups, form = node.meta["layer"], int(sizes(x.k)[1]), form_of(x)
        memory = self.memory(int(sizes(x.q)[1]), int(sizes(x.q)[3]), groups)
        read = self.operands(build, node)
        with editor.graph.inserting_before(node):
            table = build.tables.get(layer, {})
            read |= {n: editor.param(constant(layer, n), t) for n, t in table.items()}
        entries: dict[str, Stored] = {
            n: (dtype, ("B", RING, *tail)) for n, (dtype, tail) in memory.entries.items()
        }
        held = build.declare(Part.CHOICE, layer, entries)
        if held:
            held |= build.declare(Part.CHOICE, layer, {PLACES: ("int64", ("B", RING))}, -1)
        lasting = {n: ("float32", ("B", 1, build.every(1))) for n in memory.lasting}
        noted = build.declare(Part.PAGES, layer, lasting, -1)
        merged = int(sizes(x.v)[3]) if memory.merged else 0
        pages, *after = build.either(
            node, "choose", partial(self._chosen, memory, form),
            partial(_everything, memory, groups, merged),
            {**build.asked(node), **read, **{_OLD + n: old for n, old in held.items()}},
            (self, form, groups, merged),
        )  # fmt: skip
        found = dict(zip((*memory.of_call, *held, *noted), after, strict=True))
        if memory.whole:
            asked = {"pages": pages, "whole": found["whole"], "k_pos": x.k_pos}
            asked["slots"] = build.program.step.input("slots")
            with editor.graph.inserting_before(node):
                some = editor.call(torch.ops.aten.any.default, found["whole"], like=node)
            (pages,) = build.either(
                node, "whole", _with_whole, lambda x: x["pages"].clone(), asked, (), some
            )
        if memory.merged:
            take_in(build.editor, node, found["out"], found["lse"])
        slots = build.program.step.input("slots")
        with editor.graph.inserting_before(node):
            longer = {
                n: editor.call(kv_append.default, old, found[n], slots, like=node)
                for n, old in noted.items()
            }
        build.becomes(Part.CHOICE, layer, {n: found[n] for n in held})
        build.becomes(Part.PAGES, layer, longer)
        return pages

    def _chosen(self, memory: Memory, form: Form, x: Named) -> tuple[Tensor, ...]:
        """What `choose` lists, and the memory as it is after the call."""
        positions, held = x["positions"], {n: x[_OLD + n] for n in memory.entries}
        if not held:
            listed, new = self.choose(x, form, {}, positions[:, 0] < 0)
        else:
            places = x[_OLD + PLACES]
            last = positions[:, :1] - 1  # [B,1]
            at = last.clamp(min=0).remainder(RING)
            known = (places.gather(1, at) == last)[:, 0] & (last[:, 0] >= 0)
            if memory.guessed:
                here = positions[:, :1].clamp(min=0).remainder(RING)
                guess = (places.gather(1, here) == positions[:, :1]) & (last >= 0)
                at, known = torch.where(guess, here, at), known | guess[:, 0]
            before = {n: _entry(v, at)[:, 0] for n, v in held.items()}
            listed, new = self.choose(x, form, before, known)
        found = [listed, *(new[name] for name in memory.of_call)]
        if held:
            # entry i is of the token of the call whose position is i modulo RING, if there is one
            token = torch.arange(RING, device=at.device) - positions[:, :1]
            token = token.remainder(RING)  # [B,RING]
            index = token.clamp(max=positions.shape[1] - 1)
            place = positions.gather(1, index)
            here = (token < positions.shape[1]) & (place >= 0)
            for name, old in held.items():
                there = here.reshape(*here.shape, *[1] * (old.dim() - 2))
                found.append(torch.where(there, _entry(new[name], index), old))
            found.append(torch.where(here, place, places))
        return (*found, *(new[name].float()[:, None] for name in memory.lasting))


def constant(layer: int, name: str) -> str:
    """The parameter that is a layer's constant of this name."""
    return f"choice.{layer}.{name}"


def _with_whole(x: Named) -> Tensor:
    """Lists [B,G,T,C+K]: of tokens that read everything (`whole`, bool [B,T]) all slots up to their own, of others
    `pages` [B,G,T,K].
    """
    pages, whole, slots = x["pages"], x["whole"], x["slots"]
    own = slots[:, None] + torch.arange(whole.shape[1], device=slots.device)
    places = torch.arange(x["k_pos"].shape[1], device=slots.device)
    every = torch.where(whole[..., None] & (places <= own[..., None]), places, -1)
    every = every[:, None].expand(-1, pages.shape[1], -1, -1)
    return torch.cat((every, pages.masked_fill(whole[:, None, :, None], -1)), dim=3)


def _entry(values: Tensor, at: Tensor) -> Tensor:
    """values [B,N,…] at [B,M] -> [B,M,…]."""
    index = at.reshape(*at.shape, *[1] * (values.dim() - 2))
    return values.gather(1, index.expand(*at.shape, *values.shape[2:]))


def _everything(memory: Memory, groups: int, width: int, x: Named) -> tuple[Tensor, ...]:
    """No list of tokens, since everything is read; and no memory of the call, or of others."""
    positions = x["positions"]
    found = [no_list(groups, x)]
    if memory.whole:
        found.append(positions < -1)  # whoever has no list needs none of all
    if memory.merged:
        heads = x["queries"][..., 0].transpose(1, 2).float()  # [B,H,T]
        found.append(torch.zeros_like(heads)[..., None].expand(-1, -1, -1, width).clone())
        found.append(torch.full_like(heads, torch.finfo(torch.float32).min))
    for _ in memory.lasting:
        found.append(torch.full_like(positions[:, None], -1, dtype=torch.float32))
    if memory.entries:
        held = [torch.zeros_like(x[_OLD + n]) for n in memory.entries]
        place = len(found) - len(memory.lasting)
        found[place:place] = [*held, torch.full_like(x[_OLD + PLACES], -1)]
    return tuple(found)


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
