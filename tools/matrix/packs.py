"""Recipes that hold many cases of a matrix at once: one that gives the oracle's numbers settles every case within it.

A pack has at most one method of an axis, like any recipe. A case counts only where the pack is compared as strictly as
the case alone would be. A pack that is refused or wrong settles nothing: what it holds is tried apart.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from accel.runtime.loop import HOST

Table = tuple[str, str]  # axis, method
MOST = 9  # methods of a pack; the more, the likelier three of them refuse one another


@dataclass
class Packs:
    """Chooses packs of the cases that are left.

    `case`: makes a case of an architecture and tables. `fits`: whether a recipe of it can be assembled.
    `strict`: how strictly tables are compared; equal values may share a pack.
    """

    case: Callable[[str, tuple[Table, ...]], Any]
    fits: Callable[[Any], bool]
    strict: Callable[[Collection[Table]], Hashable]
    left: dict[str, dict[tuple[Table, ...], Any]] = field(default_factory=dict)
    refused: dict[str, set[frozenset[Table]]] = field(default_factory=lambda: defaultdict(set))
    _of: dict[str, dict[Table, dict[tuple[Table, ...], None]]] = field(default_factory=dict)

    def add(self, cases: Iterable[Any]) -> None:
        """Cases that are to be settled."""
        for case in cases:
            self.left.setdefault(case.architecture, {})[case.tables] = case
            of = self._of.setdefault(case.architecture, defaultdict(dict))
            for table in case.tables:
                of[table][case.tables] = None

    def settle(self, case: Any, kind: str) -> None:
        """A case whose outcome is known."""
        if kind == "refused":
            self.refused[case.architecture].add(frozenset(case.tables))
        if self.left.get(case.architecture, {}).pop(case.tables, None):
            for table in case.tables:
                del self._of[case.architecture][table][case.tables]

    def next(self) -> tuple[Any, Any] | None:
        """The first case that is left, and a pack around it; none: all are settled."""
        for architecture, cases in self.left.items():
            if cases:
                pack = seed = next(iter(cases.values()))
                while len(pack.tables) < MOST and (more := self._wider(architecture, pack)):
                    pack = more
                return seed, pack
        return None

    def within(self, pack: Any) -> list[Any]:
        """The cases that a pack settles if it is equal, pairs first."""
        tables, strict = set(pack.tables), self.strict(pack.tables)
        every = {
            each: case
            for table in pack.tables
            for each in self._of[pack.architecture][table]
            if tables.issuperset(each)
            and self.strict(each) == strict
            and (case := self.left[pack.architecture][each])
        }
        return sorted(every.values(), key=lambda case: len(case.tables))

    def narrower(self, pack: Any, seed: Any) -> Any:
        """The first half of what was added to a seed."""
        added = [table for table in pack.tables if table not in seed.tables]
        return self.case(pack.architecture, _ordered((*seed.tables, *added[: len(added) // 2])))

    def _wider(self, architecture: str, pack: Any) -> Any | None:
        """A pack of one method more, the one that settles most cases more."""
        axes, tables = {axis for axis, _ in pack.tables}, set(pack.tables)
        strict, gains = self.strict(pack.tables), list[tuple[int, Table]]()
        for table, cases in self._of[architecture].items():
            wider = {*tables, table}
            if table[0] in axes | set(HOST) or not cases or self.strict(wider) != strict:
                continue  # what runs between calls is chosen with drafts that reach it: a pack has one case's
            if gain := sum(wider.issuperset(c) and self.strict(c) == strict for c in cases):
                gains.append((gain, table))
        for _, table in sorted(gains, key=lambda one: -one[0]):
            more = self.case(architecture, _ordered((*pack.tables, table)))
            if not self._refuses(architecture, {*tables, table}, table) and self.fits(more):
                return more
        return None

    def _refuses(self, architecture: str, tables: set[Table], new: Table) -> bool:
        """Whether it is known that some of the tables refuse the new one."""
        known = self.refused[architecture]
        others = tables - {new}
        return any(
            frozenset((new, *some)) in known
            for count in (1, 2)
            for some in itertools.combinations(others, count)
        )


def packed(
    packs: Packs,
    run: Callable[[Any], Any],
    refusal: Callable[[Any], Any | None],
    within: Callable[[Any, Any], Any],
) -> Iterator[Any]:
    """Outcomes of all cases that are left. `run`: a case's outcome. `refusal`: its outcome if it is refused, found
    without comparing. `within`: the outcome of a case in a pack that is equal.
    """
    while chosen := packs.next():
        seed, pack = chosen
        found: list[Any] = []
        while not found:
            alone = set(pack.tables) == set(seed.tables)
            inside, outcome = packs.within(pack), run(seed if alone else pack)
            if outcome.kind == "equal":
                found = [outcome if c == outcome.case else within(c, pack) for c in inside]
            elif alone:
                found = [outcome]
            else:
                found = [one for case in inside if (one := refusal(case))]
                pack = packs.narrower(pack, seed)
        for one in found:
            packs.settle(one.case, one.kind)
        yield from found


def _ordered(tables: Iterable[Table]) -> tuple[Table, ...]:
    """As cases have them: what runs between calls first, then by axis."""
    return tuple(sorted(tables, key=lambda table: (table[0] not in HOST, table[0])))
