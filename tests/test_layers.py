"""Imports run one way, without circles, and the engine needs no torch. Read from the sources, so an uninstalled
checkout will do.
"""

import ast
from functools import cache
from pathlib import Path

import networkx as nx
import pytest
import statements

ROOT = Path(__file__).parent.parent
ORDER = ("ir", "passes", "lowering", "runtime", "api")
TORCH_BACKENDS = ("accel.runtime.backends.eager", "accel.runtime.backends.triton")
RUNTIME_NAMES = 22  # most at the top of runtime/


def sources(*folders: str) -> list[Path]:
    return [
        p for f in folders for p in sorted((ROOT / f).rglob("*.py")) if "__pycache__" not in p.parts
    ]


def layer(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def name_of(path: Path) -> str:
    """The module that a file is, as it is imported."""
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    parts = ["accel", *([] if folder == "api" else [folder]), *rest]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sources(*ORDER)}
Trees = dict[str, ast.Module]


def parsed(texts: dict[str, str]) -> Trees:
    return {name: ast.parse(text) for name, text in texts.items()}


@cache
def trees() -> Trees:
    return parsed({name: path.read_text(encoding="utf-8") for name, path in MODULES.items()})


def forget() -> None:
    """Trees of all sources take 200 MB of a worker's memory, of which it has a gigabyte."""
    trees.cache_clear()
    written.cache_clear()


@pytest.fixture(scope="module", autouse=True)
def forgotten():
    yield
    forget()


@cache
def written(tree: ast.AST) -> list[ast.Import | ast.ImportFrom]:
    """The import statements of a file, wherever in it."""
    return statements.imports(tree)


def imported(tree: ast.AST) -> set[str]:
    """Modules that a file imports, wherever in it, by full name."""
    found = set()
    for node in written(tree):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "write accel.…, not a relative import"
            found |= {str(node.module), *(f"{node.module}.{a.name}" for a in node.names)}
    return found


def upwards(tree: ast.Module, here: str) -> list[str]:
    """What a file of the layer `here` imports from above it."""
    folders = {name.split(".")[1] for name in imported(tree) if name.startswith("accel.")}
    allowed = {*ORDER[: ORDER.index(here) + 1], "recipes"}  # recipes are data
    above = {*ORDER, "compiler", "commands", "cli", "version"}
    return sorted((folders & above) - allowed)


def imports(trees: Trees) -> nx.DiGraph:
    """Module -> the modules of `trees` that it imports, wherever in it; a package only where nothing in it is meant."""
    graph = nx.DiGraph()
    for name, tree in trees.items():
        for node in written(tree):
            if isinstance(node, ast.Import):
                found = [a.name for a in node.names]
            else:
                inside = [f"{node.module}.{a.name}" for a in node.names]
                found = [one if one in trees else str(node.module) for one in inside]
            graph.add_edges_from((name, one) for one in found if one in trees and one != name)
    return graph


def circles(trees: Trees) -> list[list[str]]:
    return [sorted(c) for c in nx.strongly_connected_components(imports(trees)) if len(c) > 1]


def test_the_folders_are_there():
    assert all(len(sources(f)) > 1 for f in ORDER)


@pytest.mark.parametrize("here", ORDER[:-1])  # the front door may import all
def test_imports_run_one_way(here):
    for name, path in MODULES.items():
        if layer(path) != here:
            continue
        wrong = upwards(trees()[name], here)
        assert not wrong, (
            f"{path}: {here}/ may not import {', '.join(wrong)}: move the code down, or pass the value in"
        )
        assert "accel" not in imported(trees()[name]), f"{path}: may not import the front door"


def test_an_import_upwards_is_seen():
    for text, here, found in (
        ("from accel.runtime.session.session import Session", "ir", ["runtime"]),
        ("def f():\n    import accel.lowering.onnx.export", "passes", ["lowering"]),
        ("from accel import runtime", "lowering", ["runtime"]),
        ("from accel.compiler.optimize import optimize", "runtime", ["compiler"]),
        ("from accel.ir.ops.op import Op\nimport torch", "passes", []),
    ):
        assert upwards(ast.parse(text), here) == found


def test_no_module_is_in_a_circle():
    found = circles(trees())
    assert not found, (
        f"these import one another: {found}; pass a value in, or move what both need below both"
    )


def folders(graph: nx.DiGraph) -> nx.DiGraph:
    """Folder -> the folders of which it imports modules."""
    found = nx.DiGraph()
    for a, b in graph.edges:
        here, there = (MODULES[one].parent.relative_to(ROOT).as_posix() for one in (a, b))
        if here != there:
            found.add_edge(here, there)
    return found


def test_no_folder_is_in_a_circle():
    graph = folders(imports(trees()))
    found = [sorted(c) for c in nx.strongly_connected_components(graph) if len(c) > 1]
    assert graph.number_of_edges() > 100
    assert not found, f"these folders import one another: {found}"


def test_a_circle_of_folders_is_seen():
    texts = {
        "accel.ir.program": "import accel.passes.check",
        "accel.passes.calibrate": "import accel.ir.spec",
    }
    names = {**texts, "accel.passes.check": "", "accel.ir.spec": ""}
    assert sorted(folders(imports(parsed(names))).edges) == [("ir", "passes"), ("passes", "ir")]


def test_a_circle_is_seen():
    texts = {"accel.a": "import accel.b", "accel.b": "def f():\n    from accel.a import x"}
    assert circles(parsed(texts)) == [["accel.a", "accel.b"]]
    assert not circles(parsed({"accel.a": "import accel.b", "accel.b": "import torch"}))


def reaching_torch(trees: Trees) -> set[str]:
    """Modules that import torch, or a module of `trees` that does, when they are imported."""
    direct = nx.DiGraph()
    for name, tree in trees.items():
        for node in tree.body:  # not in functions
            if isinstance(node, ast.Import | ast.ImportFrom):
                found = imported(node)
                direct.add_edges_from((name, one) for one in found if one in trees)
                if any(one.split(".")[0] == "torch" for one in found):
                    direct.add_edge(name, "torch")
    return nx.ancestors(direct, "torch") if "torch" in direct else set()


def test_the_engine_needs_no_torch():
    wrong = {
        n
        for n in reaching_torch(trees())
        if n.startswith("accel.runtime") and not n.startswith(TORCH_BACKENDS)
    }
    assert not wrong, (
        f"{sorted(wrong)} need torch when they are imported: what needs it goes to api/compiler/"
    )
    named = {
        n
        for n, tree in trees().items()
        if n.startswith("accel.runtime")
        and not n.startswith(TORCH_BACKENDS)
        and any(one.split(".")[0] == "torch" for one in imported(tree))
    }
    assert not named, f"{sorted(named)} import torch: what needs it goes to api/compiler/"


def test_torch_is_seen_through_other_modules():
    texts = {
        "accel.a": "from accel.b import x",
        "accel.b": "import torch.nn",
        "accel.c": "def f():\n    import torch",
    }
    assert reaching_torch(parsed(texts)) == {"accel.a", "accel.b"}


def test_the_runtime_is_a_page_of_names():
    names = [p.name for p in (ROOT / "runtime").iterdir() if not p.name.startswith("__pycache__")]
    assert len(names) <= RUNTIME_NAMES, f"runtime/ holds {len(names)} names: {sorted(names)}"


def test_every_file_says_what_it_is():
    silent = [
        MODULES[n] for n, tree in trees().items() if tree.body and not ast.get_docstring(tree)
    ]
    assert not silent, f"{silent} have no docstring"


def test_one_file_spells_how_outputs_name_state():
    there = [
        p.relative_to(ROOT) for p in sources(*ORDER, "tools") if '.next"' in p.read_text("utf-8")
    ]
    assert there == [Path("ir/state.py")], "use output_of and state_of of accel.ir.state"
