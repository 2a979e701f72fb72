"""The cases that the default run takes: few, of as many parameters as can be, on as few builds as can be."""

from collections import Counter
from types import SimpleNamespace

import pytest

from .sampled import few

NAMES, ARCHITECTURES = "abcde", range(6)


def cases(test, scope, names=(None,)):
    """A case of each build, and of each name. scope: of the fixture that builds; none: there is no fixture."""
    fixtures = {"arch": [SimpleNamespace(params=ARCHITECTURES, scope=scope)]} if scope else {}
    return [
        SimpleNamespace(
            nodeid=f"{test}[{name}-{arch}]",
            callspec=SimpleNamespace(
                indices={"arch": arch} | ({} if name is None else {"name": name}),
                params={"name": name},
            ),
            _fixtureinfo=SimpleNamespace(name2fixturedefs=fixtures),
        )
        for name in names
        for arch in ARCHITECTURES
    ]


def taken(parameter, *tests, scope=None, **names):
    """Values of a parameter in the cases that tests of a file take, each so many."""
    seen, known = Counter(), Counter()
    chosen = [
        one for test, most in tests for one in few(cases(test, scope, **names), most, seen, known)
    ]
    assert len(chosen) == sum(most for _, most in tests)
    return {one.callspec.indices[parameter] for one in chosen}


def test_tests_of_a_file_take_other_parameters():
    assert taken("name", ("law", 3), ("other law", 2), names=NAMES) == set(NAMES)
    assert taken("arch", ("law", 3), ("other law", 3), names=NAMES) == set(ARCHITECTURES)
    assert len(taken("arch", ("law", 2), ("other law", 4), scope="module", names=NAMES)) == 6


@pytest.mark.parametrize(("scope", "builds"), [("session", 4), ("module", 4), ("function", 6)])
def test_tests_of_what_is_built_take_the_same_builds(scope, builds):
    assert len(taken("arch", ("law", 2), ("other law", 4), scope=scope)) == builds


def test_files_take_other_names():
    known = Counter()
    for most in (3, 2):
        few(cases(f"law of {most}", None, NAMES), most, Counter(), known)
    assert dict(known) == dict.fromkeys(NAMES, 1)
