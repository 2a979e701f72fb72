"""kv.select: which pages of the cache a token attends to; nothing is evicted. A method is two pure
functions, a summary of a page's keys and a score of pages by queries; this pass inserts them around attention.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from accel.ir.axis import option
from accel.ir.invariants import Invariant, Method
from accel.ir.ops.attention import Form, attention, form_of, operands_of
from accel.ir.ops.kv import kv_append
from accel.ir.ops.pages import fetch_pages, few_to_many, kv_pages, pages_written
from accel.ir.program import Editor, Program, State
from accel.ir.region import Conditional, sizes
from accel.ir.selection import Selection
from accel.ir.sizes import FEW
from accel.ir.state import POSITIONS, CacheRegion, Home, Part, name_of, output_of
from accel.ir.tables import Tables
from accel.ir.trace import trace
from accel.passes import Pass, Report
from accel.passes.kv._shared.tables import appended, attentions
from accel.passes.kv.inputs import call as named_call
from accel.passes.kv.inputs import parameters
from accel.passes.kv.select._build import (
    Build,
    graph_of,
    no_list,
    other_list,
    reads_recent,
    region_call,
)
from accel.passes.kv.select._where import Where
from accel.passes.state.cache import Cache
from accel.passes.state.head import Head
from accel.passes.state.recurrent import buffer
from accel.passes.trained import Parts, Trained, constants

Sizes = tuple[int, ...]
LEAST = 3  # pages that are read at least
PAGES = (1, 2, 4, 8, 16, 32, 64, 128)  # slots of a page: buffers are multiples of the largest
SPARSE = frozenset(  # what any selection breaks
    {Invariant.CALL_INDEPENDENT, Invariant.BATCH_INVARIANCE, Invariant.FULL_ATTENTION}
)
_PAGES = 43  # example size while shapes are worked out


class _Scored:
    """A class with a `score` of whatever parameters, which is no field of a dataclass."""

    score: Callable[..., Tensor]


@dataclass(frozen=True)
class Base(_Scored, Pass, Method, ABC):
    """Sparse attention over pages: each token and KV head attends to its own page (the newest, maybe not
    full) and to the best earlier pages.

    The summary of each page, `pages.<layer>.<part> [B,G,C/page,…]`, is a function of the page's keys. It is
    computed for the pages that a call writes or fills, and used from the call that fills the page on; before, the
    page is the own page of every reader. So rewinding stays free, and a call of up to FEW tokens (`width`: a method
    may say fewer) gives the logits of single-token calls. Longer calls attend to all pages, as do the first
    `dense_layers` layers, and all layers while the buffers have no more pages than are read. Tokens kept by eviction
    are always read.

    `score` gives what each page is worth to each query [B,G,M,N]. It names its inputs:

    | parameter | |
    |---|---|
    | `queries` [B,G,M,D] | after RoPE; the M = R T queries of a group's R heads |
    | `parts` | name -> the parts [B,G,N,…] of all pages |
    | `keys` [B,G,C,D] | as cached, read in place; pages of one token (`page` = 1), which need no parts |

    Parts may also be kept of larger stretches (`levels`), for a method that chooses by these first (`choice`).

    The constants of a method that is a `Tables` (`ir/tables.py`) are further parameters of `score` and `summary`.

    A layer may read the list that a layer before it chose (`chooser`), and choose for others though it reads
    everything itself (`reads_all`).
    """

    tokens_read: int = option(1024, least=1)
    page: int = option(16, one_of=PAGES)
    dense_layers: int = option(2, least=0)

    as_cached: ClassVar[bool] = False  # whether it takes keys and values for what the cache has
    width: ClassVar[int] = FEW  # tokens of a call up to which each chooses for itself
    homes: ClassVar[Mapping[Part, Home]] = {}
    """Where keys and values of layers lie that only lists are read of, but for calls that read everything: in memory,
    where it does not say.
    """

    after = (Cache, Head)
    must_change = True
    flat = True
    stage = 1  # after what is kept, which it leaves alone, and codecs: pages are of keys as they are stored
    grade = "approximate"
    error = 1.0  # where few of the tokens are read

    relies = frozenset({Invariant.APPEND_ONLY, Invariant.CHAINS, Invariant.ROW_PRIVATE})

    @property
    def breaks(self) -> frozenset[Invariant]:
        """Parts are made of keys; a method without leaves these as they are."""
        return SPARSE | {Invariant.PLAIN_KEYS} if self.parts(1) else SPARSE

    def parts(self, width: int) -> dict[str, tuple[str, Sizes]]:
        """What is kept of a page of keys of D = `width` numbers: name -> (dtype, sizes after [B,G,N])."""
        return {}

    def summary(self, keys: Tensor) -> dict[str, Tensor]:
        """keys [B,G,N,page,D] -> the parts [B,G,N,…]. A page must not depend on others."""
        return {}

    def update(
        self,
        held: dict[str, Tensor],
        keys: Tensor,
        q_pos: Tensor,
        slots: Tensor,
        **table: Tensor,
    ) -> dict[str, Tensor]:
        """The parts [B,G,N,…] as they are after a call of positions [B,T] wrote its keys from slots [B] on into
        [B,G,C,D]. A method may give what it says of full pages by an operator of its own, in place.
        """
        first, count = pages_written(keys, q_pos, slots, self.page)
        new = {"keys": kv_pages(keys, first, count, self.page), **table}
        found = named_call(self.summary, new)
        return {name: kv_append(old, found[name], first) for name, old in held.items()}

    @property
    def levels(self) -> tuple[int, ...]:
        """Slots of the stretches of which parts are kept: pages, and maybe larger ones, whose parts are called
        `<part>.<slots>`.
        """
        return (self.page,)

    def choice(self, x: Mapping[str, Any], where: Where, heads: int) -> Tensor:
        """The lists of the tokens of a call [B,G,T,K], by what `score` names, of groups of so many heads."""
        scores = named_call(self.score, x)
        seen = where.seen(scores.shape[3], self.page)
        worth = self.vote(scores.unflatten(2, (heads, where.tokens)), seen[:, :, None])
        return self.joined(where.best(worth, self.count, self.page), scores.shape[3])

    def chooser(self, layer: int) -> int:
        """The layer whose list a layer reads: its own, or that of a layer before it."""
        return layer

    def reads_all(self, layer: int) -> str:
        """Why a layer reads all pages; nothing where it reads a list."""
        if layer < self.dense_layers:
            return f"it is in layer {layer}, and dense_layers is {self.dense_layers}"
        return ""

    def vote(self, scores: Tensor, seen: Tensor) -> Tensor:
        """Scores of a group's heads [B,G,R,T,N], pages that each token may choose (bool [B,1,1,T,N]) ->
        what they are worth to the group [B,G,T,N]. By default a page is worth what it is to the head that
        wants it most, which keeps an upper bound one.
        """
        return scores.amax(2)

    @property
    def selection(self) -> Selection:
        """What sessions have to know: calls of up to `width` tokens select as calls of one, longer ones do not."""
        return Selection(self.width)

    def joined(self, chosen: Tensor, pages: int) -> Tensor:
        """The lists that the tokens of a call read, given what each chose of so many pages [B,G,T,K]: by default that.
        A token's own page comes first, and each page once.
        """
        return chosen

    @property
    def count(self) -> int:
        """Pages that a token chooses, its own among them."""
        return max(LEAST, self.tokens_read // self.page)

    @property
    def reads(self) -> frozenset[str]:
        """The names of what its score goes by."""
        return frozenset(parameters(self.score))

    def run(self, program: Program) -> Report:
        report = Report()
        sites = [n for n in program.step.graph.nodes if n.target is attention.default]
        keys = {layer: appended(node) for layer, node in attentions(program).items()}
        why = {n: self._dense(program, n) or self._untold(program, n, keys) for n in sites}
        free = {node.meta["layer"] for node in sites if not why[node]}
        wanted = {self.chooser(layer) for layer in free if not self.reads_all(layer)} & free
        tables = constants(self, program, keys) if wanted and isinstance(self, Tables) else {}
        outputs = program.step.output_nodes()
        build: Build | None = None
        for node in sites:
            layer = node.meta.get("layer")
            if layer in wanted and not why[node]:
                build = build or self._build(program, node, tables, outputs, tuple(sorted(wanted)))
                build.lists[layer] = node, self._list(build, node)
            own = why[node] or self.reads_all(layer) or other_list(build, node, self.chooser(layer))
            if own:
                report.refused.append(f"{node.name}: {own}")
                continue
            assert build is not None
            pages = build.lists[self.chooser(layer)][1]
            node.kwargs = {**node.kwargs, "pages": pages, "page": self.page}
            report.changed += 1
        program.step.set_outputs(outputs)
        program.facts.selection = self.selection
        self._house(program, sites)
        return report

    def _house(self, program: Program, sites: list[fx.Node]) -> None:
        """Say where keys and values lie of layers that no attention reads all of in each call, and what is fetched."""
        listed: set[int | None] = set()
        whole: set[int | None] = set()
        for node in sites:
            layer = node.meta.get("layer")
            shares = None if layer is None else program.facts.layers[layer].shares
            used = listed if operands_of(node).pages is not None else whole
            used.add(layer if shares is None else shares)
        for i, state in enumerate(program.state):
            own = state.region is CacheRegion.RECENT and state.stored and state.part in self.homes
            if own and state.layer in listed - whole:
                program.state[i] = replace(state, home=self.homes[state.part])
        editor = Editor(program, program.step.graph)
        for node in sites if self.homes else ():
            x = operands_of(node)
            if x.pages is None:
                continue
            read = x.pages
            with editor.graph.inserting_before(node):
                for part, held in ((Part.KEYS, x.k), (Part.VALUES, x.v)):
                    if part in self.homes:
                        read = editor.call(fetch_pages.default, read, held, x.page, like=node)
            node.kwargs = {**node.kwargs, "pages": read}

    def _build(
        self,
        program: Program,
        node: fx.Node,
        tables: Parts,
        outputs: dict[str, fx.Node],
        layers: tuple[int, ...],
    ) -> Build:
        """What all lists have in common, before the first."""
        graph = program.step.graph
        editor = Editor(program, graph)
        letters: dict[str, Any] = {"B": program.step.input("tokens").meta["val"].shape[0]}
        for i, slots in enumerate(self.levels):
            letters[f"C/{slots}"] = editor.symbol(f"C/{slots}", _PAGES - 2 * i)
        with graph.inserting_before(node):
            where = operands_of(node).k_pos
            read = self.count * self.page
            positions = program.step.input("positions")
            chooses = editor.call(few_to_many.default, positions, where, self.width, read)
        return Build(program, chooses, letters, tables, outputs, layers)

    def _dense(self, program: Program, node: fx.Node) -> str:
        """Why an attention can neither choose nor read a list; nothing where it can."""
        x = operands_of(node)
        layer = node.meta.get("layer")
        states = {s.name for s in program.state}
        if layer is None or POSITIONS not in states or not reads_recent(program, x):
            return "it does not read a cache that steps append to"
        if x.bias is not None:
            return "the score bound of a page does not include a position bias (ALiBi, T5)"
        if x.tree is not None:
            return "tokens of a draft tree are not in position order"
        shares = program.facts.layers[layer].shares
        if shares is not None:
            return f"it reads the cache of layer {shares}, whose pages belong to that layer"
        return ""

    def _untold(self, program: Program, node: fx.Node, keys: Mapping[int, fx.Node]) -> str:
        """Why its keys are not what the method knows; nothing where they are, or make no difference."""
        blocks = self.as_cached and operands_of(node).kept_k is not None  # of a codec
        if node.meta["layer"] in keys and not blocks:
            return ""
        if isinstance(self, Tables | Trained):
            return "kv.codec encodes its keys, and the method's file is checked by plain ones; leave one of the two out"
        if self.as_cached:
            return (
                "kv.codec encodes its keys, or they are made of a latent, and the method takes rows of them as they "
                "are; leave kv.codec out, or use kv.select = 'quest'"
            )
        return ""

    def _list(self, build: Build, node: fx.Node) -> fx.Node:
        """Keep the pages' parts up to date, and list the pages that the readers of one layer's choice attend to."""
        program = build.program
        editor, x = Editor(program, program.step.graph), operands_of(node)
        layer, groups = node.meta["layer"], int(sizes(x.k)[1])
        stored = self._stored(build, node)
        table = {f"pages.{layer}.{n}": t for n, t in build.tables.get(layer, {}).items()}
        names = [*build.tables.get(layer, {})]
        with editor.graph.inserting_before(node):
            by_token = self._asked(build, node)
            inputs = {**stored, **({"keys": x.k} if "keys" in self.reads else {})}
            slots = program.step.input("slots")
            given = (build.chooses, by_token, x.q_pos, x.k_pos, slots, *inputs.values())
            mask = form_of(x)
            choose = partial(self._choose, list(stored), [*inputs, *names][len(stored) :], mask)
            region = Conditional(
                f"choose.{layer}",
                graph_of(program, layer, choose, given, ("choose", self, mask), table),
                graph_of(program, layer, partial(no_list, groups), given, ("nothing", groups)),
            )
            (pages,) = region_call(editor, region, given, node)
        build.outputs |= {
            output_of(name_of(Part.PAGES, layer, detail=part)): new for part, new in stored.items()
        }
        return pages

    def _asked(self, build: Build, node: fx.Node) -> fx.Node:
        """What `score` gets as the queries of an attention's tokens [B,T,H,D], before it."""
        editor = Editor(build.program, build.program.step.graph)
        return editor.call(torch.ops.aten.transpose.int, operands_of(node).q, 1, 2, like=node)

    def _stored(self, build: Build, node: fx.Node) -> dict[str, fx.Node]:
        """The pages' parts, as they are after the call."""
        program = build.program
        editor, x = Editor(program, program.step.graph), operands_of(node)
        layer, groups, width = node.meta["layer"], int(sizes(x.k)[1]), int(sizes(x.k)[3])
        declared = self.parts(width)
        if not declared:
            return {}
        table = build.tables.get(layer, {})
        stored: dict[str, fx.Node] = {}
        for slots in self.levels:
            method = self if slots == self.page else replace(self, page=slots)
            names = {part: self._called(part, slots) for part in declared}
            kept = {names[part]: sizes_ for part, sizes_ in declared.items()}
            held = self._held(build, layer, groups, kept, slots)
            with editor.graph.inserting_before(node):
                written = (
                    x.k,
                    x.q_pos,
                    program.step.input("slots"),
                    *held,
                    *(editor.param(f"pages.{layer}.{n}", t) for n, t in table.items()),
                )
                update, key = (
                    partial(method._update, list(declared), list(table)),
                    ("pages", method),
                )
                found = trace(editor, f"pages.{layer}", update, *written, like=node, key=key)
            stored |= {names[part]: found[part] for part in declared}
        return stored

    def _called(self, part: str, slots: int) -> str:
        """The name of a part of stretches of so many slots."""
        return part if slots == self.page else f"{part}.{slots}"

    def _held(
        self,
        build: Build,
        layer: int,
        groups: int,
        declared: Mapping[str, tuple[str, Sizes]],
        slots: int,
    ) -> list[fx.Node]:
        """State of stretches of so many slots, by a layer's so many heads: `pages.<layer>.<part> [B,G,C/slots,…]`."""
        editor = Editor(build.program, build.program.step.graph)
        held = []
        for part, (dtype, tail) in declared.items():
            shape: tuple[int | str, ...] = ("B", groups, f"C/{slots}", *tail)
            state = State(Part.PAGES, layer, dtype, shape, detail=part)
            held.append(buffer(build.program, editor, state, build.letters))
        return held

    def _update(
        self,
        parts: list[str],
        table: list[str],
        keys: Tensor,
        q_pos: Tensor,
        slots: Tensor,
        *values: Tensor,
    ) -> dict[str, Tensor]:
        """`values`: the parts, then the constants, of these names."""
        x = dict(zip([*parts, *table], values, strict=True))
        return self.update({n: x[n] for n in parts}, keys, q_pos, slots, **{n: x[n] for n in table})

    def _choose(
        self,
        parts: list[str],
        more: list[str],
        mask: Form,
        queries: Tensor,
        q_pos: Tensor,
        k_pos: Tensor,
        slots: Tensor,
        *values: Tensor,
    ) -> Tensor:
        """Queries [B,T,H,D] at positions [B,T], positions in the slots [B,C], the call's first slots [B], and values,
        the parts, then what else the score names -> the pages that they read [B,G,T,K], -1 where there are fewer.
        A token's own page comes first.
        """
        (batch, tokens, heads, width), groups = queries.shape, values[0].shape[1]
        rows = queries.transpose(1, 2).reshape(batch, groups, heads // groups * tokens, width)
        x = dict(zip([*parts, *more], values, strict=True))
        known = {"queries": rows, "parts": {n: x[n] for n in parts}, **{n: x[n] for n in more}}
        known["form"] = mask
        return self.choice(known, Where(q_pos, k_pos, slots, mask), heads // groups)
