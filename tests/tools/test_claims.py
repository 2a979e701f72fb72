"""tools/pages/claims.py: its rows are recipes, its controls differ in one thing, and answers are asked as it says."""

from types import SimpleNamespace

import claims
import numpy as np
import pytest
from reference_data import REFERENCE
from safetensors.torch import load_file

from accel.compiler.assemble import assemble
from accel.ir.recipe import Recipe
from accel.runtime.inputs.text import Tokenizer

TEXT = "# pairs\nfile: start entry port\nname: value path line\n# look up\nfile:"


@pytest.mark.parametrize("claim", claims.CLAIMS)
def test_rows_are_recipes_and_no_two_are_alike(claim):
    rows = list(claims.CLAIMS[claim]())
    assert len(rows) == len({(r.told, str(r)) for r in rows}) > 3
    for row in rows:
        assemble(Recipe(tables=row.tables))
    assert any(claim == t["use"] for row in rows for t in row.tables.values())


@pytest.mark.parametrize("name, part", [("headkv-r2", "share"), ("duo-heads", "place")])
def test_heads_in_another_order_are_the_same_heads(name, part, tmp_path):
    old = load_file(REFERENCE / f"{name}.safetensors")
    new = load_file(claims.reordered(name, "kv.budget", tmp_path / "a"))
    mine, theirs = (
        sorted(float(x) for n, t in found.items() if n.endswith(f".{part}") for x in t)
        for found in (old, new)
    )
    assert mine == theirs and any(not np.array_equal(old[n], new[n]) for n in old)
    if name == "duo-heads":
        turned = load_file(claims.reordered(name, "kv.budget reversed", tmp_path / "b"))
        for n in old:
            np.testing.assert_allclose(turned[n], 1 - old[n])


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
    row = claims.Row("x", {}, question=True, units="lines", later=later)
    assert claims.answered(model, row, TEXT, " start entry port", [5] * 9)
    assert not claims.answered(model, row, TEXT, " value path line", [5] * 9)
    marks, prompt = log[:2]
    lines = [tokenizer.encode(x, special=False) for x in TEXT.splitlines(keepends=True)[:3]]
    body = sum(map(len, lines))
    asked = len(tokenizer.encode("# look up\nfile:", special=False))
    assert marks["question"] == body and prompt == body + (0 if later else asked)
    assert marks["units"][0][:body] == [i for i, x in enumerate(lines) for _ in x]
    assert len(marks["units"][0]) == prompt and set(marks["units"][0][body:]) <= {-1}
