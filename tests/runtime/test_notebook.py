"""What notebooks show of outputs, models and explanations: small, whole, and escaped."""

from dataclasses import replace
from html.parser import HTMLParser

import models
import pytest

from accel.compiler.explain import explain
from accel.compiler.explain.subject import subject
from accel.runtime.model import notebook

EVIL = "<script>alert('&')</script>"


class Tags(HTMLParser):
    """The tags of a page, closed in their order, and its text."""

    def __init__(self, html):
        super().__init__()
        self.open, self.names, self.text = [], set(), ""
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.names.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def shown(thing):
    tags = Tags(thing._repr_html_())
    assert tags.names <= {"div", "b", "table", "thead", "tbody", "tr", "th", "td"}
    return tags.text


def test_an_output(model):
    out = model.generate([[4, 5], [6]], 3, eos=[])
    assert out.text[0] in shown(out) and "length" in shown(out) and "6 tokens" in shown(out)
    assert EVIL in shown(replace(out, text=[EVIL, "a\nb"])), "as text"
    assert str(out.tokens[1]) in shown(replace(out, text=None))


def test_a_model(model):
    assert "Toy" in shown(model) and "1,300 tokens" in shown(model)
    more = {"model": {"num_layers": EVIL}, "errors": {"a": 0.5}, "kv_bytes_per_token": 12}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "report", more)
        assert EVIL in shown(model) and "5.0e-01" in shown(model) and "12 B" in shown(model)


def test_an_explanation():
    captured = subject(models.tiny(), 128, lambda facts: None)
    for recipe in ("int4", {"about": EVIL, "kv.codec": {"use": "kv-int8"}}, "pie"):
        found = explain(recipe, None, max_context=128, captured=captured, speed=False)
        assert ("pass " in shown(found)) == (not found.refused) == ("KV of a token" in shown(found))
        assert (EVIL in shown(found)) == isinstance(recipe, dict)
        assert ("refused" in shown(found)) == (recipe == "pie")


def test_text_that_is_not_escaped_is_caught(model, monkeypatch):
    out = replace(model.generate([[4, 5]], 3), text=[EVIL])
    monkeypatch.setattr(notebook, "escape", str)
    with pytest.raises(AssertionError):
        shown(out)
