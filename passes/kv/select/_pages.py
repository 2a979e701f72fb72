"""Selection of pages by what is kept of their keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, fx

from accel.ir.invariants import Invariant
from accel.ir.ops.attention import Form, form_of, operands_of
from accel.ir.ops.choice import best_pages, pages_before
from accel.ir.ops.kv import kv_append
from accel.ir.ops.pages import kv_pages, pages_written
from accel.ir.region import sizes
from accel.ir.state import Part
from accel.passes.kv.inputs import call as named_call
from accel.passes.kv.inputs import parameters
from accel.passes.kv.select import SPARSE, Base, Sizes
from accel.passes.kv.select._build import Build, Named, Nodes, no_list


@dataclass(frozen=True)
class Where:
    """Positions of a call [B,T] and in the slots [B,C], the call's first slots [B], and what its tokens see."""

    q_pos: Tensor
    k_pos: Tensor
    slots: Tensor
    mask: Form

    @property
    def tokens(self) -> int:
        """Tokens of the call, T."""
        return self.q_pos.shape[1]

    def seen(self, pages: int, page: int) -> Tensor:
        """Which of so many pages each token may choose, bool [B,1,T,pages]."""
        return pages_before(self.q_pos, self.k_pos, self.slots, pages, page, self.mask)[0]

    def best(self, worth: Tensor, count: int, page: int) -> Tensor:
        """worth [B,G,T,N] -> each token's own page, then the best of those that it may choose (`best_pages`)."""
        call, mask = (self.q_pos, self.k_pos, self.slots), self.mask
        found: Tensor = best_pages(worth, *call, count, page, mask.kind, mask.size)
        return found


class _Scored:
    """A class with a `score` of whatever parameters, which is no field of a dataclass."""

    score: Callable[..., Tensor]


@dataclass(frozen=True)
class Pages(_Scored, Base):
    """Sparse attention over pages: each token and KV head attends to its own page (the newest, maybe not
    full) and to the best earlier pages.

    The summary of each page, `pages.<layer>.<part> [B,G,C/page,…]`, is a function of the page's keys. It is
    computed for the pages that a call writes or fills, and used from the call that fills the page on; before, the
    page is the own page of every reader. So rewinding stays free, and a call of up to FEW tokens gives the logits of
    single-token calls.

    `score` gives what each page is worth to each query [B,G,M,N]. It names its inputs:

    | parameter | |
    |---|---|
    | `queries` [B,G,M,D] | after RoPE; the M = R T queries of a group's R heads |
    | `parts` | name -> the parts [B,G,N,…] of all pages |
    | `keys` [B,G,C,D] | as cached, read in place; pages of one token (`page` = 1), which need no parts |
    | `form` | what makes attention of products (`ir.ops.attention.Form`) |

    The constants of a method that is a `Tables` (`ir/tables.py`) are further parameters of `score` and `summary`.
    """

    @property
    def breaks(self) -> frozenset[Invariant]:
        """Parts are made of keys; a method without leaves these as they are."""
        return SPARSE | {Invariant.PLAIN_KEYS} if self.parts(1) else SPARSE

    def parts(self, width: int) -> dict[str, tuple[str, Sizes]]:
        """What is kept of a page of keys of D = `width` numbers: name -> (dtype, sizes after [B,G,N])."""
        return {}

    def summary(self, keys: Tensor) -> Named:
        """keys [B,G,N,page,D] -> the parts [B,G,N,…]. A page must not depend on others."""
        return {}

    def update(
        self, parts: Named, keys: Tensor, q_pos: Tensor, slots: Tensor, **table: Tensor
    ) -> Named:
        """The parts [B,G,N,…] as they are after a call of positions [B,T] wrote its keys from slots [B] on into
        [B,G,C,D]. A method may give what it says of full pages by an operator of its own, in place.
        """
        first, count = pages_written(keys, q_pos, slots, self.page)
        new = {"keys": kv_pages(keys, first, count, self.page), **table}
        found = named_call(self.summary, new)
        return {name: kv_append(old, found[name], first) for name, old in parts.items()}

    def vote(self, scores: Tensor, seen: Tensor) -> Tensor:
        """Scores of a group's heads [B,G,R,T,N], pages that each token may choose (bool [B,1,1,T,N]) ->
        what they are worth to the group [B,G,T,N]. By default a page is worth what it is to the head that
        wants it most, which keeps an upper bound one.
        """
        return scores.amax(2)

    def choice(self, x: Mapping[str, Any], where: Where, heads: int) -> Tensor:
        """The lists of the tokens of a call [B,G,T,K], by what `score` names, of groups of so many heads. A token's own
        page comes first, and each page once.
        """
        scores = named_call(self.score, x)
        seen = where.seen(scores.shape[3], self.page)
        worth = self.vote(scores.unflatten(2, (heads, where.tokens)), seen[:, :, None])
        return where.best(worth, self.count, self.page)

    def listed(self, build: Build, node: fx.Node) -> fx.Node:
        return listed(self, build, node, self.stored(build, node))

    def stored(self, build: Build, node: fx.Node) -> dict[str, fx.Node]:
        """The parts of all pages, as they are after the call."""
        return stored(self, build, node)


def stored(method: Pages, build: Build, node: fx.Node, suffix: str = "") -> dict[str, fx.Node]:
    """Keep a method's parts `<part><suffix>` of a layer's pages up to date."""
    x = operands_of(node)
    layer, groups, width = node.meta["layer"], int(sizes(x.k)[1]), int(sizes(x.k)[3])
    declared = method.parts(width)
    if not declared:
        return {}
    every = build.every(method.page)
    held = build.declare(
        Part.PAGES, layer,
        {f"{n}{suffix}": (dtype, ("B", groups, every, *tail)) for n, (dtype, tail) in declared.items()},
    )  # fmt: skip
    table = build.tables.get(layer, {})
    with build.editor.graph.inserting_before(node):
        constants = {n: build.editor.param(f"pages.{layer}.{n}", t) for n, t in table.items()}

    def updated(x: Named) -> Named:
        old = {n: x[f"{n}{suffix}"] for n in declared}
        new = method.update(old, x["keys"], x["positions"], x["slots"], **{n: x[n] for n in table})
        return {f"{n}{suffix}": new[n] for n in declared}

    written = {"keys": x.k, "positions": x.q_pos, "slots": build.program.step.input("slots")}
    found: dict[str, fx.Node] = build.made(
        node, f"pages.{layer}", updated, written | held | constants, ("pages", method)
    )
    return found


def listed(
    method: Pages, build: Build, node: fx.Node, parts: Nodes, queries: fx.Node | None = None
) -> fx.Node:
    """List the pages that an attention's tokens choose by such parts, with these queries (by default its own)."""
    layer, x = node.meta["layer"], operands_of(node)
    form, groups = form_of(x), int(sizes(x.k)[1])
    keys = {"keys": x.k} if "keys" in parameters(method.score) else {}
    table = build.tables.get(layer, {})
    (pages,) = build.either(
        node, "choose", partial(chosen, method, form, groups, list(parts)), partial(no_list, groups),
        {**build.asked(node, queries), **parts, **keys}, (method, form),
        constants={n: (f"pages.{layer}.{n}", t) for n, t in table.items()},
    )  # fmt: skip
    build.becomes(Part.PAGES, layer, parts)
    return pages


def chosen(method: Pages, form: Form, groups: int, parts: list[str], x: Named) -> Tensor:
    """Queries [B,T,H,D] at positions [B,T], positions k_pos in the slots [B,C], the call's first slots [B], the parts,
    and what else the score names -> the pages that the tokens read [B,G,T,K], -1 where there are fewer.
    """
    queries = x["queries"]
    batch, tokens, heads, width = queries.shape
    rows = queries.transpose(1, 2).reshape(batch, groups, heads // groups * tokens, width)
    known = {**x, "queries": rows, "parts": {n: x[n] for n in parts}, "form": form}
    where = Where(x["positions"], x["k_pos"], x["slots"], form)
    return method.choice(known, where, heads // groups)
