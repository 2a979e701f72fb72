"""Start a method: its file, its recipe and its test.

    python tools/new.py AXIS NAME [--like METHOD]

The file is made of the axis' `_template.py`: a method that builds and holds the laws of its axis from the first
minute, to be changed; its options are printed with their ranges. The test fails until what the paper claims is written
there. No other file changes.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections import Counter
from dataclasses import fields
from pathlib import Path

from accel.ir.axis import Axis, find_axes, ranges
from accel.ir.errors import RecipeError, unknown
from accel.ir.recipe import Recipe

ROOT = Path(__file__).resolve().parents[1]
HOST = ("draft", "length", "loop", "tree", "verify")  # `matrix_loops.py` compares their tokens
SERVING = ("schedule",)  # an engine's: nothing of a build or of one request
TEMPLATE = "_template"
BUILT = {
    "matrix": """import matrix
import pytest


def test_onnx_equals_the_oracle():
    case = matrix.Case("llama", (("{axis}", "{name}"),))
    outcome = matrix.Matrix().run(case)
    assert outcome.kind == "equal", outcome.why


""",
    "matrix_loops": """import matrix
import matrix_loops
import pytest


def test_tokens_are_those_of_plain_decoding():
    case = matrix.Case("llama", (("{axis}", "{name}"),))
    outcome = matrix_loops.Loops().run(case)
    assert outcome.kind == "equal", outcome.why


""",
    "": "import pytest\n\n\n",
}
CLAIM = '''def test_what_the_paper_claims():
    """Name the section; say which wrong version this fails for."""
    pytest.fail("write what {name} must hold beyond the laws of its axis")
'''


def group_of(axis: Axis, like: str = "") -> Path:
    """The folder of recipes that has most with this axis, or with the method `like` of it; for a loop, those of models
    that are not diffusion's.
    """
    having = Counter(
        path.parent
        for path in sorted((ROOT / "recipes").glob("*/[!_]*.toml"))
        if (table := Recipe.load(path).tables.get(axis.name)) is not None
        and (table["use"] == like if like else path.parent.name != "diffusion")
    )
    return max(
        having, key=having.__getitem__, default=ROOT / "recipes" / axis.name.partition(".")[0]
    )


def files_of(axis: Axis, name: str, like: str = "") -> dict[Path, str]:
    """Path -> text of all that a new method needs; its recipe and test are of the kind of the method `like`. Raises
    RecipeError where there is none such, or the axis is of another checkout.
    """
    kind = axis.method(like) if like else None
    folder = Path(importlib.import_module(axis.package).__path__[0]).resolve()
    if not folder.is_relative_to(ROOT):
        raise RecipeError(
            f"{axis.name} is imported from {folder}, outside of {ROOT}; run tools/new.py of that checkout, or install "
            "this one (make install)"
        )
    stem = name.replace("-", "_")
    title = "".join(part.capitalize() for part in stem.split("_"))

    def filled(path: Path) -> str:
        text = path.read_text(encoding="utf-8").replace("Template", title)
        return text.replace("template", name)

    made = {folder / f"{stem}.py": filled(folder / f"{TEMPLATE}.py")}
    if (recipe := folder / f"{TEMPLATE}.toml").exists():
        made[group_of(axis, like) / f"{name}.toml"] = filled(recipe)
    reference = ROOT / "tests" / "references" / axis.name / f"{TEMPLATE}.py"
    if reference.exists():
        made[reference.with_name(f"{stem}.py")] = filled(reference)
    built = "matrix_loops" if axis.name in HOST else "matrix" if recipe.exists() else ""
    other = getattr(kind, "searches", False) or getattr(kind, "masked_diffusion", False)
    built = "" if axis.name in SERVING or other else built  # its tokens are not plain decoding's
    head = f'"""{title}: what it must hold beyond the laws of its axis."""\n\n'
    test = head + (BUILT[built] + CLAIM).format(axis=axis.name, name=name)
    return {**made, ROOT / "tests" / folder.relative_to(ROOT) / f"test_{stem}.py": test}


def options_of(axis: Axis) -> list[str]:
    """The options of the axis' template, each with its default and range, to be changed."""
    method = importlib.import_module(f"{axis.package}.{TEMPLATE}").Template
    allowed = ranges(method)
    told = {f.name: f"{f.name}: {f.type} = {f.default!r}" for f in fields(method) if f.init}
    return [text + (f", {allowed[name]}" if allowed[name] else "") for name, text in told.items()]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("axis", help="as recipes name it: kv.score, kv.codec, depth, …")
    parser.add_argument("name", help="of the method, as recipes will name it: my-method")
    parser.add_argument(
        "--like",
        default="",
        metavar="METHOD",
        help="a method of the axis: the recipe goes where its recipes are, and the test is of its kind (a search's is "
        "not compared with plain decoding)",
    )
    given = parser.parse_args()
    axes = find_axes()
    try:
        if given.axis not in axes:
            raise RecipeError(unknown("axis", given.axis, axes))
        if not given.name.replace("-", "_").isidentifier() or given.name != given.name.lower():
            raise RecipeError(f"'{given.name}' is no name of a method; give one like my-method")
        made = files_of(axes[given.axis], given.name, given.like)
        if there := [path for path in made if path.exists()]:
            raise RecipeError(f"{there[0].relative_to(ROOT)} is there already; give another name")
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for path, text in made.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))
    for option in options_of(axes[given.axis]):
        print(f"  {option}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
