"""The tool that starts a method: for every axis that has one, files that are not there yet and that can be read."""

import ast
import tomllib

import new
import pytest

from accel.ir.axis import find_axes


@pytest.mark.parametrize("name", [n for n, axis in find_axes().items() if axis.names()])
def test_every_axis_can_get_a_method(name):
    axis = find_axes()[name]
    made = new.files_of(axis, "some-new-one", new.shortest(axis))
    code, recipe, test = made
    assert not any(path.exists() for path in made)
    assert code.parent.is_dir() and recipe.parent.parent.is_dir() and test.parent.is_dir()
    assert "class SomeNewOne" in made[code]
    ast.parse(made[code])
    ast.parse(made[test])
    assert tomllib.loads(made[recipe])


def test_what_cannot_be_made_is_said(monkeypatch, capsys):
    for words, told in (
        (["kv.scor", "x"], "did you mean 'kv.score'"),
        (["kv.score", "X y"], "is no name of a method"),
        (["kv.score", "knorm"], "is there already"),
    ):
        monkeypatch.setattr("sys.argv", ["new.py", *words])
        assert new.main() == 2
        assert told in capsys.readouterr().err
