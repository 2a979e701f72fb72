"""The demo's own check of the tokens that it shows, and of what its examples call right."""

import pytest

import accel
from accel.commands import demo
from accel.reference.examples import Example, examples
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
    function, key, edit = examples()
    assert key.verdict(key.wanted + "\n# question") == "right"
    assert key.verdict(key.wanted[:-1]) == key.verdict("") == "wrong"
    assert "output += item.price" in edit.wanted and "result" not in edit.wanted
    assert edit.verdict(edit.wanted) == "right"
    assert edit.verdict(edit.wanted.replace("output", "result", 1)) == "wrong"
    assert edit.shown(edit.wanted + "more") == edit.wanted


def test_a_function_is_judged_without_what_comes_after_it():
    function, *_ = examples()
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
