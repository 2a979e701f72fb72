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


Class = tuple[list[str], set[str]]  # the classes that it is made of, and its own public members
MEMBERS = 16


def classes(found: dict[str, ast.Module]) -> dict[str, Class]:
    """Those at the top of modules, by full name."""
    made: dict[str, Class] = {}
    for module, tree in found.items():
        known = {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        for node in (n for n in tree.body if isinstance(n, ast.ClassDef)):
            bases = [ast.unparse(base).split("[")[0] for base in node.bases]
            own = {member for child in node.body for member in members(child)}
            full = [known.get(base, f"{module}.{base}") for base in bases]
            made[f"{module}.{node.name}"] = full, {m for m in own if not m.startswith("_")}
    return made


def members(node: ast.stmt) -> list[str]:
    """Methods, and attributes that are more than the field of a value."""
    if isinstance(node, Function):
        return [node.name]
    if isinstance(node, ast.AnnAssign) and "ClassVar" in ast.unparse(node.annotation):
        return [ast.unparse(node.target)]
    return [ast.unparse(one) for one in node.targets] if isinstance(node, ast.Assign) else []


def wide_interfaces(made: dict[str, Class]) -> dict[str, list[str]]:
    """Classes of more than MEMBERS members, with those that one class alone has of its own."""
    below: dict[str, set[str]] = {}
    for name in made:
        above = [name]
        while above:
            for base in made.get(above.pop(), ([], set()))[0]:
                below.setdefault(base, set()).add(name)
                above.append(base)
    found = {}
    for name, (_, own) in made.items():
        users = below.get(name, set())
        once = [m for m in sorted(own) if sum(m in made[user][1] for user in users) == 1]
        if len(own) > MEMBERS and len(users) > 1 and once:
            found[name] = once
    return found


def test_no_wide_interface_has_a_member_of_one_class():
    """Such a member lives in the class."""
    assert not wide_interfaces(classes(trees()))


def test_a_member_of_one_class_is_found():
    hooks = "\n".join(f"    def f{i}(self): pass" for i in range(MEMBERS + 1))
    text = f"class A:\n{hooks}\nclass B(A):\n    def f0(self): pass\nclass C(A):\n    def g(self): pass"
    assert wide_interfaces(classes({"m": ast.parse(text)})) == {"m.A": ["f0"]}
    both = text + "\n    def f0(self): pass"
    assert not wide_interfaces(classes({"m": ast.parse(both)}))
