"""Recipes that are nearly right: each is taken, or refused with an AccelError of one line, soon."""

import random
import re
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest

import accel
from accel.compiler.assemble import assemble
from accel.ir.axis import find_axes
from accel.ir.errors import AccelError, RecipeError
from accel.ir.recipe import Recipe, bundled
from accel.runtime.loop import HOST
from accel.runtime.model.compiled import CompiledModel

FEW, MANY = 150, 10_000
PROMPT = [5, 9, 2, 5, 9, 2, 5]
SECONDS = 10
VALUES = [
    "0", "-1", "1", "2", "3", "64", "1000000000", "9223372036854775807", "-9223372036854775808", "9" * 40,
    "9" * 5000, "0.0", "0.5", "-0.5", "1.5", "nan", "inf", "-inf", "1e400", "true", "false", '""', '"int4"', '"x"',
    '"../x"', '"\\u0000"', "[]", "[1]", "[[0], [0, 1]]", "[nan]", "{}", "{use = 3}", "1979-05-27", "07:32:00",
    '"' + "x" * 3000 + '"', "[" * 400 + "]" * 400, "",
]  # fmt: skip
TEXTS = {name: file.read_text(encoding="utf-8") for name, file in bundled().items()}


class Mutant:
    """A bundled recipe with a few changes that know TOML: of values, names, tables, lines and letters."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.lines = TEXTS[self.rng.choice(list(TEXTS))].splitlines()
        for _ in range(self.rng.choice([1, 1, 2, 3])):
            if not self.lines:
                break
            change = [self.value, self.value, self.option, self.method, self.table, self.line]
            self.rng.choice([*change, self.more, self.letter])()
        self.text = "\n".join(self.lines)

    def place(self, pattern=""):
        found = [i for i, line in enumerate(self.lines) if re.search(pattern, line)]
        return self.rng.choice(found) if found else self.rng.randrange(len(self.lines))

    def value(self):
        at = self.place("=")
        key = self.lines[at].partition("=")[0].strip()
        self.lines[at] = f"{key} = {self.rng.choice(VALUES)}"

    def option(self):
        """One of the method's own options, or of another's, with a value."""
        axis, method = self.method_of()
        fields = getattr(axis.method(method), "__dataclass_fields__", {}) if axis else {}
        key = self.rng.choice([*fields, *fields, "smallest", "use", "x", "", "a.b"])
        self.lines.insert(self.place("use =") + 1, f"{key} = {self.rng.choice(VALUES)}")

    def method_of(self):
        found = re.findall(r"^\[([\w.]+)\]\nuse = \"([\w-]+)\"", "\n".join(self.lines), re.M)
        axes = find_axes()
        found = [(axes[a], m) for a, m in found if a in axes and m in axes[a].names()]
        return self.rng.choice(found) if found else (None, "")

    def method(self):
        axis = self.rng.choice(list(find_axes().values()))
        name = self.rng.choice([*axis.names(), "_template", "__init__", "os", "X", "../base", ""])
        self.lines[self.place("use =")] = f'use = "{name}"'

    def table(self):
        axes = [
            *find_axes(),
            "kv",
            "score",
            "kv.score.x",
            "weights.int4",
            "tables",
            "name",
            "",
            " ",
        ]
        self.lines[self.place(r"^\[")] = f"[{self.rng.choice(axes)}]"

    def line(self):
        at = self.place()
        if self.rng.random() < 0.5:
            del self.lines[at]
        else:
            self.lines.insert(self.place(), self.lines[at])

    def more(self):
        self.lines += TEXTS[self.rng.choice(list(TEXTS))].splitlines()[self.rng.choice([0, 3]) :]

    def letter(self):
        at = self.place()
        line = self.lines[at]
        cut = self.rng.randrange(len(line) + 1)
        new = self.rng.choice(
            ["", "\0", "[", "]", '"', "'", "=", ".", "#", "\u200b", "\ufeff", "{", "é", "\t"]
        )
        self.lines[at] = line[:cut] + new + line[cut + self.rng.randrange(2) :]


ODD = [
    None,
    object(),
    b"x",
    {1: 2},
    {3},
    1j,
    np.int64(3),
    np.zeros(2),
    Path("x"),
    [None],
    10**5000,
    {"use": "int4"},
]


def odd(data, rng):
    """A recipe's dict with a value or a key that no TOML has."""
    tables = [data, *(t for t in data.values() if isinstance(t, dict))]
    table = rng.choice(tables)
    if table and rng.random() < 0.8:
        table[rng.choice(list(table))] = rng.choice(ODD)
    else:
        table[rng.choice([3, None, ("a",), "", "use"])] = rng.choice(ODD)
    return data


def forms(text, folder, rng):
    """As a file, and as dicts where it is TOML."""
    file = folder / "mine.toml"
    file.write_text(text, encoding="utf-8")
    yield file
    try:
        yield tomllib.loads(text)
        yield odd(tomllib.loads(text), rng)
    except (ValueError, RecursionError):
        pass


def one(mutant, folder, model):
    """Load, merge with another, assemble, and decode where only the host's part is set."""
    taken = 0
    for form in forms(mutant.text, folder, mutant.rng):
        try:
            recipe = Recipe.load(form)
            plan = assemble(recipe)
            Recipe.load(["int4", recipe]).to_json()
            taken += 1
            if plan.recipe.tables.keys() <= {*HOST}:
                decode(model, plan.recipe)
        except AccelError as error:
            assert str(error) and "\n" not in str(error) and len(str(error)) < 1500
            assert "eport" not in str(error), "no fault of accel's"
    return taken


def decode(model, recipe):
    found = CompiledModel(
        model._sessions.backend, model.facts, recipe=recipe.to_json(), artifact=model.artifact
    ).generate(PROMPT, 6, eos=[])
    assert all(0 <= token < 37 for token in found.tokens[0])


@pytest.fixture(scope="module")
def model():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=37, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=32,
    )  # fmt: skip
    with accel.optimize(
        LlamaForCausalLM(config), max_context=32, max_batch=4, target="eager", verify=False
    ) as made:
        yield made


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "seeds",
    [range(FEW), pytest.param(range(FEW, MANY), marks=pytest.mark.long)],
    ids=["few", "many"],
)
def test_recipes(seeds, tmp_path, model):
    want = model.generate(PROMPT, 6, eos=[]).tokens
    taken = 0
    for seed in seeds:
        start = time.monotonic()
        taken += one(Mutant(seed), tmp_path, model)
        assert time.monotonic() - start < SECONDS, seed
    assert taken > len(seeds) // 10, "some changes do no harm"
    assert model.generate(PROMPT, 6, eos=[]).tokens == want


def test_the_fuzzer_sees_an_error_of_another_kind(tmp_path, model, monkeypatch):
    """The control: a bare error, one that blames accel, and one too long."""
    for broken in (TypeError("bare"), RecipeError("Report it"), RecipeError("x" * 2000)):

        def fail(*_, _broken=broken):
            raise _broken

        monkeypatch.setattr(Recipe, "load", fail)
        with pytest.raises((TypeError, AssertionError)):
            one(Mutant(0), tmp_path, model)
