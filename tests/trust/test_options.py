"""Every option that is a number has a range, says that any number will do, or is checked by its class."""

import math
from dataclasses import dataclass, fields
from functools import partial

import pytest

from accel.ir.axis import Range, find_axes, option, ranges
from accel.ir.errors import AccelError, InputError, RecipeError
from accel.ir.invariants import Method
from accel.runtime.sample._template import Template as Drawn

AXES = find_axes()
NUMBERS = [
    (axis, name, field.name)
    for axis in AXES
    for name in AXES[axis].names()
    for field in fields(AXES[axis].method(name))
    if field.init and type(field.default) in (int, float)
]
FAR = 2**30  # below a default, where no option has a meaning


def beyond(allowed):
    """Numbers next to a range, on the outside."""
    if allowed.one_of:
        return [min(allowed.one_of) - 1, max(allowed.one_of) + 1]
    found = [allowed.above, allowed.below]
    found += [None if allowed.least is None else allowed.least - 1]
    found += [None if allowed.most is None else allowed.most * 2 + 1]
    found += [allowed.least + 1] if allowed.odd else []
    return [number for number in found if number is not None]


def law(method, name):
    """What is next to its range is refused, with the range; without one, what is far below its default. A range of
    whole numbers has a least one.
    """
    allowed = ranges(method)[name]
    (default,) = (field.default for field in fields(method) if field.name == name)
    if allowed is None:
        with pytest.raises(AccelError, match=name):
            method(**{name: type(default)(default - FAR)})
        return
    assert default in allowed
    if type(default) is int and allowed != Range():
        assert default - FAR not in allowed
    values = [*beyond(allowed), math.nan] if type(default) is float else beyond(allowed)
    for value in values:
        with pytest.raises(AccelError) as refusal:
            method(**{name: value})
        assert f": {name} is {value}; give {allowed or 'a finite number'}" in str(refusal.value)


@pytest.mark.parametrize(("axis", "use", "name"), NUMBERS)
def test_a_number_out_of_range_is_refused(axis, use, name):
    law(AXES[axis].method(use), name)


def test_there_are_numbers():
    assert len({axis for axis, *_ in NUMBERS}) > 15 and len(NUMBERS) > 250


@dataclass(frozen=True)
class Silent(Method):
    size: int = 4


@dataclass(frozen=True)
class Deaf(Method):
    """Its own checks stand in the place of those of its ranges."""

    size: int = option(4, least=1)

    def __post_init__(self):
        pass


@dataclass(frozen=True)
class Apart(Method):
    size: int = option(4, least=5)


@dataclass(frozen=True)
class Endless(Method):
    size: int = option(4, most=8)


@pytest.mark.parametrize("method", [Silent, Deaf])
def test_an_option_that_takes_any_size_is_found(method):
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        law(method, "size")


@pytest.mark.parametrize("method", [Apart, Endless])
def test_a_range_that_cannot_be_is_found(method):
    with pytest.raises(AssertionError):
        law(method, "size")


@dataclass(frozen=True)
class Sized(Method):
    size: int = option(4, least=1, most=8)
    share: float = option(0.5, above=0, most=1)


@dataclass(frozen=True)
class Larger(Sized):
    """Another default, and another range."""

    size: int = 8
    share: float = option(0.5)


def test_a_subclass_keeps_a_range_or_declares_its_own():
    assert ranges(Larger) == {"size": Range(least=1, most=8), "share": Range()}
    with pytest.raises(RecipeError, match="size is 9; give 1 to 8"):
        Larger(size=9)
    assert Larger(share=-3.0).share == -3.0


@pytest.mark.parametrize(
    ("allowed", "words"),
    [
        (Range(least=1), "at least 1"),
        (Range(most=1e30), "at most 1e+30"),
        (Range(least=1, most=8), "1 to 8"),
        (Range(above=0, most=1), "more than 0 and at most 1"),
        (Range(least=0, below=1), "at least 0 and less than 1"),
        (Range(least=1, most=63, odd=True), "an odd number, 1 to 63"),
        (Range(one_of=(2, 4, 8)), "2, 4 or 8"),
        (Range(one_of=(1,)), "1"),
        (Range(least=1, most=8, multiple_of="page"), "1 to 8 and a multiple of page"),
        (Range(one_of=(2, 4), multiple_of="page"), "2 or 4 and a multiple of page"),
        (Range(), ""),
    ],
    ids=str,
)
def test_a_range_in_words(allowed, words):
    assert str(allowed) == words


@pytest.mark.parametrize(
    ("axis", "use", "options", "words"),
    [
        ("kv.score", "snapkv", {"window": 0}, "kv.score.snapkv: window is 0; give 1 to 1024"),
        ("kv.score", "snapkv", {"pooling": "mea"}, "snapkv: pooling 'mea' .*did you mean 'mean'"),
        ("kv.budget", "uniform", {"tokens_kept": -1}, "kv.budget.uniform: tokens_kept is -1"),
        ("draft", "sam", {"most": 10**5000}, "draft.sam: most is a number of .*; give 1 to 512"),
        (
            "kv.codec",
            "kivi",
            {"residual": 33},
            "kivi: residual is 33; give a multiple of group = 32",
        ),
        ("kv.codec", "leank", {"group": 48}, "leank: window is 128; give a multiple of group = 48"),
        ("draft", "iad", {"ngram": 2**40}, f"ngram is {2**40}; give at most {2**31 - 1}"),
        (
            "loop",
            "prophet",
            {"early": math.inf},
            "loop.prophet: early is inf; give a finite number",
        ),
    ],
)
def test_an_error_names_the_method_its_option_and_its_range(axis, use, options, words):
    """Of a method that a recipe names, and of one that is constructed."""
    for made in (partial(AXES[axis].build, use), AXES[axis].method(use)):
        with pytest.raises(RecipeError, match=words):
            made(**options)


def test_a_sampler_refuses_an_option_as_an_input_and_in_a_recipe():
    """Its options come with requests."""
    for value, words in ((-1.0, "temperature = -1.0 is out of range"), (math.nan, "temperature")):
        with pytest.raises(InputError, match=words):
            AXES["sample"].method("standard")(temperature=value)
        with pytest.raises(RecipeError, match=f"sample.standard: {words}"):
            AXES["sample"].build("standard", temperature=value)
    with pytest.raises(InputError, match="least is 0; give more than 0"):
        Drawn(least=0)
