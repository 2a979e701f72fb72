"""kv.select: which pages of the cache a token reads. Nothing is dropped. A method is two pure functions, of the
keys of a page and of a query and what is known of pages; this pass puts them around attention.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from accel.ir.errors import PassError, RecipeError
from accel.ir.ops.attention import Mask, Operands, attention, operands_of
from accel.ir.ops.kv import kv_append
from accel.ir.ops.mass import attention_mass
from accel.ir.ops.pages import few_to_many, kv_pages
from accel.ir.program import Conditional, Editor, Program, State
from accel.ir.trace import Memo, trace
from accel.passes import Pass, Report
from accel.passes.recognise.region import sizes
from accel.passes.state.cache import Cache
from accel.passes.state.head import Head
from accel.passes.state.recurrent import buffer

Sizes = tuple[int, ...]
FEW = 32  # tokens of a call, up to which each reads pages of its own
LEAST = 3  # pages that are read at least
LARGEST = 128  # slots of a page: buffers are multiples of it
_PAGES = 43  # example size while shapes are worked out


@dataclass(frozen=True)
class Base(Pass, ABC):
    """attention over the recent slots -> attention over some of their pages, which each token and KV head
    chooses: its own page (the newest, which may not be full) and the best of those before it.

    What a method keeps of each page, `pages.<layer>.<part> [B,G,C/page,…]`, is a function of the
    page's keys alone. It is computed anew for the pages that a call writes to, so that a page's value holds
    from the call on that fills it; before, no token asks for it, since it would be that token's own page.
    So rewinding stays free, and a call of up to FEW tokens gives what as many calls of one do. Longer
    calls read everything, as do the first `dense_layers` layers, and all of them while the buffers
    have no more pages than are read. What eviction kept is always read.
    """

    tokens_read: int = 1024
    page: int = 16
    dense_layers: int = 2

    after = (Cache, Head)
    must_change = True
    flat = True
    rank = 1  # after what is kept, which it leaves alone, and codecs: pages are of keys as they are stored
    grade = "approximate"
    error = 1.0  # where few of the tokens are read

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.page < 1 or LARGEST % self.page:
            raise RecipeError(
                f"{name}: page = {self.page}; give a power of two up to {LARGEST}, so that pages fill the buffers"
            )
        if self.tokens_read < 1:
            raise RecipeError(f"{name}: tokens_read = {self.tokens_read}; give 1 or more")
        if self.dense_layers < 0:
            raise RecipeError(f"{name}: dense_layers = {self.dense_layers}; give 0 or more")

    @abstractmethod
    def parts(self, width: int) -> dict[str, tuple[str, Sizes]]:
        """What is kept of a page of keys of D = `width` numbers: name -> (dtype, sizes after [B,G,N])."""

    @abstractmethod
    def summary(self, keys: Tensor) -> dict[str, Tensor]:
        """keys [B,G,N,page,D] -> the parts [B,G,N,…]. A page must not depend on others."""

    @abstractmethod
    def score(self, queries: Tensor, parts: dict[str, Tensor]) -> Tensor:
        """queries [B,G,M,D], the parts [B,G,N,…] -> what each page is worth to them [B,G,M,N]."""

    def vote(self, scores: Tensor, seen: Tensor) -> Tensor:
        """Scores of a group's heads [B,G,R,T,N], pages that each token may choose (bool [B,1,1,T,N]) ->
        what they are worth to the group [B,G,T,N]. By default a page is worth what it is to the head that
        wants it most, which keeps an upper bound one.
        """
        return scores.amax(2)

    @property
    def count(self) -> int:
        """Pages that a token reads, its own among them."""
        return max(LEAST, self.tokens_read // self.page)

    def run(self, program: Program) -> Report:
        name = type(self).__name__
        if mass := program.nodes(attention_mass.default, entry=program.step):
            raise PassError(
                f"{mass[0].name}: kv.score counts the attention that each token draws, and {name} reads only "
                "some tokens; leave kv.select out, or use a kv.score that does not count"
            )
        report, memos = Report(), _Memos({}, {}, {})
        graph = program.step.graph
        sites = [n for n in graph.nodes if n.target is attention.default]
        outputs = program.step.output_nodes()
        positions = program.step.input("positions")
        letters: dict[str, Any] = {}
        shared: dict[Any, tuple[fx.Node, fx.Node]] = {}
        for node in sites:
            if why := self._dense(program, node):
                report.refused.append(f"{node.name}: {why}")
                continue
            if not letters:
                editor = Editor(program, graph)
                letters["B"] = program.step.input("tokens").meta["val"].shape[0]
                letters[f"C/{self.page}"] = editor.symbol(f"C/{self.page}", _PAGES)
                with graph.inserting_before(node):
                    where = operands_of(node).k_pos
                    read = self.count * self.page
                    chooses = editor.call(few_to_many.default, positions, where, FEW, read)
            self._select(program, node, chooses, letters, outputs, memos, shared)
            report.changed += 1
        program.step.set_outputs(outputs)
        return report

    def _dense(self, program: Program, node: fx.Node) -> str:
        """Why an attention reads everything; nothing where it may choose."""
        x = operands_of(node)
        layer = node.meta.get("layer")
        states = {s.name for s in program.state}
        if layer is None or "kv.pos" not in states or not _recent(program, x):
            return "it reads no cache that steps append to"
        if layer < self.dense_layers:
            return f"it is of layer {layer}, and dense_layers is {self.dense_layers}"
        if x.bias is not None:
            return "a bias by position (ALiBi, T5) is no part of what bounds a page's scores"
        if x.tree is not None:
            return "tokens of a tree do not lie in the order of their positions"
        shares = program.facts.layers[layer].shares
        if shares is not None:
            return f"it reads the cache of layer {shares}, which knows its own pages alone"
        return ""

    def _select(
        self,
        program: Program,
        node: fx.Node,
        chooses: fx.Node,
        letters: dict[str, Any],
        outputs: dict[str, fx.Node],
        memos: _Memos,
        shared: dict[Any, tuple[fx.Node, fx.Node]],
    ) -> None:
        """Keep the pages' parts up to date, and let one attention read what they say."""
        editor, x = Editor(program, program.step.graph), operands_of(node)
        layer, groups, width = node.meta["layer"], int(sizes(x.k)[1]), int(sizes(x.k)[3])
        declared = self.parts(width)
        held = []
        for part, (dtype, tail) in declared.items():
            shape: tuple[int | str, ...] = ("B", groups, f"C/{self.page}", *tail)
            state = State(f"pages.{layer}.{part}", "pages", layer, dtype, shape, 0)
            held.append(buffer(program, editor, state, letters))
        slots = program.step.input("slots")
        with editor.graph.inserting_before(node):
            update = self._updated(list(declared))
            written = (x.k_pos, x.q_pos, slots, x.k)
            *new, first = trace(editor, f"pages.{layer}", update, *written, like=node, memo=memos.updates)
            stored = [
                editor.call(kv_append.default, old, part, first, like=node)
                for old, part in zip(held, new, strict=True)
            ]
            if (x.mask, x.window) not in shared:
                where = partial(self._before, Mask(x.mask, x.window))
                shared[x.mask, x.window] = trace(editor, "pages", where, x.q_pos, slots, x.k_pos, held[0])
            by_token = editor.call(torch.ops.aten.transpose.int, x.q, 1, 2, like=node)
            given = (chooses, *shared[x.mask, x.window], by_token, *stored)
            choose = partial(self._choose, list(declared))
            region = Conditional(
                f"choose.{layer}",
                _graph(program, layer, choose, given, memos.choices),
                _graph(program, layer, partial(_nothing, groups), given, memos.nothing),
            )
            call = editor.graph.call_function(region, given)
            (out,) = region.graph.find_nodes(op="output")
            call.meta |= {"val": (out.args[0][0].meta["val"],), "layer": layer}
            pages = editor.call(operator.getitem, call, 0, like=node)
        node.kwargs = {**node.kwargs, "pages": pages, "page": self.page}
        outputs |= {f"{old.target}.next": part for old, part in zip(held, stored, strict=True)}

    def _updated(self, names: list[str]) -> Callable[..., tuple[Tensor, ...]]:
        """(positions in the slots [B,C], of the call [B,T], slots [B], keys [B,G,C,D] with the call's own) -> the
        parts [B,G,n,…] of the pages that the call wrote to, and the first one's number [B].
        """

        def update(
            held: Tensor, positions: Tensor, slots: Tensor, keys: Tensor
        ) -> tuple[Tensor, ...]:
            total = (held.shape[1] + self.page - 1) // self.page
            count = torch.sym_min((positions.shape[1] + self.page - 2) // self.page + 1, total)
            # some that were full before, where the last one would lie past the end
            first = (slots // self.page).clamp(max=total - count)
            found = self.summary(kv_pages(keys, first, count, self.page))
            return *(found[name] for name in names), first

        return update

    def _before(
        self, mask: Mask, positions: Tensor, slots: Tensor, held: Tensor, part: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same for layers of one mask: the pages that each token of a call may choose, bool [B,1,T,N], and
        its own [B,1,T,1]. Positions of the call [B,T] and in the slots [B,C], slots [B], a part of pages.
        """
        ahead = torch.arange(positions.shape[1], device=slots.device)
        own = ((slots[:, None] + ahead) // self.page)[:, None, :, None]
        numbers = torch.arange(part.shape[2], device=slots.device)
        ends = (numbers * self.page + self.page - 1).clamp(max=held.shape[1] - 1)
        newest = held.index_select(1, ends)[:, None, None]  # a page's newest position
        return mask.visible(positions[:, None, :, None], newest) & (numbers < own), own

    def _choose(
        self, names: list[str], seen: Tensor, own: Tensor, queries: Tensor, *parts: Tensor
    ) -> Tensor:
        """What `_before` gives, queries [B,T,H,D], the parts -> the pages that they read [B,G,T,K], -1 where
        there are fewer. A token's own page comes first.
        """
        batch, _, tokens, total = seen.shape
        groups, (heads, width) = parts[0].shape[1], queries.shape[2:]
        rows = queries.transpose(1, 2).reshape(batch, groups, heads // groups * tokens, width)
        scores = self.score(rows, dict(zip(names, parts, strict=True)))
        worth = self.vote(scores.unflatten(2, (heads // groups, tokens)), seen[:, :, None])
        worth = torch.where(worth.isnan(), math.inf, worth)  # no number: attention shall see it
        worth = worth.masked_fill(~seen, -math.inf)
        best, pages = worth.topk(torch.sym_min(self.count - 1, total), dim=3)
        pages = pages.masked_fill(best == -math.inf, -1)
        return torch.cat((own.expand(-1, groups, -1, -1), pages), dim=3)


@dataclass
class _Memos:
    """What was traced for layers before."""

    updates: Memo
    choices: Memo
    nothing: Memo


def _graph(
    program: Program,
    layer: int,
    function: Callable[..., Tensor],
    given: tuple[fx.Node, ...],
    memo: Memo,
) -> fx.Graph:
    """What a function does with operands, the first (a condition) left out."""
    graph = fx.Graph()
    holders = []
    for i, node in enumerate(given):
        holders.append(graph.placeholder(str(node.target) if node.op == "placeholder" else f"x{i}"))
        holders[-1].meta["val"] = node.meta["val"]
    editor = Editor(program, graph)
    graph.output((trace(editor, f"pages.{layer}", function, *holders[1:], memo=memo),))
    return graph


def _nothing(groups: int, seen: Tensor, own: Tensor, *rest: Tensor) -> Tensor:
    """No list of pages [B,G,0,1], since everything is read."""
    return own.new_zeros((own.shape[0], groups, 0, 1))


def _recent(program: Program, x: Operands[Any]) -> bool:
    """Whether it reads what steps append to `kv.pos`."""
    return isinstance(x.k_pos, fx.Node) and x.k_pos is program.step.output_nodes().get(
        "kv.pos.next"
    )
