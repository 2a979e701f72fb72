"""The table of papers: what recipes and methods say of themselves, and where tests and figures name them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from accel.compiler.assemble import GRADES, assemble
from accel.compiler.explain.words import docstrings
from accel.ir.axis import find_axes
from accel.ir.recipe import Recipe, bundled

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs" / "figures"
_PROSE = re.compile(r'""".*?"""|(?m:^\s*#.*?$)|(?m:  # .*?$)', re.S)  # of a test file
_NAME = re.compile(r'"([a-z][\w.-]*)"')
_IMPORT = re.compile(r"^\s*from (accel[\w.]*) import (\([^)]*\)|[^\n(]*)", re.M)
_CITED = re.compile(r"([^.;:()]*?)[,( ]+arXiv:(\d{4}\.\d{4,5})")
_ROW = re.compile(r"^\| `?([a-z][a-z0-9-]*)[@`, ]", re.M)  # a table's row of a recipe
_MOST = 3  # tests and figures that a cell names

INTRO = """# Papers

Generated from the recipe files (`papers`), the docstrings of their methods (arXiv numbers), what each method declares
(`grade`, `lacks`), and the tests and figures that name it. {count} papers: {works} work, {partly} partly, where `lacks`
says what is missing.

- **Grade**: how the output compares with the model's own; see [grades](../concepts/capabilities.md#grades).
- **Evidence**: *law*: tests that run over all methods of the axis; *own*: tests that name the method or its recipe;
  *figures*: pages with a row of the recipe. `tests/test_papers.py` fails where no test names a paper.
- A paper without a recipe or a method is not here. What a recipe is refused with stands on its own page; which models
  refuse it, `accel-compile explain` says.

| paper | recipe or method | grade | state | evidence |
|---|---|---|---|---|
"""


@dataclass
class Paper:
    """One row. methods: (axis, name) of those that cite it; recipes: those that claim it."""

    title: str
    arxiv: str = ""
    methods: list[tuple[str, str]] = field(default_factory=list)
    recipes: list[str] = field(default_factory=list)

    @property
    def lacks(self) -> list[str]:
        """What its methods say that they do not do of it."""
        axes = find_axes()
        return list(filter(None, (axes[axis].method(name).lacks for axis, name in self.methods)))


def papers() -> list[Paper]:
    """All that a recipe claims or a method cites, by title. One without a number on arXiv is cited by its title."""
    found: dict[str, Paper] = {}
    for name in bundled():
        recipe = Recipe.load(name)
        for title in recipe.papers:
            arxiv = recipe.arxiv.get(title, "")
            paper = found.setdefault(arxiv or title, Paper(title, arxiv))
            paper.recipes.append(name)
    for axis, one in find_axes().items():
        for name in one.names():
            told = " ".join(docstrings(one.method(name)).split())
            for short, arxiv in _CITED.findall(told):
                paper = found.setdefault(arxiv, Paper(short.strip(), arxiv))
                if not paper.recipes:
                    paper.title = min(paper.title, short.strip(), key=len)
            for key, paper in found.items():
                if (paper.arxiv or key).casefold() in told.casefold():
                    paper.methods.append((axis, name))
    return sorted(found.values(), key=lambda paper: paper.title.casefold())


@dataclass(frozen=True)
class Tests:
    """What the test files name. words: file -> its strings that may be names; imported: file -> the modules that it
    imports; laws: files that run over the names of an axis.
    """

    words: Mapping[str, frozenset[str]]
    imported: Mapping[str, frozenset[str]]
    laws: frozenset[str]

    def own(self, paper: Paper) -> list[str]:
        """Files that are called after a method or a recipe of the paper, import the method, or name it: by its recipe,
        or by its name beside that of its axis. The likeliest first.
        """
        names = {*paper.recipes, *(name for _, name in paper.methods)}
        called = {f"test_{name.replace('-', '_')}.py" for name in names}
        modules = {find_axes()[a].method(n).__module__ for a, n in paper.methods}

        def rank(file: str) -> int:
            words = self.words[file]
            marks = (
                Path(file).name in called,
                modules & self.imported[file],
                words & set(paper.recipes) or any({*one} <= words for one in paper.methods),
            )
            return next((n for n, mark in enumerate(marks) if mark), len(marks))

        ranks = {file: rank(file) for file in self.words}
        every = {one for axis in find_axes().values() for one in axis.names()} | set(bundled())

        def order(file: str) -> tuple[int, int, str]:
            """The fewer others it names, the more it is about this one."""
            return ranks[file], len(self.words[file] & every), file

        return sorted((file for file, n in ranks.items() if n < 3), key=order)

    def law(self, paper: Paper) -> list[str]:
        """Laws of the axes of its methods: files that are called after the axis and run over its names."""
        stems = {f"test_{axis.replace('.', '_')}" for axis, _ in paper.methods}
        return [file for file in sorted(self.laws) if Path(file).stem in stems]


def read_tests(texts: Mapping[str, str]) -> Tests:
    """file, from the root of the repository -> its text. What stands in comments and docstrings names nothing."""
    code = {file: _PROSE.sub("", text) for file, text in texts.items()}
    return Tests(
        {file: frozenset(_NAME.findall(text)) for file, text in code.items()},
        {file: frozenset(_imported(text)) for file, text in code.items()},
        frozenset(f for f, t in code.items() if ".names()" in t and Path(f).parent.name == "laws"),
    )


def _imported(text: str) -> Iterable[str]:
    for module, names in _IMPORT.findall(text):
        yield module
        yield from (f"{module}.{name}" for name in re.findall(r"\w+", names))


@cache
def tests() -> Tests:
    """Those of the repository."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return read_tests(
        {f.relative_to(ROOT).as_posix(): f.read_text(encoding="utf-8") for f in files}
    )


@cache
def figures() -> dict[str, frozenset[str]]:
    """Page of figures -> the recipes that have a row in it."""
    return {
        page.relative_to(FIGURES).as_posix(): frozenset(_ROW.findall(page.read_text("utf-8")))
        for page in sorted(FIGURES.rglob("*.md"))
    }


def page() -> str:
    """The page, as Markdown."""
    rows = _all()
    partly = sum(bool(paper.lacks) for paper in rows)
    lines = [INTRO.format(count=len(rows), works=len(rows) - partly, partly=partly)]
    return "".join([*lines, *(_row(paper) for paper in rows)])


def linked(title: str, arxiv: str) -> str:
    """A title, with a link where the paper is on arXiv."""
    return f"{title} ([arXiv:{arxiv}](https://arxiv.org/abs/{arxiv}))" if arxiv else title


def _row(paper: Paper) -> str:
    named = [f"[`{name}`](#recipe-{name})" for name in paper.recipes]
    named += [f"`{axis} = {name}`" for axis, name in paper.methods if not paper.recipes]
    state = f"partly: without {'; '.join(paper.lacks)}" if paper.lacks else "works"
    cells = [
        linked(paper.title, paper.arxiv),
        ", ".join(named),
        _grade(paper),
        state,
        evidence(paper),
    ]
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |\n"


def _grade(paper: Paper) -> str:
    """Those of its recipes, the best first; without one, of its methods."""
    found: set[str] = {assemble(Recipe.load(name)).grade for name in paper.recipes}
    if not found:
        methods: list[Any] = [find_axes()[a].build(n) for a, n in paper.methods]
        found = {getattr(method, "grade", GRADES[0]) for method in methods}
    return ", ".join(sorted(found, key=GRADES.index))


@cache
def _all() -> list[Paper]:
    return papers()


def evidence_of(name: str) -> str:
    """What holds a recipe to its papers; without one, or where no method of it cites one, to what its methods are."""
    tables = {(axis, table["use"]) for axis, table in Recipe.load(name).tables.items()}
    cited = {one for paper in _all() if name in paper.recipes for one in paper.methods}
    return evidence(Paper("", methods=sorted(tables & cited or tables), recipes=[name]))


def evidence(paper: Paper) -> str:
    """Laws, tests of its own and figures, in a line; "none" where there is nothing."""
    law = tests().law(paper)
    shown = {"law": law, "own": [file for file in tests().own(paper) if file not in law]}
    parts = [
        f"{kind}: " + ", ".join(f"`{file}`" for file in files[:_MOST])
        for kind, files in shown.items()
        if files
    ]
    pages = [name for name, named in figures().items() if named & set(paper.recipes)]
    pages = sorted(pages, key=lambda name: ("/" in name, name))[:_MOST]  # generated tables first
    if pages:
        parts.append("figures: " + ", ".join(f"[{Path(p).stem}](../figures/{p})" for p in pages))
    return "; ".join(parts) or "none"
