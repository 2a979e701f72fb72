"""The table of papers: what recipes and methods claim stands in tests, and each number on arXiv where it belongs."""

import re

import papers
import pytest

from accel.ir.axis import find_axes
from accel.ir.recipe import Recipe, bundled

ALL = papers.papers()


@pytest.mark.parametrize("paper", ALL, ids=lambda paper: paper.arxiv or paper.title)
def test_a_paper_has_evidence(paper):
    found = papers.tests().own(paper)
    assert found, f"{paper.title}: no test names {paper.methods or paper.recipes}"
    assert all((papers.ROOT / file).is_file() for file in [*found, *papers.tests().law(paper)])


NAMED = {  # NAME: of a method of kv.select; written out, this file would name it
    "test_NAME.py": "",
    "test_any.py": 'built({"kv.select": {"use": "NAME"}})',
    "test_one.py": 'load(["NAME"])',
    "test_it.py": "from accel.passes.kv.select.NAME import It",
    "test_other.py": "from accel.passes.kv.select import (\n    NAME,\n)",
}
NOT_NAMED = {
    "test_none.py": "",
    "test_doc.py": '"""Beside "kv.select" it has "NAME"."""',
    "test_note.py": 'load("base")  # as "NAME"\n    # or "NAME"\n',
    "test_half.py": 'built({"kv.select": {"use": "NAMEs"}})',
    "test_another.py": "from accel.passes.kv.select.NAMEs import It",
}


def of(name: str, texts: dict[str, str]) -> dict[str, str]:
    return {file.replace("NAME", name): text.replace("NAME", name) for file, text in texts.items()}


def test_a_paper_without_evidence_is_seen():
    """The control: what names a method, and what only seems to."""
    name, paper = next(
        (name, p)
        for p in ALL
        for axis, name in p.methods
        if axis == "kv.select" and name in p.recipes and name.isalpha()
    )
    for file, text in of(name, NAMED).items():
        assert papers.read_tests({file: text}).own(paper) == [file]
    assert papers.read_tests(of(name, NOT_NAMED)).own(paper) == []
    assert papers.tests().own(papers.Paper("A Paper That Nobody Tests", recipes=["NAME"])) == []


def test_a_law_of_an_axis_runs_over_its_methods():
    paper = papers.Paper("", methods=[("kv.select", "")])
    texts = {
        "laws/test_kv_select.py": "for name in AXIS.names(): pass",
        "laws/test_kv_keep.py": "for name in AXIS.names(): pass",
        "test_kv_select.py": "for name in AXIS.names(): pass",
    }
    assert papers.read_tests(texts).law(paper) == ["laws/test_kv_select.py"]
    assert papers.read_tests({"laws/test_kv_select.py": "NAMES = []"}).law(paper) == []


def test_a_recipe_and_its_method_name_the_same_paper():
    """A number that no method cites is of a recipe whose methods are of other papers."""
    axes = find_axes()
    for paper in ALL:
        assert paper.methods or paper.recipes
        for name in paper.recipes if not paper.methods else ():
            tables = Recipe.load(name).tables
            cited = [
                p.title for p in ALL for axis, t in tables.items() if (axis, t["use"]) in p.methods
            ]
            assert len(tables) > 1 and cited, f"{name}: no method of it cites {paper.title}"
    cites = {key for paper in ALL for key in paper.methods}
    assert len(cites) > 100 and all(name in axes[axis].names() for axis, name in cites)


def test_a_paper_is_written_one_way():
    """One title for a number, and one number for a title."""
    pairs = {
        (t, recipe.arxiv.get(t, ""))
        for recipe in map(Recipe.load, bundled())
        for t in recipe.papers
    }
    assert len(pairs) == len({title for title, _ in pairs})
    numbers = [number for _, number in pairs if number]
    assert len(numbers) == len(set(numbers)) > 100
    assert not any(re.search(r"arxiv", title, re.I) for title, _ in pairs)


def test_a_recipe_keeps_the_numbers_of_its_papers():
    told = {
        "papers": ["One: a Paper (arXiv:2404.14469)", "Two (of a workshop)"],
        "loop": {"use": "jacobi"},
    }
    recipe = Recipe.load(told)
    assert recipe.papers == ("One: a Paper", "Two (of a workshop)")
    assert recipe.arxiv == {"One: a Paper": "2404.14469"}
    assert recipe.to_json()["papers"] == recipe.cited == told["papers"]
    assert Recipe.load(recipe.to_json()) == recipe
    both = Recipe.load([recipe, "snapkv"])
    assert both.arxiv.keys() < set(both.papers) and len(both.arxiv) == 2


def test_the_page_has_a_row_for_each_paper():
    page = papers.page()
    rows = [row for row in page.splitlines() if row.startswith("| ")]
    assert len(rows) == len(ALL) + 1 and "none" not in {row.split(" | ")[-1] for row in rows}
    partly = [paper for paper in ALL if paper.lacks]
    assert page.count("| partly: without ") == len(partly) > 0
    assert f"{len(ALL)} papers: {len(ALL) - len(partly)} work, {len(partly)} partly" in page
    for name in re.findall(r"\]\(\.\./figures/([\w./-]+)\)", page):
        assert (papers.FIGURES / name).is_file()


@pytest.mark.parametrize("name", bundled())
def test_a_recipe_has_evidence(name):
    """Also one of no paper: its page says what holds it."""
    assert papers.evidence_of(name) != "none"


def test_a_recipe_without_evidence_is_seen():
    assert papers.evidence(papers.Paper("", recipes=["NAME"])) == "none"
