"""The demo's model where the registry cannot be reached, its check of the tokens that it shows, what its examples call
right, and what its table says of a recipe.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest

import accel
from accel.commands import demo
from accel.compiler.assemble import assemble
from accel.compiler.load.fetch import models
from accel.ir.errors import InputError
from accel.ir.recipe import Recipe
from accel.reference.examples import Example, bundled, smollm2
from accel.reference.functions import body, completes, heads


def test_demo_refuses_tokens_that_differ(monkeypatch):
    """The check of the demo itself: equal tokens pass, a tie passes, anything else does not."""
    plain = demo._Plain(None, [[1, 2, 3]])
    asked = [demo.Asked(Example("copy", "copies", "x", 3), [9])]
    monkeypatch.setattr(demo, "_gap", lambda model, prefix: {2: 1.0, 3: 1e-6}[len(prefix)])
    demo._check(plain, asked, [[1, 2, 3]])
    demo._check(plain, asked, [[1, 2, 4]])
    with pytest.raises(accel.AccelError, match="token 1 of the example that copies differs"):
        demo._check(plain, asked, [[1, 4, 3]])


def test_an_answer_is_right_where_it_stands_to_the_last_letter():
    function, key, edit = bundled()
    assert key.verdict(key.expected + "\n# question") == "right"
    assert key.verdict(key.expected[:-1]) == key.verdict("") == "wrong"
    assert "output += item.price" in edit.expected and "result" not in edit.expected
    assert edit.verdict(edit.expected) == "right"
    assert edit.verdict(edit.expected.replace("output", "result", 1)) == "wrong"
    assert edit.shown(edit.expected + "more") == edit.expected


def test_a_function_is_judged_without_what_comes_after_it():
    function, *_ = bundled()
    assert function.verdict("\n    return text.splitlines()[-1]\n\n\ndef (((") == "parses"
    assert function.verdict("\n    return text\n    if x") == "parses", "the last line was cut off"
    assert function.verdict("\n    return (text\n\n\ndef other():\n") == "does not parse"
    assert function.verdict("") == function.verdict("\ndef next():\n") == "does not parse"
    assert body("def f():", "\n  a\n\n  b\n\nclass A:\n") == "\n  a\n\n  b\n"


def test_a_method_ends_where_the_next_one_begins():
    head = "    def f(self):"
    assert body(head, "\n        pass\n    def (((\n") == "\n        pass\n"
    assert completes(head, "\n        pass\n    def (((\n")
    assert not completes(head, "\n        pass)\n    def g(self):\n")
    assert not completes(head, "\n    pass\n"), "it has no body"


def test_heads_of_functions():
    method = '    def f(self,\n          x):\n        """It\n        does."""'
    source = (
        f"class A:\n{method}\n        return 1\n\n    def g(self): return 2\n\ndef h():\n    pass\n"
    )
    assert heads(source) == ["def h():", method]


@pytest.mark.parametrize("error", [InputError("no registry"), OSError("no room in the cache")])
def test_the_bundled_model_goes_in_its_place_where_the_fetch_fails(
    error, tmp_path, monkeypatch, capsys
):
    def fails(model, watch):
        raise error

    monkeypatch.setattr(models, "fetch", fails)
    subject = demo._subject(tmp_path / "model")
    said = capsys.readouterr().out
    assert f"SmolLM2 cannot be fetched: {error}" in said and "bundled model is shown" in said
    assert subject.folder == demo.reference() and not (tmp_path / "model").exists()
    assert [one.name for one in subject.examples] == ["function", "key", "edit"]
    shown_well(subject)


def test_what_is_fetched_is_shown_as_floats(tmp_path, monkeypatch, capsys):
    written = []
    monkeypatch.setattr(models, "fetch", lambda model, watch: tmp_path / f"{model.name}.gguf")
    monkeypatch.setattr(
        "accel.compiler.load.floats.write",
        lambda file, folder, watch: written.append((file, folder)),
    )
    subject = demo._subject(tmp_path / "model")
    assert written == [(tmp_path / "smollm2-135m.gguf", tmp_path / "model")]
    assert subject.folder == tmp_path / "model" and "cannot" not in capsys.readouterr().out
    assert "SmolLM2-135M-Instruct (Apache-2.0)" in subject.name
    shown_well(subject)


def shown_well(subject):
    """Each recipe is one, is asked an example of this model, and says why one would take it."""
    for beside in subject.compared:
        assemble(Recipe.load(beside.recipe))
        assert beside.why and beside.example in [one.name for one in subject.examples]


def test_a_slower_recipe_is_called_so():
    base = demo._Measured("text", "right", 1000, 100, 10.0)
    fast, slow = replace(base, speed=9.9), replace(base, speed=9.0, text="other")
    assert demo._row("", "x", fast, base, "small")[-2:] == ["yes", "small"]
    assert demo._row("", "x", slow, base, "small")[-2:] == ["no", "small; slower here"]
    assert demo._row("key", "base", base, base, "")[-2:] == ["", ""]


def test_the_examples_of_smollm2():
    chat, function, key, edit = smollm2()
    assert chat.verdict("The capital of France is Paris. It") == "right"
    assert function.verdict("\n    return number % 2 == 0\n```") == "right"
    assert function.verdict("\n    return number % 2\n") == "wrong"
    assert key.message.count("7391") == 2 and key.verdict("The pass key is 739") == "wrong"
    assert edit.message.count("8080") == 1 and "8080" not in edit.expected


class Template:
    """A tokenizer, as far as the demo goes."""

    def apply_chat_template(self, turns, tokenize):
        assert not tokenize
        return f"<{turns[0]['role']}>{turns[0]['content']}<model>"

    def encode(self, text):
        return list(text.encode())


def test_a_message_is_put_before_the_prompt_by_the_template():
    model = SimpleNamespace(tokenizer=Template())
    asked = demo._encode(model, Example("x", "", "it is", 1, message="What?"))
    assert bytes(asked) == b"<user>What?<model>it is"
    assert bytes(demo._encode(model, Example("x", "", "it is", 1))) == b"it is"


def test_a_long_message_is_shown_by_its_ends():
    (line,) = demo._short("a" * 200 + "b" * 200)
    assert len(line) < 100 and line.startswith("aaa") and line.endswith("bbb")
    assert demo._last(["x"] * demo.LINES) == ["x"] * demo.LINES
    assert len(demo._last(["x"] * (demo.LINES + 1))) == 1 + demo.END
