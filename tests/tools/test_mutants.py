"""What tools/matrix/mutate.py changes in a source, and which tests it runs on that."""

import ast
from pathlib import Path

import mutate
import pytest
from mutants import mutants

ROOT = Path(__file__).parents[2]
SOURCE = '''
def score(x, n: int = 3):
    """Not - this + 1."""
    if n < 2:
        raise ValueError(f"n is {n + 1}")
    é = -x.sum(dim=1).clamp(min=0) * 2
    return é.amax(-1) + (x & n).sort(descending=True).indices
'''


def changed():
    return {(m.kind, m.before, m.after) for m in mutants(SOURCE)}


def test_signs_terms_bounds_functions_and_axes_are_changed():
    assert {
        ("bound", "n < 2", "n <= 2"),
        ("turned", "n < 2", "n > 2"),
        ("off by one", "2", "3"),
        ("sign", "-x.sum(dim=1).clamp(min=0)", "x.sum(dim=1).clamp(min=0)"),
        ("axis", "x.sum(dim=1)", "x.sum(dim=0)"),
        ("function", "x.sum(dim=1)", "x.mean(dim=1)"),
        ("no min", "x.sum(dim=1).clamp(min=0)", "x.sum(dim=1).clamp()"),
        ("function", "é.amax(-1)", "é.mean(-1)"),
        ("left term alone", "é.amax(-1) + (x & n).sort(descending=True).indices", "é.amax(-1)"),
        ("no descending", "(x & n).sort(descending=True)", "(x & n).sort()"),
        ("operator", "x & n", "x | n"),
    } <= changed()


def test_texts_types_and_defaults_are_not():
    assert not any("3" == before or "n + 1" in before for _, before, _ in changed())


def test_a_mutant_is_the_source_with_one_change():
    lines = SOURCE.splitlines()
    for mutant in mutants(SOURCE):
        ast.parse(mutant.source)
        off = [i for i, line in enumerate(mutant.source.splitlines()) if line != lines[i]]
        assert off == [mutant.line - 1]


def test_files_have_the_tests_that_name_them():
    tests = mutate.tests_of(ROOT, Path("passes/kv/score/tova.py"))
    laws, own = "tests/laws/test_kv_score.py", "tests/passes/kv/score/test_tova.py"
    assert sorted(tests.own) == [laws, own] and tests.other
    lazy = mutate.tests_of(ROOT, Path("runtime/kv/budget/simlayerkv.py"))
    assert "tests/test_rehearsal.py" in lazy.own, "it imports the method"
    word = mutate.tests_of(ROOT, Path("runtime/kv/when/every.py"))
    whole = len([*(ROOT / "tests").rglob("test_*.py")])
    assert word.own == ("tests/laws/test_kv_when.py",), "a name, not a word"
    assert len(word.other) < whole / 10
    words = mutate.tests_of(ROOT, Path("passes/depth/shortgpt.py")).words
    assert "test_a_layer_that_does_nothing_goes_first_and_nothing_changes" in words
    assert "test_masks_are_computed_once" not in words


@pytest.mark.long
def test_a_change_is_caught_and_known_the_second_time(tmp_path):
    """In a copy: the working tree stays as it is. The sign of a score is noticed."""
    file, out, place = Path("passes/kv/score/knorm.py"), tmp_path / "out.jsonl", tmp_path / "copy"
    source = (ROOT / file).read_text()
    mutate.copied(ROOT, place)
    rows = list(mutate.measured(place, file, 1, out))
    assert [row["result"] for row in rows] == ["caught"]
    size = out.stat().st_size
    assert list(mutate.measured(place, file, 1, out)) == rows and out.stat().st_size == size
    assert (ROOT / file).read_text() == source
