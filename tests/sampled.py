"""Which cases of a test the default run tries: 3 of a law, n of a test with `@pytest.mark.few(n)`. The rest are long,
so the time of the default run does not grow with the methods. Tests of what a fixture builds
take the same builds.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from zlib import crc32

import pytest

OF_A_LAW = 3
_LAWS = Path(__file__).with_name("laws")


def mark(items: Iterable[pytest.Item]) -> None:
    """Mark as long what a test has beyond its most. Those that stay have parameters that other tests of the file do
    not have yet, so each method is in some law; where these only say what is built, those that others do have.
    """
    tests: dict[tuple[Path, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            if item.get_closest_marker("long") is None:
                tests[item.path, item.originalname].append(item)
    seen: dict[Path, Counter[object]] = defaultdict(Counter)
    known: Counter[str] = Counter()
    for (path, _), cases in tests.items():
        told = cases[0].get_closest_marker("few")
        most = told.args[0] if told else OF_A_LAW if path.parent == _LAWS else len(cases)
        for item in set(cases) - set(few(cases, most, seen[path], known)):
            item.add_marker(pytest.mark.long)


def few(
    cases: Sequence[pytest.Function], most: int, seen: Counter[object], known: Counter[str]
) -> list[pytest.Function]:
    """So many of the cases, or all: each the one whose parameters are the least seen in its file, and then the names
    among them in all files. Those of a choice are counted as seen.
    """
    if len(cases) <= most:
        known.update({name for item in cases for name in _names(item)})
        return list(cases)
    left = sorted(cases, key=lambda item: crc32(item.nodeid.encode()))
    found = []
    while len(found) < most:
        best = min(left, key=lambda item: (_cost(item, seen), sum(known[n] for n in _names(item))))
        left.remove(best)
        found.append(best)
        seen.update(best.callspec.indices.items())
        known.update(_names(best))
    return found


def _names(item: pytest.Function) -> list[str]:
    """Parameters that are names: of methods, models, operators."""
    return [value for value in item.callspec.params.values() if isinstance(value, str)]


def _cost(item: pytest.Function, seen: Counter[object]) -> int:
    """How often its parameters were seen; of a case that is a build of fixtures alone, how many of them were not."""
    parameters = item.callspec.indices.items()
    if all(_shared(item, name) for name, _ in parameters):
        return sum(not seen[one] for one in parameters)
    return sum(seen[one] for one in parameters)


def _shared(item: pytest.Function, name: str) -> bool:
    """Whether a parameter is of a fixture that tests share."""
    found = item._fixtureinfo.name2fixturedefs.get(name)
    return bool(found and found[-1].params) and found[-1].scope != "function"
