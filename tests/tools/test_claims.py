"""tools/pages/claims.py: its rows are recipes, its controls differ in one thing, and answers are asked as it says."""

from types import SimpleNamespace

import claims
import numpy as np
import pytest
from claim import Row, altered, other_half, other_heads, other_layers, other_numbers, zeros
from reference_data import REFERENCE
from safetensors.torch import load_file

from accel.compiler.assemble import assemble
from accel.ir.recipe import Recipe
from accel.runtime.inputs.text import Tokenizer

TEXT = "# pairs\nfile: start entry port\nname: value path line\n# look up\nfile:"


@pytest.mark.parametrize("claim", claims.claims())
def test_rows_are_recipes_and_no_two_are_alike(claim):
    rows = list(claims.claims()[claim]())
    assert len(rows) > 2
    same = [r for i, r in enumerate(rows) if r in rows[:i]]
    assert not same
    for row in rows:
        assemble(Recipe(tables=row.tables))


def numbers(tensors, part):
    return np.concatenate([v.ravel() for n, v in sorted(tensors.items()) if n.endswith(part)])


@pytest.mark.parametrize("name, part", [("headkv-r2", ".share"), ("duo-heads", ".place")])
def test_heads_in_another_order_are_the_same_heads(name, part, tmp_path):
    old = load_file(REFERENCE / f"{name}.safetensors")
    new = load_file(altered(name, other_heads(part[1:]), tmp_path / "a"))
    mine, theirs = (np.sort(numbers(found, part)) for found in (old, new))
    np.testing.assert_array_equal(mine, theirs)
    assert not np.array_equal(numbers(old, part), numbers(new, part))
    if name == "headkv-r2":  # every layer knows the means of all
        means = [new[f"{i}.share"].mean() for i in range(len(new) // 2)]
        np.testing.assert_allclose(new["0.shares"], means, rtol=1e-6)
    turned = load_file(altered(name, other_half(part[1:]), tmp_path / "b"))
    np.testing.assert_allclose(numbers(turned, part), 1 - numbers(old, part))


def test_layers_in_another_order_are_the_same_layers(tmp_path):
    old = load_file(REFERENCE / "prefixkv.safetensors")
    new = load_file(altered("prefixkv", other_layers("kept"), tmp_path / "a"))
    rows = lambda found: sorted(v.tolist() for n, v in found.items() if n.endswith(".kept"))  # noqa: E731
    assert rows(old) == rows(new) and any(not np.array_equal(old[n], new[n]) for n in old)


def test_a_part_that_knows_nothing_has_the_same_numbers(tmp_path):
    old = load_file(REFERENCE / "trim-kv.safetensors")
    new = load_file(altered("trim-kv", other_numbers, tmp_path / "a"))
    for name, value in old.items():
        np.testing.assert_array_equal(np.sort(value, -1), np.sort(new[name], -1))
    assert not np.array_equal(old["0.w1"], new["0.w1"])


def test_a_row_whose_part_is_changed_names_the_changed_file(tmp_path):
    row = Row("x", {"kv.select": {"use": "tokenbutler"}}, ("kv.select", zeros))
    tables = claims.tables_of(row, tmp_path / "a")
    assert tables == {"kv.select": {"use": "tokenbutler", "trained": str(tmp_path / "a")}}
    assert row.tables == {"kv.select": {"use": "tokenbutler"}}
    assert not any(v.any() for v in load_file(tmp_path / "a").values())
    row = Row("x", {"kv.budget": {"use": "duo-heads"}}, ("kv.budget", zeros))
    assert "table" in claims.tables_of(row, tmp_path / "b")["kv.budget"]


class Told:
    """A session that notes what it is told, and answers with the token after the last in the prompt."""

    def __init__(self, log):
        self.log, self.said = log, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def mark(self, **marks):
        self.log.append(marks)

    def prompt(self, tokens):
        self.said += tokens[0].tolist()
        self.log.append(len(self.said))
        return self.run([[]])

    def run(self, tokens):
        self.said += tokens[0]
        places = [i for i, t in enumerate(self.said[:-1]) if t == self.said[-1]]
        after = [i for i in places if self.said[max(0, i - 1) : i] == self.said[-2:-1]] or places
        logits = np.zeros((1, 1, 1 << 14))
        logits[0, 0, self.said[after[0] + 1] if after else 0] = 1
        return logits


@pytest.mark.parametrize("later", [0, 7])
def test_marks_and_later_questions(later):
    tokenizer, log = Tokenizer(REFERENCE / "tokenizer.json"), []
    model = SimpleNamespace(tokenizer=tokenizer, session=lambda: Told(log))
    row = Row("x", {}, question=True, units="lines", later=later)
    assert claims.answered(model, row, TEXT, " start entry port", [5] * 9)
    assert not claims.answered(model, row, TEXT, " value path line", [5] * 9)
    marks, prompt = log[:2]
    lines = [tokenizer.encode(x, special=False) for x in TEXT.splitlines(keepends=True)[:3]]
    body = sum(map(len, lines))
    asked = len(tokenizer.encode("# look up\nfile:", special=False))
    assert marks["question"] == body and prompt == body + (0 if later else asked)
    assert marks["units"][0][:body] == [i for i, x in enumerate(lines) for _ in x]
    assert len(marks["units"][0]) == prompt and set(marks["units"][0][body:]) <= {-1}
