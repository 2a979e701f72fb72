"""Functions that a screen shows whole, and signatures that a call can be read by."""

import ast
import re

import pytest

from .test_layers import MODULES, trees

LINES, PARAMETERS = 80, 12
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST) -> list[Function]:
    """All but kernels, whose parameters and lines are those of a device."""
    found = [node for node in ast.walk(tree) if isinstance(node, Function)]
    return [f for f in found if not any("jit" in ast.unparse(d) for d in f.decorator_list)]


def parameters(function: Function) -> list[str]:
    given = function.args
    names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def documented(function: Function, names: list[str]) -> bool:
    """Whether its docstring says of each parameter what it is: a front door's signature is read there."""
    text = ast.get_docstring(function) or ""
    return "Args:" in text and all(re.search(rf"\b{name}\b.*:", text) for name in names)


def long(tree: ast.AST) -> list[str]:
    return [f.name for f in functions(tree) if (f.end_lineno or f.lineno) - f.lineno + 1 > LINES]


def wide(tree: ast.AST) -> list[str]:
    return [
        f.name
        for f in functions(tree)
        if len(names := parameters(f)) > PARAMETERS and not documented(f, names)
    ]


@pytest.mark.parametrize("measure", [long, wide])
def test_functions_are_read_at_a_glance(measure):
    """What a graph hands to kernels, operand by operand, is in lowering/triton."""
    found = {}
    for name in MODULES:
        if name.startswith("accel.lowering.triton") and measure is wide:
            continue
        if over := measure(trees()[name]):
            found[name] = over
    assert not found


def test_what_is_long_or_wide_is_found():
    body = "\n".join("    x = 1" for _ in range(LINES))
    assert long(ast.parse(f"def f():\n{body}")) == ["f"]
    assert not long(ast.parse(f"@triton.jit\ndef f():\n{body}"))
    names = [f"a{i}" for i in range(PARAMETERS + 1)]
    assert wide(ast.parse(f"def f({', '.join(names)}): pass")) == ["f"]
    assert not wide(ast.parse(f"class A:\n    def f(self, {', '.join(names[1:])}): pass"))
    told = "\n".join(f"        {name}: what it is" for name in names)
    assert not wide(ast.parse(f'def f({", ".join(names)}):\n    """Args:\n{told}\n    """'))
