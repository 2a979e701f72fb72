"""docs/figures/serving.md and its picture, out of what tools/bench/bench_serve.py measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

TEMPLATE = Path(__file__).with_name("serving.md")  # the page, and what people wrote on it
INK = "#1f2937"
OURS = "accel"
Result = dict[str, Any]


def write(folder: Path, found: Result) -> None:
    """The page and its picture. Raises ValueError where nothing was measured."""
    if not found["runs"]:
        raise ValueError("there is no run; run tools/bench/bench_serve.py before --page")
    pictures = folder / "serving"
    pictures.mkdir(parents=True, exist_ok=True)
    picture(pictures / "servers.png", found)
    tables: list[str] = []
    for precision, load in cases(found):
        runs = [r for r in found["runs"] if (r["precision"], r["load"]) == (precision, load)]
        tables += [f"### {precision}, {load}", "", *table(runs), ""]
    text = TEMPLATE.read_text(encoding="utf-8").format(
        machine=found["machine"], date=found["date"], threads=found["threads"], rows=found["rows"],
        command=found["command"], model=found["model"], versions="; ".join(found["versions"]),
        loads="\n".join(row(one) for one in found["loads"]),
        tables="\n".join(tables).rstrip(), engine="\n".join(engine(found.get("engine"))),
    )  # fmt: skip
    (folder / "serving.md").write_text(text.rstrip() + "\n", encoding="utf-8")


def cases(found: Result) -> list[tuple[str, str]]:
    """(precision, load), in the order of the runs."""
    return list(dict.fromkeys((r["precision"], r["load"]) for r in found["runs"]))


def row(load: Result) -> str:
    """Of a load."""
    return f"| {load['name']} | {load['count']} | {told(load['prompts'])} | {told(load['new'])} |"


def told(counts: Sequence[int]) -> str:
    """Numbers that follow one another."""
    return ", ".join(map(str, counts)) + (", and again" if len(counts) > 1 else "")


def table(runs: Sequence[Result]) -> list[str]:
    """A row for each server: medians over the rounds; ratios are of a round, ours over theirs."""
    rows = [
        "| server | tokens/s | `accel` over it | first text, s | gap, ms | p99 | p99 / median | MB | alike |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    ours = {r["round"]: r for r in runs if r["server"] == OURS}
    for name in dict.fromkeys(r["server"] for r in runs):
        mine = [r for r in runs if r["server"] == name]
        middle = median(1e3 * r["gaps"][50] for r in mine)
        late = median(1e3 * r["gaps"][99] for r in mine)
        times = median(r["gaps"][99] / max(r["gaps"][50], 1e-9) for r in mine)
        errors = sum(len(r["errors"]) for r in mine)
        lost = f" ({errors} failed)" if errors else ""
        rows.append(
            f"| `{name}`{lost} | {median(speed(r) for r in mine):.0f} | {ratio(mine, ours)} | "
            f"{median(r['first'] for r in mine):.2f} | {middle:.0f} | {late:.0f} | {times:.1f} | "
            f"{max(r['memory'] for r in mine) / 1e6:.0f} | {alike(mine, ours)} |"
        )
    return rows


def speed(run: Result) -> float:
    """New tokens a second, of all streams."""
    return float(run["tokens"] / run["seconds"])


def ratio(runs: Sequence[Result], ours: dict[int, Result]) -> str:
    """The median over rounds of our throughput over theirs, and the spread."""
    found = [speed(ours[r["round"]]) / speed(r) for r in runs if r["round"] in ours]
    if not found or runs[0]["server"] == OURS:
        return ""
    return f"{median(found):.2f} ({min(found):.2f}..{max(found):.2f})"


def alike(runs: Sequence[Result], ours: dict[int, Result]) -> str:
    """Texts that begin as ours: weights, prompts and sampling are the same."""
    pairs = [
        a == b
        for r in runs
        if r["round"] in ours
        for a, b in zip(r["begins"], ours[r["round"]]["begins"], strict=False)
    ]
    return f"{sum(pairs)}/{len(pairs)}" if pairs else ""


def engine(found: Result | None) -> list[str]:
    """What the engine spends."""
    if found is None:
        return []
    one = found["iterations"]
    lines = [
        f"- A step of all rows takes {1e3 * one['seconds']:.1f} ms (median of {one['count']:.0f}): the schedule's plan "
        f"{one['plan']:.2%} of it, the model's calls {one['calls']:.1%}.",
        "- A row joins a session that has so many rows already, and brings its state:",
        "",
        "| rows | ms | MB of the row |",
        "|---|---|---|",
    ]
    for join in found["joins"]:
        lines.append(
            f"| {join['rows']:.0f} | {1e3 * join['seconds']:.2f} | {join['bytes'] / 1e6:.2f} |"
        )
    return lines


def picture(file: Path, found: Result) -> None:
    """Throughput, and how the gaps are spread, for each precision and load."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    parts = cases(found)
    names = list(dict.fromkeys(r["server"] for r in found["runs"]))
    colours = dict(zip(names, plt.get_cmap("tab10").colors, strict=False))
    figure, grid = plt.subplots(
        2, len(parts), figsize=(1 + 3 * len(parts), 6), layout="constrained", squeeze=False
    )
    for (top, below), (precision, load) in zip(grid.T, parts, strict=True):
        for at, name in enumerate(names):
            runs = [
                r
                for r in found["runs"]
                if (r["server"], r["precision"], r["load"]) == (name, precision, load)
            ]
            if not runs:
                continue
            speeds = [speed(r) for r in runs]
            top.bar(at, median(speeds), color=colours[name])
            top.plot([at, at], [min(speeds), max(speeds)], color=INK, linewidth=1)
            gaps = [median(1e3 * r["gaps"][p] for r in runs) for p in range(101)]
            below.plot(gaps, range(101), color=colours[name], label=name)
        top.set_title(f"{precision}, {load}", fontsize=9, color=INK)
        top.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=7)
        top.set_ylabel("tokens/s", fontsize=8)
        below.set_xscale("log")
        below.set_xlabel("gap between tokens, ms", fontsize=8)
        below.set_ylabel("% of gaps that are shorter", fontsize=8)
        below.grid(alpha=0.3)
    grid[1, 0].legend(fontsize=7)
    figure.savefig(file, dpi=110)
    plt.close(figure)
