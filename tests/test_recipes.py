"""Recipes: loading, merging, looking names up, and what is said when that fails."""

import math
import tomllib
from dataclasses import fields
from importlib.resources import files
from pathlib import Path

import pytest

import accel
from accel.compiler.assemble import GRADES, assemble
from accel.ir.axis import Axis, find_axes
from accel.ir.errors import RecipeError
from accel.ir.recipe import Recipe, bundled, groups


@pytest.mark.parametrize("name", bundled())
def test_every_bundled_recipe_assembles_and_says_what_it_is(name):
    recipe = Recipe.load(name)
    assert recipe.about and recipe.name == name
    assert assemble(recipe).grade in GRADES


def one_line(when: str) -> bool:
    """Short, and reads on after "take it when"."""
    return 0 < len(when) <= 60 and when[0].islower() and not when.endswith(".")


@pytest.mark.parametrize("name", bundled())
def test_a_recipe_says_when_to_take_it(name):
    when = Recipe.load(name).when
    assert one_line(when), f"when = {when!r}: 1 to 60 characters, which go on after 'take it when'"


def test_no_two_recipes_say_the_same():
    found = {name: Recipe.load(name) for name in bundled()}
    assert len({r.when for r in found.values()} | {r.about for r in found.values()}) == 2 * len(
        found
    )
    assert not one_line("") and not one_line("Small") and not one_line("x" * 61)  # the control


def test_every_recipe_is_in_one_group_and_groups_are_in_order():
    found = groups()
    assert sorted(name for group in found for name in group.recipes) == list(bundled())
    assert all(one_line(g.when) and len(f"{g.title}: when {g.when}") <= 80 for g in found)
    assert len({g.rank for g in found}) == len({g.title for g in found}) == len(found)
    keys = {"title", "when", "rank"}
    for group in found:
        text = files("accel.recipes").joinpath(group.name, "_group.toml").read_text()
        assert tomllib.loads(text).keys() == keys


def test_when_of_a_recipe_of_ones_own_may_be_left_out_and_is_text():
    assert Recipe.load({"weights": {"use": "int4"}}).when == ""
    assert Recipe.load({"when": "it fits"}).to_json()["when"] == "it fits"
    for wrong in ({"when": 3}, {"papers": [3]}, {"papers": "x"}):
        with pytest.raises(RecipeError, match="must be"):
            Recipe.load(wrong)


def test_axes_are_the_folders_that_define_base():
    axes = find_axes()
    assert {"weights", "loop", "sample"} <= set(axes)
    assert all(axis.names() for axis in axes.values())


def test_a_list_is_merged_and_a_clash_names_both(tmp_path):
    merged = Recipe.load(["base", "float16"])
    assert set(merged.tables) == {"loop", "weights"}
    other = tmp_path / "tiny.toml"
    other.write_text('[weights]\nuse = "float16"\nsmallest = 1\n')
    with pytest.raises(RecipeError, match="'float16' and 'tiny' both set weights"):
        Recipe.load(["float16", str(other)])


def test_equal_tables_do_not_clash():
    assert Recipe.load(["float16", "float16"]).tables == Recipe.load("float16").tables


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("bse", "recipe 'bse' does not exist; did you mean 'base'"),
        ({"weigths": {"use": "float16"}}, "axis 'weigths' does not exist; did you mean 'weights'"),
        (
            {"weights": {"use": "flaot16"}},
            "weights method 'flaot16' does not exist; did you mean 'float16'",
        ),
        (
            {"weights": {"use": "float16", "smalest": 3}},
            "option 'smalest' does not exist; did you mean 'smallest'",
        ),
        ({"weights": {"use": "float16", "smallest": "3"}}, "smallest = '3' is str, not int"),
        ({"weights": {"smallest": 3}}, "has no `use`"),
        (
            {"sample": {"use": "typcal"}},
            "sample method 'typcal' does not exist; did you mean 'typical'",
        ),
        (
            {"sample": {"use": "eta", "epsilon": 2.0}},
            "sample.eta: epsilon is 2.0; give more than 0",
        ),
        (
            {"sample": {"use": "standard", "temperature": 0.5}},
            "sample.standard: temperature comes with each request; leave it out",
        ),
        ({"weights": 3}, "'weights' is a int, not a table"),
        (3, "recipe is a int"),
        ("no/such/file.toml", "no such recipe file"),
        (str(Path(__file__).parent), "is a folder, and a recipe is"),
    ],
)
def test_what_is_wrong_is_named_with_the_near_name(spec, words):
    with pytest.raises(RecipeError) as error:
        assemble(Recipe.load(spec))
    assert words in str(error.value)


def test_a_broken_file_is_an_error_with_its_name(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text("[weights\n")
    with pytest.raises(RecipeError, match="bad.toml: not valid TOML"):
        Recipe.load(path)


def test_nested_tables_become_dotted_axes():
    recipe = Recipe.load({"kv": {"score": {"use": "knorm"}, "codec": {"use": "int8"}}})
    assert set(recipe.tables) == {"kv.score", "kv.codec"}


def test_a_recipe_error_comes_before_any_work():
    with pytest.raises(accel.RecipeError, match="unknwon|did you mean"):
        accel.optimize("/no/such/model", "bas")


def test_a_method_file_holds_one_class(tmp_path, monkeypatch):
    package = tmp_path / "two_axis"
    package.mkdir()
    (package / "__init__.py").write_text("class Base: pass\n")
    (package / "pair.py").write_text(
        "from two_axis import Base\nclass A(Base): pass\nclass B(Base): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    axis = Axis("two", "two_axis")
    assert axis.names() == ["pair"]
    with pytest.raises(RecipeError, match="holds 2 classes"):
        axis.build("pair")


def test_the_old_name_of_a_recipe_tells_the_new_one():
    with pytest.raises(RecipeError, match="'bit-exact' is called 'batch-invariant'"):
        Recipe.load(["int4", "bit-exact"])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_no_option_is_nan_or_infinite(value):
    """NaN passes a check that is written as a comparison, and JSON has neither."""
    tried = 0
    for axis in find_axes().values():
        for name in axis.names():
            for field in fields(axis.method(name)):
                if field.init and isinstance(field.default, float):
                    with pytest.raises(accel.AccelError, match=field.name):
                        axis.build(name, **{field.name: value})
                    tried += 1
    assert tried > 50
