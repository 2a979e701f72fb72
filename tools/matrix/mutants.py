"""Single changes of a source file that a test should notice, by `ast`: `mutants(source)`."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

OTHER = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.And: ast.Or, ast.Or: ast.And, ast.Lt: ast.LtE, ast.LtE: ast.Lt,
    ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
}  # fmt: skip
TURNED = {ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE}
CALLS = {
    "amax": "mean", "amin": "amax", "mean": "amax", "sum": "mean", "max": "min", "min": "max",
    "argmax": "argmin", "argmin": "argmax", "maximum": "minimum", "minimum": "maximum",
    "cumsum": "cumprod", "all": "any", "any": "all", "sqrt": "square", "square": "abs",
    "floor": "ceil", "ceil": "floor", "softmax": "log_softmax",
}  # fmt: skip
BY_AXIS = frozenset(CALLS) | {
    "cat", "stack", "gather", "unsqueeze", "squeeze", "sort", "topk", "flip", "norm", "cumsum",
    "argsort", "repeat_interleave", "scatter", "index_select", "logsumexp",
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """What is changed in a line, and the file that this makes."""

    line: int
    column: int
    kind: str
    before: str
    after: str
    source: str

    @property
    def name(self) -> str:
        return f"{self.line}:{self.column} {self.kind}"


def mutants(source: str) -> Iterator[Mutant]:
    """Every mutant of a source: another sign, operator, comparison, axis or function (`max` for `mean`), a number off
    by one, a term or a keyword dropped.

    Left out are texts, types, defaults of options, and how errors are raised, whose tests name what they say.
    """
    tree = ast.parse(source)
    for node in list(_bodies(tree)):
        for kind, new in _changes(node):
            before, after = ast.unparse(node), ast.unparse(new)
            if before != after:
                made = _replaced(source, node, after)
                yield Mutant(node.lineno, node.col_offset, kind, before, after, made)  # type: ignore[attr-defined]


def _bodies(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions of functions, in their order."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef) and child.name != "__post_init__":
            for part in child.body:
                yield from _expressions(part)
        elif isinstance(child, ast.ClassDef):
            yield from _bodies(child)


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)):
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # a docstring
    if isinstance(node, ast.expr):
        yield node
    parts = [node.value] if isinstance(node, ast.AnnAssign) else ast.iter_child_nodes(node)
    for child in parts:
        if child is not None:
            yield from _expressions(child)


def _changes(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """(what is wrong, the node that it makes)."""
    if isinstance(node, ast.BinOp):
        if (other := OTHER.get(type(node.op))) is not None:
            yield "operator", _with(node, op=other())
        if isinstance(node.op, (ast.Add, ast.Sub, ast.Mult, ast.BitAnd, ast.BitOr)):
            yield "left term alone", node.left
            yield "right term alone", node.right
    elif isinstance(node, ast.BoolOp):
        yield "operator", _with(node, op=OTHER[type(node.op)]())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not, ast.Invert)):
        if not isinstance(node.operand, ast.Constant):
            yield "sign", node.operand
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in OTHER:
        first = type(node.ops[0])
        yield "bound", _with(node, ops=[OTHER[first](), *node.ops[1:]])
        if first in TURNED:
            yield "turned", _with(node, ops=[TURNED[first](), *node.ops[1:]])
    elif isinstance(node, ast.IfExp):
        yield "first case alone", node.body
        yield "other case alone", node.orelse
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        yield from _calls(node, node.func)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield "off by one", ast.Constant(node.value + 1)


def _calls(node: ast.Call, function: ast.Attribute) -> Iterator[tuple[str, ast.expr]]:
    name = function.attr
    if name in CALLS:
        yield "function", _with(node, func=_with(function, attr=CALLS[name]))
    if name in ("clamp", "masked_fill") and _is_method(function):
        yield f"no {name}", function.value
    if name in ("transpose", "permute", "mT"):
        return
    if name in BY_AXIS:
        for word in node.keywords:
            if word.arg in ("dim", "axis") and isinstance(word.value, ast.Constant):
                other = ast.keyword(word.arg, ast.Constant(word.value.value - 1))
                yield (
                    "axis",
                    _with(node, keywords=[other if w is word else w for w in node.keywords]),
                )
    for word in node.keywords:
        dropped = isinstance(word.value, ast.Constant) and word.arg not in ("dim", "axis")
        if dropped or name in ("clamp", "clip"):
            rest = [w for w in node.keywords if w is not word]
            yield f"no {word.arg}", _with(node, keywords=rest)


def _is_method(function: ast.Attribute) -> bool:
    return not (isinstance(function.value, ast.Name) and function.value.id in ("torch", "np", "F"))


def _with(node: ast.expr, **changed: object) -> ast.expr:
    other = copy.copy(node)
    for name, value in changed.items():
        setattr(other, name, value)
    return other


def _replaced(source: str, node: ast.AST, text: str) -> str:
    """The source with another text in a node's place, in parentheses."""
    lines = source.encode().splitlines(keepends=True)  # columns are of bytes
    first, last = node.lineno - 1, node.end_lineno - 1  # type: ignore[attr-defined]
    start = sum(map(len, lines[:first])) + node.col_offset  # type: ignore[attr-defined]
    end = sum(map(len, lines[:last])) + node.end_col_offset  # type: ignore[attr-defined]
    whole = b"".join(lines)
    return (whole[:start] + b"(" + text.encode() + b")" + whole[end:]).decode()
