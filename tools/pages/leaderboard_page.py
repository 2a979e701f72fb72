"""docs/figures/leaderboard.md and its pictures, out of the leaderboard's results."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from leaderboard_measure import DEPTHS, LENGTHS, MEMORY_PROMPT, NEW, PROMPT, STEPS, TASKS

TEMPLATE = Path(__file__).with_name("leaderboard.md")  # the page, and what people wrote on it
INK, FAINT = "#1f2937", "#d5dbe3"
KNOWN = {  # drawn in colour, to be found among the others
    "snapkv": "#1f77b4", "streaming-llm": "#ff7f0e", "h2o": "#2ca02c", "kv-random": "#d62728",
}  # fmt: skip
COUNTS = (64, 128, 256, 512)  # tokens that cases keep or read
FLOOR = 1e-4  # a divergence below this is drawn here
Result = dict[str, Any]


def write(folder: Path, results: list[Result], chosen: Collection[str]) -> None:
    """The page and its pictures; `chosen`: names of the cases that stand for their recipes, one of each."""
    pictures = folder / "leaderboard"
    pictures.mkdir(parents=True, exist_ok=True)
    right = sorted((r for r in results if "quality" in r), key=_order)
    base = next(r for r in right if r["name"] == "base")
    _budget_picture(pictures / "budget.png", right, base)
    each = [r for r in right if r["name"] in chosen]
    losing = [r for r in each if share(r) < share(base)]
    _recall_picture(pictures / "recall.png", [base, *losing])
    _speed_picture(pictures / "speed.png", each)
    samples = base["samples"]
    refused = [f"- `{r['name']}`: {r['refused']}" for r in results if "refused" in r]
    text = TEMPLATE.read_text(encoding="utf-8").format(
        windows=samples["windows"], prompt=PROMPT, steps=STEPS, memory=MEMORY_PROMPT,
        asked=samples["prompts"] * DEPTHS * len(TASKS), tasks=", ".join(f"`{t}`" for t in TASKS),
        rounds=samples["rounds"], table="\n".join(_table(each, base)),
        budgets="\n\n".join("\n".join(rows) for rows in _budgets(right)),
        new=NEW, loops="\n".join(_loops(each)),
        refused="\n".join(["## Refused\n", *refused]) if refused else "",
    )  # fmt: skip
    (folder / "leaderboard.md").write_text(text.rstrip() + "\n", encoding="utf-8")


def _order(r: Result) -> tuple[bool, str, str, float]:
    return r["name"] != "base", r["family"], r["recipe"], float(r["value"] or 0)


def share(
    r: Result, length: int | None = None, depth: int | None = None, task: str | None = None
) -> float:
    """Exact answers, of those of a length, a depth and a task."""
    right = asked = 0
    for cell, (a, b) in r["recall"].items():
        kind, at, part = cell.split()
        if length in (None, int(at)) and depth in (None, int(part)) and task in (None, kind):
            right, asked = right + a, asked + b
    return right / max(1, asked)


def _table(results: list[Result], base: Result) -> list[str]:
    """A row for each case."""
    rows = [
        "| case | changes | perplexity | KL | same token | recall 500 | recall 1000 "
        "| KV, MB | of base | prefill | decode | peak, MB |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---|---|---:|",
    ]
    for r in results:
        q, own = r["quality"], r["name"] == "base"
        speeds = [
            "1" if own else _ratio(r.get("speed", {}).get(part)) for part in ("prefill", "decode")
        ]
        rows.append(
            f"| {r['name']} | {r['family']} | {q['perplexity']:.2f} | {q['kl']:.4f} | {q['agreement']:.1%} "
            f"| {100 * share(r, LENGTHS[0]):.0f} | {100 * share(r, LENGTHS[1]):.0f} | {r['kv_bytes'] / 1e6:.2f} "
            f"| {r['kv_bytes'] / base['kv_bytes']:.2f} | {speeds[0]} | {speeds[1]} "
            f"| {_megabytes(r.get('peak_memory'))} |"
        )
    return rows


def _budgets(results: list[Result]) -> list[list[str]]:
    """A table for each option that was given several values: KL and recall by them."""
    options: dict[tuple[float, ...], dict[tuple[str, str], dict[float, Result]]] = {}
    swept: dict[tuple[str, str], dict[float, Result]] = {}
    for r in results:
        if r["option"]:
            swept.setdefault((r["recipe"], r["option"]), {})[r["value"]] = r
    for row, found in swept.items():
        if len(found) > 1:
            options.setdefault(_columns(found), {})[row] = found
    tables = []
    for values, rows in options.items():
        table = [
            "| recipe | option | " + " | ".join(f"{value:g}" for value in values) + " |",
            "|---|---|" + "---:|" * len(values),
        ]
        for (recipe, option), found in rows.items():
            cells = [_cell(found.get(value)) for value in values]
            table.append(f"| {recipe} | `{option}` | {' | '.join(cells)} |")
        tables.append(table)
    return tables


def _columns(found: Collection[float]) -> tuple[float, ...]:
    """The values, least first; counts of tokens have the columns of all such."""
    return tuple(sorted({*found, *COUNTS} if max(found) >= min(COUNTS) else found))


def _cell(r: Result | None) -> str:
    return "–" if r is None else f"{r['quality']['kl']:.4f}, {100 * share(r, LENGTHS[1]):.0f}"


def _loops(results: list[Result]) -> list[str]:
    """A row for each recipe that guesses tokens, or searches."""
    rows = [
        "| recipe | speed-up | least | most | tokens a call | texts as without |",
        "|---|---:|---|---|---:|---:|",
    ]
    for r in results:
        if found := r.get("loop"):
            (least, a), *_, (most, b) = sorted(found["kinds"].items(), key=lambda item: item[1])
            rows.append(
                f"| {r['recipe']} | {found['speedup']:.2f} | {a:.2f} ({least}) | {b:.2f} ({most}) "
                f"| {found['tokens_per_check']:.2f} | {found['equal']} of {found['texts']} |"
            )
    return rows


def _megabytes(count: int | None) -> str:
    return "–" if count is None else f"{count / 1e6:.0f}"


def _ratio(s: dict[str, float] | None) -> str:
    return "–" if s is None else f"{s['ratio']:.2f} ({s['least']:.2f}..{s['most']:.2f})"


def _figure(wide: float, high: float, count: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(wide, high), layout="constrained")
    axes = figure.subplots(1, count, squeeze=False)[0]
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.spines[["left", "bottom"]].set_color(FAINT)
        each.tick_params(labelsize=8, labelcolor=INK)
        each.grid(color=FAINT, linewidth=0.5)
        each.set_axisbelow(True)
    return figure, axes


def _budget_picture(path: Path, results: list[Result], base: Result) -> None:
    """Divergence and recall at 1000 tokens by the share of base's KV bytes: a faint line for each recipe, and a name at
    what nothing of fewer bytes equals.
    """
    figure, panels = _figure(10.5, 5.2, 2)
    smaller = [
        r
        for r in results  # what sessions share lies elsewhere
        if _bytes(r) < 0.99 * _bytes(base) and r["family"] != "kv.reuse"
    ]
    values: tuple[Callable[[Result], float], ...] = (
        lambda r: max(FLOOR, r["quality"]["kl"]),
        lambda r: 100 * share(r, LENGTHS[1]),
    )
    for axes, value, better in zip(panels, values, (min, max), strict=True):
        for recipe in dict.fromkeys(r["recipe"] for r in smaller):
            rows = sorted((r for r in smaller if r["recipe"] == recipe), key=_bytes)
            shares = [_bytes(r) / _bytes(base) for r in rows]
            known = KNOWN.get(recipe)
            axes.plot(
                shares, [value(r) for r in rows], marker="o", markersize=3, linewidth=1.6 if known else 0.8,
                color=known or "#c3ccd8", zorder=3 if known else 1, label=recipe if known else None,
            )  # fmt: skip
        front: list[Result] = []
        for r in sorted(
            smaller, key=lambda r: (_bytes(r), value(r) * (1 if better is min else -1))
        ):
            if not front or better(value(r), value(front[-1])) != value(front[-1]):
                front.append(r)
        axes.plot(
            [_bytes(r) / _bytes(base) for r in front], [value(r) for r in front], "o", color=INK, markersize=4,
            zorder=4,
        )  # fmt: skip
        for r in {r["recipe"]: r for r in reversed(front)}.values():  # each at its fewest bytes
            axes.annotate(
                r["recipe"], (_bytes(r) / _bytes(base), value(r)), xytext=(-5, 0), textcoords="offset points",
                fontsize=8, color=INK, ha="right", va="center", zorder=5,
            )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_xlim(1 / 100, 1)
        axes.set_xticks(
            [1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1],
            ["1/64", "1/32", "1/16", "1/8", "1/4", "1/2", "1"],
        )
        axes.minorticks_off()
        axes.set_xlabel(f"bytes of KV after {PROMPT} tokens, of base", fontsize=9)
    left, right = panels
    left.set_yscale("log")
    left.set_ylabel("KL from base, per token", fontsize=9)
    left.legend(fontsize=8, frameon=False, loc="lower left")
    right.set_ylabel(f"exact answers after {LENGTHS[1]} tokens, %", fontsize=9)
    right.axhline(100 * share(base, LENGTHS[1]), color=INK, linewidth=0.9, linestyle=":")
    right.set_ylim(-3, 108)
    figure.savefig(path, dpi=110)


def _bytes(r: Result) -> int:
    return int(r["kv_bytes"])


def _recall_picture(path: Path, results: list[Result]) -> None:
    """A row for each of these cases, most answers first; a column for each length and depth, and for each task."""
    import numpy as np

    results = sorted(results, key=share, reverse=True)
    cells = [
        [
            *(100 * share(r, length, d) for length in LENGTHS for d in range(DEPTHS)),
            *(100 * share(r, LENGTHS[-1], task=task) for task in TASKS),
        ]
        for r in results
    ]
    figure, (axes,) = _figure(8.6, 1.0 + 0.215 * len(results), 1)
    axes.grid(False)
    axes.imshow(np.array(cells), cmap="YlGnBu", vmin=0, vmax=100, aspect="auto")
    axes.set_yticks(range(len(results)), [r["name"] for r in results])
    parts = [f"{100 * d // DEPTHS}-{100 * (d + 1) // DEPTHS} %" for d in range(DEPTHS)]
    names = [*(parts * len(LENGTHS)), *TASKS]
    axes.set_xticks(range(len(names)), names, fontsize=7)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    for y, row in enumerate(cells):
        for x, value in enumerate(row):
            colour = "#fff" if value > 60 else INK
            axes.text(x, y, f"{value:.0f}", ha="center", va="center", fontsize=7, color=colour)
    groups = [f"by place, {n} tokens" for n in LENGTHS] + [f"by task, {LENGTHS[-1]} tokens"]
    for i, group in enumerate(groups):
        wide = DEPTHS if i < len(LENGTHS) else len(TASKS)
        axes.text(
            DEPTHS * i + (wide - 1) / 2, len(results) - 0.3, group, ha="center", va="top", fontsize=8, color=INK,
        )  # fmt: skip
        axes.axvline(DEPTHS * i - 0.5, color="#fff", linewidth=3)
    title = "exact answers, %, by where in the prompt the answer lies, and by task"
    axes.set_title(title, fontsize=9, color=INK)
    figure.savefig(path, dpi=110)


def _speed_picture(path: Path, results: list[Result]) -> None:
    """Ratios to base with their extremes, of the cases whose extremes lie on one side of 1 in decoding or prefill."""
    rows = [
        r
        for r in results
        if any(s["least"] > 1 or s["most"] < 1 for s in r.get("speed", {}).values())
    ]
    figure, pair = _figure(9.0, 0.8 + 0.19 * len(rows), 2)
    for axes, part in zip(pair, ("decode", "prefill"), strict=True):
        for y, r in enumerate(rows):
            s = r["speed"][part]
            axes.plot([s["least"], s["most"]], [y, y], color="#9db8d0", linewidth=2)
            axes.plot(s["ratio"], y, "o", color="#2f6f9f", markersize=4)
        axes.axvline(1, color=INK, linewidth=0.8, linestyle=":")
        axes.set_xscale("log", base=2)
        axes.set_xticks([0.25, 0.5, 1, 2, 4], ["1/4", "1/2", "1", "2", "4"])
        axes.minorticks_off()
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_title(f"{part}, times as fast as base", fontsize=9, color=INK)
        axes.set_yticks(
            range(len(rows)), [r["name"] for r in rows] if part == "decode" else [""] * len(rows)
        )
        axes.tick_params(axis="y", length=0, labelsize=7)
    figure.savefig(path, dpi=110)
