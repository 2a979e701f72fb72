"""kv.select: which pages of the cache a token attends to; nothing is evicted. The pass `Select` inserts a method around
attention. Most methods are two pure functions, a summary of a page's keys and a score of pages by queries (`Pages` in
`_pages.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from torch import fx

from accel.ir.axis import option
from accel.ir.invariants import Invariant, Method
from accel.ir.ops.attention import attention, operands_of
from accel.ir.ops.pages import few_to_many
from accel.ir.program import Editor, Program
from accel.ir.selection import Selection
from accel.ir.sizes import FEW
from accel.ir.state import Home, Part
from accel.ir.tables import Tables
from accel.passes import Pass, Report, Rewriting
from accel.passes.kv._shared.tables import appended, attentions
from accel.passes.kv.select._build import Build
from accel.passes.kv.select._sites import dense, other_list, set_homes
from accel.passes.state.cache import Cache
from accel.passes.state.head import Head
from accel.passes.trained import Trained, constants

Sizes = tuple[int, ...]
LEAST = 3  # pages that are read at least
PAGES = (1, 2, 4, 8, 16, 32, 64, 128)  # slots of a page: buffers are multiples of the largest
SPARSE = frozenset(  # what any selection breaks
    {Invariant.CALL_INDEPENDENT, Invariant.BATCH_INVARIANCE, Invariant.FULL_ATTENTION}
)


@dataclass(frozen=True)
class Layout:
    """Who chooses, and where what is read lies.

    width: tokens of a call up to which each chooses for itself. selection: what sessions have to know. choosers: layers
    that attend to everything and choose what those behind them read, up to the next; none: each layer chooses for
    itself. homes: where keys and values of layers lie that only lists are read of, but for calls that read everything;
    in memory, where it does not say. spelling: whether the method goes by `program.spelling`.
    """

    width: int = FEW
    selection: Selection = Selection(FEW)
    choosers: tuple[int, ...] = ()
    homes: Mapping[Part, Home] = field(default_factory=dict)
    spelling: bool = False

    def chooser(self, layer: int) -> int:
        """The layer whose list a layer reads."""
        return max((c for c in self.choosers if c <= layer), default=layer)


MAPPED = Layout(homes={Part.KEYS: Home.MAPPED, Part.VALUES: Home.MAPPED})  # they lie in files


@dataclass(frozen=True)
class Base(Rewriting, Method, ABC):
    """A method of the axis: sparse attention over lists of pages, of `page` slots each.

    Calls of more than FEW tokens attend to all pages, as do the first `dense_layers` layers, and all layers while the
    buffers have no more pages than are read. Tokens kept by eviction are always read.
    """

    tokens_read: int = option(1024, least=1)
    page: int = option(16, one_of=PAGES)
    dense_layers: int = option(2, least=0)

    grade = "approximate"
    error = 1.0  # where few of the tokens are read

    relies = frozenset({Invariant.APPEND_ONLY, Invariant.CHAINS, Invariant.ROW_PRIVATE})

    @property
    def breaks(self) -> frozenset[Invariant]:
        return SPARSE

    @property
    def count(self) -> int:
        """Pages that a token reads at most, its own among them."""
        return max(LEAST, self.tokens_read // self.page)

    @property
    def layout(self) -> Layout:
        """Who chooses, and where what is read lies."""
        return Layout()

    @abstractmethod
    def listed(self, build: Build, node: fx.Node) -> fx.Node:
        """Insert before an attention what lists the pages [B,G,T,K] that its tokens read, -1 where there are fewer, and
        what is kept for it.
        """

    def refusal(self, program: Program, node: fx.Node, plain: bool) -> str:
        """Why it cannot choose for an attention; nothing where it can. plain: its cache takes keys as they are."""
        if isinstance(self, Tables | Trained) and not plain:
            return "kv.codec encodes its keys, and the method's file is checked by plain ones; leave one of the two out"
        return ""

    def begun(self, program: Program) -> Self:
        """The method as it is for a program. Raises PassError where it cannot take it."""
        return self

    def finish(self, program: Program) -> None:
        """Add what sessions run between steps, once layers read lists."""

    def steps(self) -> Sequence[Pass]:
        return [Select(self)]


@dataclass(frozen=True)
class Select(Pass):
    """Each layer that may reads the list that it, or a layer before it, chose."""

    selector: Base

    after = (Cache, Head)
    must_change = True
    flat = True
    stage = 1  # after what is kept, which it leaves alone, and codecs: pages are of keys as they are stored

    @property
    def method(self) -> Base:
        return self.selector

    @property
    def grade(self) -> str:  # type: ignore[override]
        return self.method.grade

    @property
    def error(self) -> float:  # type: ignore[override]
        return self.method.error

    @property
    def reads_spelling(self) -> bool:  # type: ignore[override]
        return self.method.layout.spelling

    def run(self, program: Program) -> Report:
        method, report = self.method.begun(program), Report()
        layout = method.layout
        sites = [n for n in program.step.graph.nodes if n.target is attention.default]
        keys = {layer: appended(node) for layer, node in attentions(program).items()}
        cannot = {
            n: dense(program, n) or method.refusal(program, n, n.meta["layer"] in keys)
            for n in sites
        }
        why = {n: cannot[n] or _reads_all(method, n.meta["layer"]) for n in sites}
        wanted = {layout.chooser(n.meta["layer"]) for n in sites if not why[n]}
        wanted &= {n.meta["layer"] for n in sites if not cannot[n]}
        outputs, build = program.step.output_nodes(), None
        lists: dict[int, tuple[fx.Node, fx.Node]] = {}
        for node in sites:
            layer = node.meta.get("layer")
            if layer in wanted and not cannot[node]:
                build = build or _begin(method, program, node, keys, outputs, sorted(wanted))
                lists[layer] = node, method.listed(build, node)
            if own := why[node] or other_list(lists, node, layout.chooser(layer)):
                report.refused.append(f"{node.name}: {own}")
                continue
            pages = lists[layout.chooser(layer)][1]
            node.kwargs = {**node.kwargs, "pages": pages, "page": method.page}
            report.changed += 1
        program.step.set_outputs(outputs)
        program.facts.selection = layout.selection
        if layout.homes:
            set_homes(program, sites, layout.homes)
        if report.changed:
            method.finish(program)
        return report


def _begin(
    method: Base,
    program: Program,
    node: fx.Node,
    keys: dict[int, fx.Node],
    outputs: dict[str, fx.Node],
    layers: list[int],
) -> Build:
    """What all lists have in common, before the first."""
    tables = constants(method, program, keys) if isinstance(method, Tables) else {}
    trained = method.tensors(program, keys) if isinstance(method, Trained) else {}
    editor = Editor(program, program.step.graph)
    with editor.graph.inserting_before(node):
        read, positions = method.count * method.page, program.step.input("positions")
        where = operands_of(node).k_pos
        chooses = editor.call(few_to_many.default, positions, where, method.layout.width, read)
    letters = {"B": program.step.input("tokens").meta["val"].shape[0]}
    return Build(program, chooses, letters, tables, trained, outputs, tuple(layers))


def _reads_all(method: Base, layer: int) -> str:
    """Why a layer that could read a list reads all pages; nothing where it reads one."""
    if layer in method.layout.choosers:
        return f"layer {layer} chooses for those after it, and attends to everything"
    if layer < method.dense_layers:
        return f"it is in layer {layer}, and dense_layers is {method.dense_layers}"
    return ""
