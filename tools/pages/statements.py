"""The import statements of a file, without a look at its expressions: they hold most of a tree, and no statement."""

from __future__ import annotations

import ast

_BODIES = ("body", "orelse", "finalbody", "handlers", "cases")


def imports(tree: ast.AST) -> list[ast.Import | ast.ImportFrom]:
    """Those of a module, or of a statement, wherever in it, in no order."""
    found, todo = [], [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
        for name in _BODIES:
            inner = getattr(node, name, None)
            if isinstance(inner, list):
                todo += inner
    return found
