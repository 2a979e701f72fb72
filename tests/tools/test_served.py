"""tools/pages/served.py: what an engine says becomes a row, and the page names every recipe."""

import pytest
import served
from served import Served

from accel.runtime.serve.engine import Engine

from ..prefill_case import built


def test_engines_are_read_as_they_speak():
    with Engine(built("llama", tables={})) as engine:
        assert served.told(engine.how) == ("shared", "whole", "")
    with Engine(built("llama", tables={"schedule": {"use": "sarathi"}})) as engine:
        assert served.told(engine.how) == ("shared", "in chunks", "")
    with Engine(built("llama", tables={"kv.score": {"use": "h2o"}})) as engine:
        how, prompts, why = served.told(engine.how)
    assert (how, prompts) == ("turns", "") and why in engine.how and why


def test_page_names_each_recipe_once_and_those_that_lack():
    found = [
        Served("one", "basic", "shared", "whole", equal=2),
        Served("two", "context", "turns", why="rows cannot\njoin", equal=1),
        Served("three", "context", served.NOT_BUILT, why="no window"),
    ]
    text = served.page(found, ["one", "two", "three", "four"])
    assert "3 of 4 got the tokens" in text and "| rows cannot join | `two` |" in text
    assert "differ from `generate`'s: `two`" in text and "Not asked: `four`." in text
    assert [text.count(f"`{n}` |") for n in ("one", "two", "three")] == [1, 1, 1]
    with pytest.raises(ValueError, match="none of shared"):
        Served("one", "basic", "somehow")
