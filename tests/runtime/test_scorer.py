"""What a request says of texts that a search has found: how it reaches the loop, and requests that take none."""

import contextlib
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import accel
from accel.cli import app
from accel.ir.errors import InputError
from accel.runtime.model import load

ASKED = dict(max_new_tokens=9, eos=[], temperature=2.0, seed=1)


@pytest.fixture(scope="module")
def model(toy, tmp_path_factory):
    table = {"use": "a-star-decoding", "width": 3, "step_tokens": 3}
    path = toy.write(tmp_path_factory.mktemp("scored") / "artifact", {"loop": table})
    with accel.load(path, threads=1) as made:
        yield made


def last(prompt, texts):
    return [ord(text[-1]) / 1e3 if text else 0.0 for text in texts]


def first(prompt, texts):
    return [-one for one in last(prompt, texts)]


def test_a_search_goes_by_it(model):
    found = {
        str(scorer): model.generate("for i in", scorer=scorer, **ASKED).tokens
        for scorer in (None, last, first)
    }
    assert len({str(tokens) for tokens in found.values()}) == 3
    assert list(model.stream([5, 17, 200], scorer=last, **ASKED)) == model.generate(
        [5, 17, 200], scorer=last, **ASKED
    ).tokens[0]  # fmt: skip


def test_a_model_that_compares_texts_is_a_scorer(model):
    other = SimpleNamespace(score=last)
    want = model.generate("for i in", scorer=last, **ASKED).tokens
    assert model.generate("for i in", scorer=other, **ASKED).tokens == want


def test_a_wrong_one_leaves_the_model_usable(model):
    for scorer, words in ((3, "scorer = 3: give a function"), (lambda one: [], "raised TypeError")):
        with pytest.raises(InputError, match=words):
            model.generate("for i in", scorer=scorer, **ASKED)
    assert model.generate("for i in", scorer=last, **ASKED).tokens


def test_a_loop_that_asks_none_takes_none(toy):
    with accel.load(toy.path, threads=1) as plain:
        for start in (plain.generate, plain.stream):
            with pytest.raises(InputError, match="compares no texts .* 'a-star-decoding'"):
                start("for i in", 9, scorer=last)


def test_the_command_line_takes_an_artifact(model, monkeypatch, tmp_path):
    (tmp_path / "scorer").mkdir()
    own = load.load

    def loaded(path, *words, **more):
        if path == tmp_path / "scorer":
            return contextlib.nullcontext(SimpleNamespace(score=last))
        return own(path, *words, **more)

    monkeypatch.setattr(load, "load", loaded)
    words = ["run", str(model.artifact.path), "--prompt", "for i in", "--temperature", "2", "--seed", "1"]  # fmt: skip
    words += ["--max-new-tokens", "9", "--ignore-eos"]
    want = model.generate("for i in", 9, temperature=2.0, seed=1, eos=[], scorer=last).text[0]
    told = CliRunner().invoke(app, [*words, "--scorer", str(tmp_path / "scorer")])
    assert told.exit_code == 0, told.output
    assert want in told.output
    assert want not in CliRunner().invoke(app, words).output
