"""Start a method: its file, its recipe and its test.

    python tools/new.py AXIS NAME [--like METHOD]

The file is made of the axis' `_template.py`: a method that builds and holds the laws of its axis from the first
minute, to be changed; its options are printed with their ranges, and the commands that test it. The test fails until
what the paper claims is written there. No other file changes.

With --like, the recipe lies beside that method's, and the file is made of the template for methods of that folder, if
there is one: `loop NAME --like beam-patience` starts a search, `--like dllm-lowconf` masked diffusion.
"""

from __future__ import annotations

import argparse
import importlib
import keyword
import re
import sys
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

from accel.ir.axis import Axis, find_axes, ranges
from accel.ir.errors import RecipeError, unknown
from accel.ir.recipe import Recipe, bundled

ROOT = Path(__file__).resolve().parents[1]
HOST = (
    "canvas",
    "draft",
    "length",
    "loop",
    "tree",
    "verify",
)  # `matrix_loops.py` compares their tokens
SERVING = ("schedule",)  # an engine's: nothing of a build or of one request
TEMPLATE = "_template"
NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
BUILT = {
    "matrix": """@pytest.mark.long
def test_onnx_equals_the_oracle():
    case = matrix.Case("llama", (("{axis}", "{name}"),))
    outcome = matrix.Matrix().run(case)
    assert outcome.kind == "equal", outcome.why


""",
    "matrix_loops": """@pytest.mark.long
def test_tokens_are_those_of_{other}():
    case = matrix.Case("llama", (("{axis}", "{name}"),))
    outcome = matrix_loops.Loops().run(case)
    assert outcome.kind == "equal", outcome.why


""",
    "": "",
}
IMPORTS = {
    "matrix": "import matrix\n",
    "matrix_loops": "import matrix\nimport matrix_loops\n",
    "": "",
}
CLAIM = '''def test_what_the_paper_claims():
    """Name the section; say which wrong version this fails for."""
    method = {title}()  # call it on numbers whose result is known
    pytest.fail(f"write what {{method.full_name}} must hold beyond the laws of its axis")
'''


def group_of(axis: Axis, like: str = "") -> Path:
    """The folder of recipes that has most with this axis, or with the method `like` of it; for a loop, those of models
    that are not diffusion's.
    """
    having = Counter(
        path.parent
        for path in sorted((ROOT / "recipes").glob("*/[!_]*.toml"))
        if (table := Recipe.load(path).tables.get(axis.name)) is not None
        and (
            table["use"] == like if like else path.parent.name != "diffusion" or axis.name != "loop"
        )
    )
    return max(
        having, key=having.__getitem__, default=ROOT / "recipes" / axis.name.partition(".")[0]
    )


def template_of(axis: Axis, like: str = "") -> str:
    """The module of the axis that a method is made of: that for methods whose recipes lie where those of `like` do, if
    there is one. Raises RecipeError where there is no method `like`.
    """
    if like:
        axis.method(like)
        own = f"{TEMPLATE}_{group_of(axis, like).name}"
        if (Path(importlib.import_module(axis.package).__path__[0]) / f"{own}.py").exists():
            return own
    return TEMPLATE


def check_name(name: str) -> None:
    """Raise RecipeError where no method of any axis can have this name."""
    if not NAME.fullmatch(name):
        raise RecipeError(
            f"'{name}' is no name of a method; give lower-case letters, digits and dashes, like my-method"
        )
    if keyword.iskeyword(name):
        raise RecipeError(f"'{name}' is a word of Python, which cannot name a module; give another")


def files_of(axis: Axis, name: str, like: str = "") -> dict[Path, str]:
    """Path -> text of all that a new method needs; its file, its recipe and its test are of the kind of the method
    `like`. Raises RecipeError where there is none such, or the axis is of another checkout.
    """
    template = template_of(axis, like)
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
        return text.replace(".template import", f".{stem} import").replace("template", name)

    made = {folder / f"{stem}.py": filled(folder / f"{template}.py")}
    if (recipe := folder / f"{TEMPLATE}.toml").exists():
        made[group_of(axis, like) / f"{name}.toml"] = filled(recipe)
    path = ROOT / "tests" / folder.relative_to(ROOT) / f"test_{stem}.py"
    if (own := path.with_name(f"{template}.py")).exists():
        return {**made, path: filled(own)}
    kind = class_of(axis, template)
    built = "matrix_loops" if axis.name in HOST else "matrix" if recipe.exists() else ""
    if axis.name in SERVING or getattr(kind, "masked_diffusion", False):
        built = ""  # no tokens of plain decoding, nor an oracle's
    other = "the_eager_target" if getattr(kind, "searches", False) else "plain_decoding"
    test = f'"""{title}: what it must hold beyond the laws of its axis."""\n\n{IMPORTS[built]}import pytest\n\n'
    test += f"from {axis.package}.{stem} import {title}\n\n\n"
    test += (BUILT[built] + CLAIM).format(axis=axis.name, name=name, title=title, other=other)
    return {**made, path: test}


def class_of(axis: Axis, template: str) -> Any:
    """The method of a template."""
    return importlib.import_module(f"{axis.package}.{template}").Template


def options_of(axis: Axis, like: str = "") -> list[str]:
    """The options of the template, each with its default and range, to be changed."""
    method = class_of(axis, template_of(axis, like))
    allowed = ranges(method)
    told = {
        f.name: f"{f.name}: {f.type} = {f.default!r}"
        for f in fields(method)
        if f.init and f.name not in method.by_request
    }
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
        help="a method of the axis: the recipe goes where its recipes are, and the file and the test are of its kind "
        "(beam-patience: a search)",
    )
    given = parser.parse_args()
    axes = find_axes()
    try:
        if given.axis not in axes:
            raise RecipeError(unknown("axis", given.axis, axes))
        check_name(given.name)
        made = files_of(axes[given.axis], given.name, given.like)
        if there := [path for path in made if path.exists()]:
            raise RecipeError(f"{there[0].relative_to(ROOT)} is there already; give another name")
        if given.name in bundled() and any(path.suffix == ".toml" for path in made):
            raise RecipeError(f"a recipe '{given.name}' is there already; give another name")
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for path, text in made.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))
    for option in options_of(axes[given.axis], given.like):
        print(f"  {option}")
    print("change these files, the claim in the test last, until these pass:")
    *_, test = made
    for where in (str(test.relative_to(ROOT)), f"tests -k {given.name}"):
        print(f'  .venv/bin/python -m pytest -m "" {where}')
    return 0


if __name__ == "__main__":
    sys.exit(main())
