"""docs/figures/leaderboard.md and its pictures, out of the leaderboard's results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from leaderboard_measure import DEPTHS, LENGTHS, MEMORY_PROMPT, NEW, PROMPT, STEPS, TASKS

TEMPLATE = Path(__file__).with_name("leaderboard.md")  # the page, and what people wrote on it
INK, FAINT = "#1f2937", "#d5dbe3"
COLOURS = (
    "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#e377c2", "#17becf", "#bcbd22",
    "#7f7f7f", "#0b3d66", "#7a1f1f", "#145214", "#3d2a5c",
)  # fmt: skip
MARKS = "osD^vP*Xph<>"
FLOOR = 1e-4  # a divergence below this is drawn here
Result = dict[str, Any]


def write(folder: Path, results: list[Result]) -> None:
    """The page and its pictures."""
    pictures = folder / "leaderboard"
    pictures.mkdir(parents=True, exist_ok=True)
    right = sorted((r for r in results if "quality" in r), key=_order)
    base = next(r for r in right if r["name"] == "base")
    _budget_picture(pictures / "budget.png", right, base)
    _recall_picture(pictures / "recall.png", right)
    _speed_picture(pictures / "speed.png", right)
    samples = base["samples"]
    refused = [f"- `{r['name']}`: {r['refused']}" for r in results if "refused" in r]
    text = TEMPLATE.read_text(encoding="utf-8").format(
        windows=samples["windows"], prompt=PROMPT, steps=STEPS, memory=MEMORY_PROMPT,
        asked=samples["prompts"] * DEPTHS * len(TASKS), tasks=", ".join(f"`{t}`" for t in TASKS),
        rounds=samples["rounds"], table="\n".join(_table(right, base)),
        new=NEW, loops="\n".join(_loops(right)),
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
            f"| {r['name']} | {r['family']} | {q['perplexity']:.1f} | {q['kl']:.4f} | {q['agreement']:.1%} "
            f"| {100 * share(r, LENGTHS[0]):.0f} | {100 * share(r, LENGTHS[1]):.0f} | {r['kv_bytes'] / 1e6:.2f} "
            f"| {r['kv_bytes'] / base['kv_bytes']:.2f} | {speeds[0]} | {speeds[1]} "
            f"| {_megabytes(r.get('peak_memory'))} |"
        )
    return rows


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
    """Divergence and recall at 1000 tokens by the share of base's KV bytes, a line for each recipe."""
    figure, (left, right) = _figure(10.5, 4.8, 2)
    recipes = dict.fromkeys(
        r["recipe"]
        for r in results
        if r["kv_bytes"] < 0.99 * base["kv_bytes"] and r["name"] != "base"
    )
    for number, recipe in enumerate(recipes):
        rows = sorted((r for r in results if r["recipe"] == recipe), key=lambda r: r["kv_bytes"])
        x = [r["kv_bytes"] / base["kv_bytes"] for r in rows]
        style = {
            "color": COLOURS[number % len(COLOURS)], "marker": MARKS[number % len(MARKS)],
            "markersize": 5, "linewidth": 1.2, "label": recipe,
        }  # fmt: skip
        left.plot(x, [max(FLOOR, r["quality"]["kl"]) for r in rows], **style)
        right.plot(x, [100 * share(r, LENGTHS[1]) for r in rows], **style)
    left.set_yscale("log")
    left.set_ylabel("KL from base, per token", fontsize=9)
    right.set_ylabel(f"exact answers after {LENGTHS[1]} tokens, %", fontsize=9)
    right.axhline(100 * share(base, LENGTHS[1]), color=INK, linewidth=0.9, linestyle=":")
    right.annotate(
        "base", (1, 100 * share(base, LENGTHS[1])), ha="right", va="bottom", fontsize=8, color=INK
    )
    right.set_ylim(-3, 103)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks([1 / 16, 1 / 8, 1 / 4, 1 / 2, 1], ["1/16", "1/8", "1/4", "1/2", "1"])
        axes.minorticks_off()
        axes.set_xlabel(f"bytes of KV after {PROMPT} tokens, of base", fontsize=9)
    figure.legend(
        *left.get_legend_handles_labels(), loc="outside right upper", fontsize=8, frameon=False
    )
    figure.savefig(path, dpi=110)


def _recall_picture(path: Path, results: list[Result]) -> None:
    """A row for each case, a column for each length and depth, and for each task."""
    import numpy as np

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
    """Ratios to base with their extremes, for decoding and prefill."""
    rows = [r for r in results if r["name"] != "base" and "speed" in r]
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
