"""docs/figures/composition.md and its picture, out of what tools/matrix/matrix.py found."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path
from typing import Any

from accel.compiler.capabilities import table

TEMPLATE = Path(__file__).with_name("composition.md")
INK = "#1f2937"
MANY = 15  # methods of other axes, among which all are
# What of a refusal names this recipe, this method, or what to do: the reason is what lies between.
NAMED = re.compile(
    r"^(recipe '.*?'|[\w.-]+( and [\w.]+)?): |.* cannot be combined with [\w.]+ = [\w-]+: "
)
ACT = re.compile(r"; (leave|use|build|give|set) .*$|\s*[(;,] ?\(?gemfilter.*$")
# Of a refusal that the table of invariants says.
DECLARED = re.compile(r" relies on [A-Z_]+, which ")
Pair = tuple[tuple[str, str], tuple[str, str]]


def write(folder: Path, outcomes: list[Any], every: list[Any]) -> None:
    """The page, of outcomes of pairs and triples. `every`: the cases that there are; more may have run before."""
    import matplotlib

    matplotlib.use("Agg")
    pictures = folder / "composition"
    pictures.mkdir(parents=True, exist_ok=True)
    pairs = [o for o in outcomes if len(o.case.tables) == 2]
    architectures = list(dict.fromkeys(o.case.architecture for o in pairs))
    _picture(pictures / "pairs.png", pairs)
    text = TEMPLATE.read_text(encoding="utf-8").format(
        architectures=", ".join(architectures),
        counts="\n".join(_counts(outcomes)),
        every=f"{len({o.case for o in outcomes} & set(every))} of {len(every)}",
        invariants=table(),
        reasons="\n".join(_reasons(pairs)),
    )
    (folder / "composition.md").write_text(text.rstrip() + "\n", encoding="utf-8")


def _counts(outcomes: list[Any]) -> list[str]:
    """A table: recipes of two and of three methods."""
    rows = [
        "| recipes of | known | equal | within a pack | refused | wrong |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for size in sorted({len(o.case.tables) for o in outcomes}):
        some = [o for o in outcomes if len(o.case.tables) == size]
        kinds = Counter(o.kind for o in some)
        packed = sum(bool(o.within) for o in some)
        cells = [len(some), kinds["equal"], packed, kinds["refused"], kinds["wrong"]]
        rows.append(f"| {size} methods | " + " | ".join(map(str, cells)) + " |")
    return [*rows, "", _closed(outcomes)]


def _closed(outcomes: list[Any]) -> str:
    """Whether three methods go together where each two do: there, or where the two were not run, elsewhere."""
    pairs = [o for o in outcomes if len(o.case.tables) == 2]
    there = {(o.case.architecture, o.case.tables) for o in pairs}
    ran = {tables for _, tables in there}
    refused = [o.case for o in pairs if o.kind != "equal"]
    known = {
        (architecture, case.tables)
        for case in refused
        for architecture in {o.case.architecture for o in outcomes}
        if architecture == case.architecture or (architecture, case.tables) not in there
    }
    hold: Counter[tuple[bool, str]] = Counter()
    for o in outcomes:
        twos = list(combinations(o.case.tables, 2))
        if len(twos) > 1:
            bad = any((o.case.architecture, two) in known for two in twos)
            if not bad and not ran.issuperset(twos):
                continue  # of which nothing is known
            hold[bad, o.kind] += 1
    if not hold:
        return ""
    free, held = (sum(n for (bad, _), n in hold.items() if bad is b) for b in (False, True))
    return (
        f"Three methods go together where each two of them do: so it was in {hold[False, 'equal']} of {free} such "
        f"recipes; of the {held} with a pair that is refused, {hold[True, 'refused']} are refused."
    )


def _reason(why: str) -> str:
    """The reason alone, of a refusal."""
    while NAMED.match(why):
        why = NAMED.sub("", why, count=1)
    return ACT.sub("", why)


def _reasons(pairs: list[Any]) -> list[str]:
    """A table: reasons that no declaration gives, and the methods that they keep apart."""
    ran = Counter(o.case.tables for o in pairs)
    where: dict[tuple[str, Pair], list[str]] = defaultdict(list)
    for o in pairs:
        if o.kind == "refused" and not DECLARED.search(o.why):
            where[_reason(o.why), o.case.tables].append(o.case.architecture)
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for (why, pair), names in where.items():
        on = "" if len(names) == ran[pair] else f" ({', '.join(sorted(names))})"
        often = max(pair, key=lambda one, why=why: sum(w == why and one in p for w, p in where))  # type: ignore[misc]
        other = pair[1 - pair.index(often)]
        found[why][f"`{often[1]}`"].append(f"`{other[1]}`{on}")
    rows = ["| methods | and | because |", "|---|---|---|"]
    for why, sides in sorted(found.items(), key=lambda one: -sum(map(len, one[1].values()))):
        for side, others in sides.items():
            rows.append(f"| {side} | {', '.join(_few(others))} | {why} |")
    return rows


def _few(others: Iterable[str]) -> list[str]:
    """Their names; where a model refuses the method whatever stands beside it, so."""
    found = sorted(set(others))
    where = {other.partition(" ")[2] for other in found}
    return (
        [f"anything {where.pop()}"]
        if len(found) > MANY and len(where) == 1 and "" not in where
        else found
    )


def _picture(path: Path, pairs: list[Any]) -> None:
    """A square of methods by methods: whether each two go together, where they were run."""
    import matplotlib.pyplot as plt
    import numpy as np
    from matplotlib.colors import ListedColormap

    methods = sorted({m for o in pairs for m in o.case.tables})
    at = {m: i for i, m in enumerate(methods)}
    kinds: dict[Pair, set[bool]] = defaultdict(set)
    for o in pairs:
        kinds[o.case.tables].add(o.kind == "equal")
    square = np.full((len(methods), len(methods)), np.nan)
    for (a, b), found in kinds.items():
        square[at[a], at[b]] = square[at[b], at[a]] = sum(found) if len(found) == 1 else 0.5
    side = max(8.0, 0.15 * len(methods))
    figure, axes = plt.subplots(figsize=(side + 1, side), dpi=110)
    shown = axes.imshow(
        square, cmap=ListedColormap(["#d9534f", "#f7dc6f", "#2e8b57"]), vmin=-0.25, vmax=1.25
    )
    labels = [f"{axis}: {name}" for axis, name in methods]
    axes.set_xticks(
        range(len(methods)), [name for _, name in methods], rotation=90, fontsize=7.5, color=INK
    )
    axes.set_yticks(range(len(methods)), labels, fontsize=7.5, color=INK)
    edges = [i - 0.5 for i in range(1, len(methods)) if methods[i][0] != methods[i - 1][0]]
    for edge in edges:
        axes.axhline(edge, color="white", linewidth=1.5)
        axes.axvline(edge, color="white", linewidth=1.5)
    bar = figure.colorbar(shown, ax=axes, shrink=0.4, ticks=(0, 0.5, 1))
    bar.set_ticklabels(["refused", "on some models", "together"])
    axes.set_title(
        "Pairs of methods: equal to the oracle, or refused with a reason", fontsize=10, color=INK
    )
    figure.tight_layout()
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)
