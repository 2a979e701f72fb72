"""Imports run one way, files stay short. Read from the sources, so an uninstalled checkout will do."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ORDER = ("ir", "passes", "lowering", "runtime", "api")
CEILING = 400


def sources(*folders: str) -> list[Path]:
    return [
        p for f in folders for p in sorted((ROOT / f).rglob("*.py")) if "__pycache__" not in p.parts
    ]


def layer(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def imported(tree: ast.AST) -> set[str]:
    """Modules that a file imports, wherever in it, by full name."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "write accel.…, not a relative import"
            found |= {str(node.module), *(f"{node.module}.{a.name}" for a in node.names)}
    return found


def upwards(text: str, here: str) -> list[str]:
    """What a file of the layer `here` imports from above it."""
    folders = {
        name.split(".")[1] for name in imported(ast.parse(text)) if name.startswith("accel.")
    }
    allowed = {*ORDER[: ORDER.index(here) + 1], "recipes"}  # recipes are data
    return sorted((folders & set(ORDER)) - allowed)


def test_the_folders_are_there():
    assert all(len(sources(f)) > 1 for f in ORDER)


@pytest.mark.parametrize("path", sources(*ORDER), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_one_way(path):
    here = layer(path)
    if here == "api":  # the front door may import all
        return
    wrong = upwards(path.read_text(encoding="utf-8"), here)
    assert not wrong, (
        f"{here}/ may not import {', '.join(wrong)}: move the code down, or pass the value in"
    )
    front = [n for n in imported(ast.parse(path.read_text(encoding="utf-8"))) if n == "accel"]
    assert not front, f"{here}/ may not import the front door"


def test_an_import_upwards_is_seen():
    assert upwards("from accel.runtime.session import Session", "ir") == ["runtime"]
    assert upwards("def f():\n    import accel.lowering.onnx.export", "passes") == ["lowering"]
    assert upwards("from accel import runtime", "lowering") == ["runtime"]
    assert upwards("from accel.ir.op import Op\nimport torch", "passes") == []


@pytest.mark.parametrize("folder", [*ORDER, "recipes", "tests", "tools"])
def test_files_stay_short(folder):
    long = {
        str(p.relative_to(ROOT)): n
        for p in sources(folder)
        if (n := len(p.read_text(encoding="utf-8").splitlines())) > CEILING
    }
    assert not long, f"more than {CEILING} lines; cut it at a joint: {long}"


@pytest.mark.parametrize("path", sources(*ORDER), ids=lambda p: str(p.relative_to(ROOT)))
def test_every_file_says_what_it_is(path):
    text = path.read_text(encoding="utf-8")
    assert not text.strip() or ast.get_docstring(ast.parse(text)), f"{path.name} has no docstring"
