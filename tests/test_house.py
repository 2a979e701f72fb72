"""Functions that a screen shows whole, and signatures that a call can be read by."""

import ast
import re
from functools import cache

import pytest

from .test_layers import MODULES, forget, trees, written

LINES, PARAMETERS = 80, 12
Function = ast.FunctionDef | ast.AsyncFunctionDef


@pytest.fixture(scope="module", autouse=True)
def forgotten():
    yield
    forget()
    functions.cache_clear()


@cache
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
            for node in written(tree)
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


BARE = frozenset("found given told held own beside there one kept wanted".split())
OPERAND = re.compile(r"\bTensor\S* (\w+)")  # in an operator's schema


def operands(found: dict[str, ast.Module]) -> set[str]:
    """Those of the operators: a graph holds their names, which functions of them take over."""
    texts = [
        node.value
        for module, tree in found.items()
        if module.startswith("accel.ir.ops")
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and ") ->" in node.value
    ]
    return {name for text in texts for name in OPERAND.findall(text)}


def targets(node: ast.stmt) -> list[ast.expr]:
    """What a statement sets; not an option, whose name stands in recipes."""
    if isinstance(node, ast.AnnAssign):
        is_option = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "option"
        return [] if is_option else [node.target]
    return node.targets if isinstance(node, ast.Assign) else []


def seen_names(tree: ast.Module) -> list[str]:
    """What others see: parameters, functions and methods, what classes, `self` and the module hold."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, Function):
            given = node.args
            every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
            names += [node.name, *(each.arg for each in every if each)]
        if isinstance(node, ast.ClassDef | ast.Module):
            parts = [x for child in node.body for to in targets(child) for x in ast.walk(to)]
            names += [x.id for x in parts if isinstance(x, ast.Name)]
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names += [node.attr] if ast.unparse(node.value) == "self" else []
        if isinstance(node, ast.Module):
            aliases = [a for child in node.body for a in getattr(child, "names", []) if a]
            names += [a.asname or a.name for a in aliases if isinstance(a, ast.alias)]
    return names


def test_no_name_means_everything():
    """A noun says what a value is, and a search for it gives the places that are meant."""
    known, found = operands(trees()), {}
    for module, tree in trees().items():
        allowed = known if module.startswith(("accel.ir.ops", "accel.lowering")) else set()
        if names := sorted((BARE - allowed).intersection(seen_names(tree))):
            found[module] = names
    assert not found


@pytest.mark.parametrize(
    "text",
    [
        "def f(kept): pass",
        "def f(*, kept=1): pass",
        "def f():\n    def g(*kept): pass",
        "class A:\n    kept: int = 1",
        "class A:\n    a = kept = 1",
        "class A:\n    def kept(self): pass",
        "class A:\n    async def f(self):\n        self.a, self.kept = 1, 2",
        "kept = 1",
        "a, kept = 1, 2",
        "from a import kept",
        "from a import b as kept",
    ],
)
def test_a_name_that_means_everything_is_found(text):
    assert BARE.intersection(seen_names(ast.parse(text))) == {"kept"}


@pytest.mark.parametrize(
    "text",
    [
        "class A:\n    kept: int = option(10, least=1)",
        "def f():\n    kept = 1\n    for own in a: a.held = own",
        "class A:\n    kept_tokens = 1",
        "def f(x): return x['kept']",
    ],
)
def test_what_a_recipe_or_a_function_calls_by_itself_is_not(text):
    assert not BARE.intersection(seen_names(ast.parse(text)))


def test_the_operands_of_operators_are_read():
    assert {"beside", "beside_lse", "q", "kept_k"} <= operands(trees())
    assert not {"told", "given", "float", "str"} & operands(trees())
