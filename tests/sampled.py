"""Which cases of a test the default run tries: 12 of a law, n of a test with `@pytest.mark.few(n)`. The rest are long,
so the time of the default run does not grow with the methods.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from zlib import crc32

import pytest

OF_A_LAW = 12
_LAWS = Path(__file__).with_name("laws")


def mark(items: Iterable[pytest.Item]) -> None:
    """Mark as long what a test has beyond its most. Those that stay have parameters that other tests of the file do
    not have yet: each method is in some law.
    """
    tests: dict[tuple[Path, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            if item.get_closest_marker("long") is None:
                tests[item.path, item.originalname].append(item)
    seen: dict[Path, Counter[object]] = defaultdict(Counter)
    for (path, _), cases in tests.items():
        told = cases[0].get_closest_marker("few")
        most = told.args[0] if told else OF_A_LAW if path.parent == _LAWS else len(cases)
        for item in set(cases) - set(few(cases, most, seen[path])):
            item.add_marker(pytest.mark.long)


def few(
    cases: Sequence[pytest.Function], most: int, seen: Counter[object]
) -> list[pytest.Function]:
    """So many of the cases, or all: each the one whose parameters were seen least, which are counted as seen."""
    if len(cases) <= most:
        return list(cases)
    left = sorted(cases, key=lambda item: crc32(item.nodeid.encode()))
    found = []
    while len(found) < most:
        best = min(left, key=lambda item: sum(seen[one] for one in item.callspec.indices.items()))
        left.remove(best)
        found.append(best)
        seen.update(best.callspec.indices.items())
    return found
