"""Passes that replace sub-graphs: a pattern, a check and a replacement.

A pattern reads as a program does: `call(aten.mul.Tensor, Value("x"), call(aten.rsqrt.default, …))`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from accel.ir.program import Editor, Program
from accel.passes import Pass, Report
from accel.passes.clean.clean import Clean, remove_unread, replace
from accel.passes.recognise.region import Kinds

aten = torch.ops.aten
Bindings = dict[str, Any]  # what a pattern's names stand for
_COMMUTE = {aten.add.Tensor, aten.mul.Tensor}


class Pattern(ABC):
    """What an operand may be. `a | b` is either."""

    @abstractmethod
    def matches(self, operand: Any, bindings: Bindings) -> Iterator[Bindings]:
        """Each way in which the operand fits what is bound, with what it binds itself."""

    def __or__(self, other: Pattern) -> Pattern:
        return _Either(self, other)


@dataclass(frozen=True)
class Value(Pattern):
    """Any value of the graph. The same name twice is the same value."""

    name: str
    fits: Callable[[fx.Node], bool] = lambda node: True

    def matches(self, operand: Any, bindings: Bindings) -> Iterator[Bindings]:
        if isinstance(operand, fx.Node) and bindings.get(self.name, operand) is operand:
            if self.fits(operand):
                yield {**bindings, self.name: operand}


@dataclass(frozen=True)
class Setting(Pattern):
    """An operand that is no value of the graph: a number, axes, a size. Without a name it is not handed on."""

    name: str = ""
    kinds: tuple[type, ...] = (object,)

    def matches(self, operand: Any, bindings: Bindings) -> Iterator[Bindings]:
        if isinstance(operand, self.kinds) and not isinstance(operand, fx.Node):
            yield {**bindings, self.name: operand} if self.name else bindings


@dataclass(frozen=True)
class _Either(Pattern):
    first: Pattern
    second: Pattern

    def matches(self, operand: Any, bindings: Bindings) -> Iterator[Bindings]:
        yield from self.first.matches(operand, bindings)
        yield from self.second.matches(operand, bindings)


@dataclass(frozen=True)
class _Call(Pattern):
    targets: tuple[Any, ...]
    operands: tuple[Any, ...]
    name: str  # of the call itself
    shared: bool  # others may read the result, too

    def matches(self, operand: Any, bindings: Bindings) -> Iterator[Bindings]:
        if isinstance(operand, fx.Node) and (self.shared or len(operand.users) == 1):
            yield from self.ends(operand, bindings)

    def ends(self, node: fx.Node, bindings: Bindings) -> Iterator[Bindings]:
        """The same of the last value of a whole pattern, whoever reads it."""
        if node.target not in self.targets:
            return
        operands, patterns = node.args, self.operands
        if patterns and patterns[-1] is ...:
            operands, patterns = operands[: len(patterns) - 1], patterns[:-1]
        elif node.kwargs:
            return
        bindings = {**bindings, self.name: node} if self.name else bindings
        yield from _all(patterns, operands, bindings)
        if node.target in _COMMUTE and len(patterns) == 2:
            yield from _all(patterns, operands[::-1], bindings)


def call(target: Any, *operands: Any, name: str = "", shared: bool = False) -> Pattern:
    """A call of an operator (of one of a tuple of them) whose result nothing else reads, unless it is `shared`.

    An operand is a pattern, a list of them, or what it must equal; `...` stands for all further ones. Both orders of a
    sum and of a product are tried.
    """
    return _Call(target if isinstance(target, tuple) else (target,), operands, name, shared)


def _all(patterns: Any, operands: Any, bindings: Bindings) -> Iterator[Bindings]:
    if len(patterns) != len(operands):
        return
    if not patterns:
        yield bindings
        return
    for each in _one(patterns[0], operands[0], bindings):
        yield from _all(patterns[1:], operands[1:], each)


def _one(pattern: Any, operand: Any, bindings: Bindings) -> Iterator[Bindings]:
    if isinstance(pattern, Pattern):
        yield from pattern.matches(operand, bindings)
    elif isinstance(pattern, list):
        if isinstance(operand, (list, tuple)):
            yield from _all(pattern, operand, bindings)
    elif not isinstance(operand, fx.Node) and pattern == operand:
        yield bindings


@dataclass
class Site:
    """Where a pattern was found: new nodes go in before `node`, its last one."""

    program: Program
    editor: Editor
    kinds: Kinds
    node: fx.Node

    def call(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """A new node, of the layer and module of the one that is replaced."""
        return self.editor.call(op, *args, like=self.node, **kwargs)


@dataclass(frozen=True)
class Rule:
    """`replacement(site, **found)` gives what takes the place of the pattern's last value; a reason to leave it, which
    is reported; or None where the pattern is no match after all.
    """

    pattern: Pattern
    replacement: Callable[..., fx.Node | str | None]


def rewrite(program: Program, graph: fx.Graph, rules: tuple[Rule, ...], report: Report) -> None:
    """Replace all that rules match in a graph, the latest value first, so that the largest match wins."""
    editor, kinds = Editor(program, graph), Kinds(graph)
    ends = [(end, rule.replacement) for rule in rules for end in _ends(rule.pattern)]
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and node.users:
            _replace(Site(program, editor, kinds, node), ends, report)


def _ends(pattern: Pattern) -> list[_Call]:
    """The calls that a pattern may end in."""
    if isinstance(pattern, _Either):
        return _ends(pattern.first) + _ends(pattern.second)
    assert isinstance(pattern, _Call)
    return [pattern]


def _replace(
    site: Site, ends: list[tuple[_Call, Callable[..., fx.Node | str | None]]], report: Report
) -> None:
    """Put the replacement of the first match in the place of a site's node."""
    node, reasons = site.node, list[str]()
    for pattern, replacement in ends:
        for found in pattern.ends(node, {}):
            with node.graph.inserting_before(node):
                new = replacement(site, **found)
            if isinstance(new, fx.Node):
                site.kinds[new] = site.kinds[node]
                before = node.all_input_nodes
                replace(node, new)
                remove_unread(before)
                report.changed += 1
                return
            reasons += [new] if new else []
    if reasons:
        report.refused.append(f"{node.name}: {reasons[0]}")


@dataclass(frozen=True)
class Rewrite(Pass):
    """A pass that is nothing but rules."""

    rules: ClassVar[tuple[Rule, ...]]

    def run(self, program: Program) -> Report:
        report = Report()
        for graph in list(program.graphs()):
            rewrite(program, graph, self.rules, report)
        if report.changed:
            Clean().run(program)
        return report
