"""Start a method: its file, its recipe and its test, made like those of a method that is there.

    python tools/new.py AXIS NAME [--like METHOD]

The file is a copy of METHOD's (by default the axis' shortest), under the new name: a method that works from
the first minute, to be changed. No other file changes; the axis' law tests find it by themselves.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from accel.ir.axis import Axis, find_axes
from accel.ir.errors import RecipeError, unknown

ROOT = Path(__file__).parents[1]
SPECULATION = (
    "draft",
    "length",
    "schedule",
    "tree",
    "verify",
)  # axes whose recipes lie in one folder
RECIPE = """about = "What it does, in one line: this is what `accel-compile recipes` shows"
papers = []

[{axis}]
use = "{name}"
"""
TEST = '''"""{title}: what it must hold beyond the laws of its axis."""

import matrix


def test_onnx_equals_the_oracle():
    case = matrix.Case("llama", (("{axis}", "{name}"),))
    outcome = matrix.Matrix().run(case)
    assert outcome.kind == "equal", outcome.why
'''
HOST_TEST = '''"""{title}: what it must hold beyond the laws of its axis."""

from accel.ir.axis import find_axes


def test_options_are_as_the_paper_says():
    found = find_axes()["{axis}"].build("{name}")
    assert vars(found) == {{}}, "write down each default, with the paper's place"
'''


def files_of(axis: Axis, name: str, like: str) -> dict[Path, str]:
    """Path -> text of everything that a new method needs."""
    folder = Path(importlib.import_module(axis.package).__path__[0]).resolve()
    stem, old = name.replace("-", "_"), axis.method(like)
    text = (folder / f"{like.replace('-', '_')}.py").read_text(encoding="utf-8")
    title = "".join(part.capitalize() for part in stem.split("_"))
    first = text.index('"""', 3)
    text = f'"""{title} (paper): what it does, in a sentence or two.' + text[first:]
    family = "speculation" if axis.name in SPECULATION else axis.name.partition(".")[0]
    graph = axis.package.startswith("accel.passes")
    return {
        folder / f"{stem}.py": text.replace(old.__name__, title),
        ROOT / "recipes" / family / f"{name}.toml": RECIPE.format(axis=axis.name, name=name),
        ROOT / "tests" / f"test_{stem}.py": (
            TEST if graph or axis.name.startswith("kv.") else HOST_TEST
        ).format(axis=axis.name, name=name, title=title),
    }


def shortest(axis: Axis) -> str:
    """The method whose file is the smallest."""
    folder = Path(importlib.import_module(axis.package).__path__[0])
    return min(axis.names(), key=lambda n: (folder / f"{n.replace('-', '_')}.py").stat().st_size)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("axis", help="as recipes name it: kv.score, kv.codec, depth, …")
    parser.add_argument("name", help="of the method, as recipes will name it: my-method")
    parser.add_argument("--like", metavar="METHOD", help="the method to start from")
    given = parser.parse_args()
    axes = find_axes()
    try:
        if given.axis not in axes:
            raise RecipeError(unknown("axis", given.axis, axes))
        axis = axes[given.axis]
        if not given.name.replace("-", "_").isidentifier() or given.name != given.name.lower():
            raise RecipeError(f"'{given.name}' is no name of a method; give one like my-method")
        made = files_of(axis, given.name, given.like or shortest(axis))
        if there := [path for path in made if path.exists()]:
            raise RecipeError(f"{there[0].relative_to(ROOT)} is there already; give another name")
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for path, text in made.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
