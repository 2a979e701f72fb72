"""Functions that a model completes: their heads, where one ends in what was written, and whether it is Python."""

from __future__ import annotations

import ast


def heads(source: str) -> list[str]:
    """The first lines of each function of a module, indented as they are, up to where its body begins; a docstring is
    part of them, the last newline is not: a token may hold it and the spaces after it.
    """
    lines, found = source.splitlines(keepends=True), []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            first = node.body[0]
            told = ast.get_docstring(node) is not None
            end = first.end_lineno if told else first.lineno - 1
            if end is not None and end >= node.lineno:  # else it stands in one line
                found.append("".join(lines[node.lineno - 1 : end]).rstrip("\n"))
    return found


def body(head: str, text: str) -> str:
    """The lines that belong to a function, of what was written after its head: those that are indented further. The
    last one may be cut off, and is left out.
    """
    lines = text.splitlines(keepends=True)
    for at, line in enumerate(lines):
        if line.strip() and _indent(line) <= _indent(head):
            return "".join(lines[:at]).rstrip() + "\n"
    return "".join(line for line in lines if line.endswith("\n")).rstrip() + "\n"


def completes(head: str, text: str) -> bool:
    """Whether a text makes a function of a head: it has a body, and both are Python."""
    written = body(head, text)
    around = "if True:\n" if _indent(head) else ""
    try:
        ast.parse(around + head + written)
    except (SyntaxError, ValueError):  # a null byte
        return False
    return bool(written.strip())


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
