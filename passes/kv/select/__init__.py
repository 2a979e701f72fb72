"""kv.select: which pages of the cache a token attends to; nothing is evicted. A method is two pure
functions, a summary of a page's keys and a score of pages by queries; this pass inserts them around attention.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from accel.ir.errors import RecipeError
from accel.ir.invariants import Invariant, Method
from accel.ir.ops.attention import Mask, Operands, attention, operands_of
from accel.ir.ops.choice import best_pages, pages_before
from accel.ir.ops.kv import kv_append
from accel.ir.ops.pages import few_to_many, kv_pages, pages_written
from accel.ir.program import Editor, Program, State
from accel.ir.region import Conditional, sizes
from accel.ir.sizes import FEW
from accel.ir.state import POSITIONS, Part, name_of, output_of
from accel.ir.trace import trace
from accel.passes import Pass, Report
from accel.passes.clean.clean import remove_dead
from accel.passes.state.cache import Cache
from accel.passes.state.head import Head
from accel.passes.state.recurrent import buffer

Sizes = tuple[int, ...]
LEAST = 3  # pages that are read at least
LARGEST = 128  # slots of a page: buffers are multiples of it
_PAGES = 43  # example size while shapes are worked out


@dataclass(frozen=True)
class Base(Pass, Method, ABC):
    """Sparse attention over pages: each token and KV head attends to its own page (the newest, maybe not
    full) and to the best earlier pages.

    The summary of each page, `pages.<layer>.<part> [B,G,C/page,…]`, is a function of the page's keys. It is
    computed for
    the pages that a call writes or fills, and used from the call that fills the page on; before, the page is
    the own page
    of every reader. So rewinding stays free, and a call of up to FEW tokens gives the logits of single-token
    calls. Longer
    calls attend to all pages, as do the first `dense_layers` layers, and all layers while the buffers have
    no more pages than are read. Tokens kept by eviction are always read.
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

    relies = frozenset({Invariant.APPEND_ONLY, Invariant.CHAINS, Invariant.ROW_PRIVATE})
    breaks = frozenset(
        {
            Invariant.CALL_INDEPENDENT,
            Invariant.BATCH_INVARIANCE,
            Invariant.FULL_ATTENTION,
            Invariant.PLAIN_KEYS,
        }
    )

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.page < 1 or LARGEST % self.page:
            raise RecipeError(
                f"{name}: page = {self.page}; give a power of two up to {LARGEST}, so that buffers hold whole pages"
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

    def update(
        self, held: dict[str, Tensor], keys: Tensor, q_pos: Tensor, slots: Tensor
    ) -> dict[str, Tensor]:
        """The parts [B,G,N,…] as they are after a call of positions [B,T] wrote its keys from slots [B] on into
        [B,G,C,D]. A method may give what it says of full pages by an operator of its own, in place.
        """
        first, count = pages_written(keys, q_pos, slots, self.page)
        found = self.summary(kv_pages(keys, first, count, self.page))
        return {name: kv_append(old, found[name], first) for name, old in held.items()}

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
        report = Report()
        graph = program.step.graph
        sites = [n for n in graph.nodes if n.target is attention.default]
        outputs = program.step.output_nodes()
        positions = program.step.input("positions")
        letters: dict[str, Any] = {}
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
            self._select(program, node, chooses, letters, outputs)
            report.changed += 1
        program.step.set_outputs(outputs)
        return report

    def _dense(self, program: Program, node: fx.Node) -> str:
        """Why an attention reads everything; nothing where it may choose."""
        x = operands_of(node)
        layer = node.meta.get("layer")
        states = {s.name for s in program.state}
        if layer is None or POSITIONS not in states or not _recent(program, x):
            return "it does not read a cache that steps append to"
        if layer < self.dense_layers:
            return f"it is in layer {layer}, and dense_layers is {self.dense_layers}"
        if x.bias is not None:
            return "the score bound of a page does not include a position bias (ALiBi, T5)"
        if x.tree is not None:
            return "tokens of a draft tree are not in position order"
        shares = program.facts.layers[layer].shares
        if shares is not None:
            return f"it reads the cache of layer {shares}, whose pages belong to that layer"
        return ""

    def _select(
        self,
        program: Program,
        node: fx.Node,
        chooses: fx.Node,
        letters: dict[str, Any],
        outputs: dict[str, fx.Node],
    ) -> None:
        """Keep the pages' parts up to date, and let one attention read what they say."""
        editor, x = Editor(program, program.step.graph), operands_of(node)
        layer, groups, width = node.meta["layer"], int(sizes(x.k)[1]), int(sizes(x.k)[3])
        declared = self.parts(width)
        held = []
        for part, (dtype, tail) in declared.items():
            shape: tuple[int | str, ...] = ("B", groups, f"C/{self.page}", *tail)
            state = State(Part.PAGES, layer, dtype, shape, detail=part)
            held.append(buffer(program, editor, state, letters))
        slots = program.step.input("slots")
        with editor.graph.inserting_before(node):
            update, written = partial(self._update, list(declared)), (x.k, x.q_pos, slots)
            stored = trace(
                editor, f"pages.{layer}", update, *written, *held, like=node, key=("pages", self)
            )
            by_token = editor.call(torch.ops.aten.transpose.int, x.q, 1, 2, like=node)
            given = (chooses, by_token, x.q_pos, x.k_pos, slots, *stored.values())
            mask = Mask(x.mask, x.window)
            choose = partial(self._choose, list(declared), mask)
            region = Conditional(
                f"choose.{layer}",
                _graph(program, layer, choose, given, ("choose", self, mask)),
                _graph(program, layer, partial(_nothing, groups), given, ("nothing", groups)),
            )
            call = editor.graph.call_function(region, given)
            (out,) = region.graph.find_nodes(op="output")
            call.meta |= {"val": (out.args[0][0].meta["val"],), "layer": layer}
            pages = editor.call(operator.getitem, call, 0, like=node)
        node.kwargs = {**node.kwargs, "pages": pages, "page": self.page}
        outputs |= {
            output_of(name_of(Part.PAGES, layer, detail=part)): new for part, new in stored.items()
        }

    def _update(
        self, names: list[str], keys: Tensor, q_pos: Tensor, slots: Tensor, *held: Tensor
    ) -> dict[str, Tensor]:
        return self.update(dict(zip(names, held, strict=True)), keys, q_pos, slots)

    def _choose(
        self,
        names: list[str],
        mask: Mask,
        queries: Tensor,
        q_pos: Tensor,
        k_pos: Tensor,
        slots: Tensor,
        *parts: Tensor,
    ) -> Tensor:
        """Queries [B,T,H,D] at positions [B,T], positions in the slots [B,C], the call's first slots [B], the parts
        -> the pages that they read [B,G,T,K], -1 where there are fewer. A token's own page comes first.
        """
        (batch, tokens, heads, width), groups = queries.shape, parts[0].shape[1]
        rows = queries.transpose(1, 2).reshape(batch, groups, heads // groups * tokens, width)
        scores = self.score(rows, dict(zip(names, parts, strict=True)))
        seen, _ = pages_before(q_pos, k_pos, slots, scores.shape[3], self.page, mask)
        worth = self.vote(scores.unflatten(2, (heads // groups, tokens)), seen[:, :, None])
        chosen: Tensor = best_pages(
            worth, q_pos, k_pos, slots, self.count, self.page, mask.kind, mask.size
        )
        return chosen


def _graph(
    program: Program,
    layer: int,
    function: Callable[..., Any],
    given: tuple[fx.Node, ...],
    key: Any,
) -> fx.Graph:
    """What a function does with operands, the first (a condition) left out."""
    graph = fx.Graph()
    holders = []
    for i, node in enumerate(given):
        holders.append(graph.placeholder(str(node.target) if node.op == "placeholder" else f"x{i}"))
        holders[-1].meta["val"] = node.meta["val"]
    editor = Editor(program, graph)
    found = trace(editor, f"pages.{layer}", function, *holders[1:], key=key)
    graph.output(found if isinstance(found, tuple) else (found,))
    remove_dead(graph)  # what a vote did not ask for
    return graph


def _nothing(groups: int, queries: Tensor, q_pos: Tensor, *rest: Tensor) -> Tensor:
    """No list of pages [B,G,0,1], since everything is read."""
    return q_pos.new_zeros((q_pos.shape[0], groups, 0, 1))


def _recent(program: Program, x: Operands[Any]) -> bool:
    """Whether it reads what steps append to `kv.pos`."""
    return isinstance(x.k_pos, fx.Node) and x.k_pos is program.step.output_nodes().get(
        output_of(POSITIONS)
    )
