"""docs/figures/speculation.md and its pictures, out of what tools/bench/bench_speculation.py measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

TEMPLATE = Path(__file__).with_name("speculation.md")  # the page, and what people wrote on it
INK, STAGES = "#1f2937", {"draft": "#ff7f0e", "verify": "#1f77b4", "host": "#7f7f7f"}
PLACES = 10
LINES = ("-", "--", ":")
Result = dict[str, Any]


def write(folder: Path, results: list[Result], names: Sequence[str]) -> None:
    """The page and its pictures. `names`: the recipes that there should be results of; those that lack one of a batch
    and temperature are named below its table. Raises ValueError where there is no result of any.
    """
    import matplotlib

    ours = [r for r in results if r["name"] in names]
    if not ours:
        raise ValueError(
            "there is no result of a recipe; run tools/bench/bench_speculation.py before --page"
        )
    matplotlib.use("Agg")
    pictures = folder / "speculation"
    pictures.mkdir(parents=True, exist_ok=True)
    theirs = next((r for r in results if r["name"] == "transformers"), None)
    by = {key: [r for r in ours if _key(r) == key] for key in sorted({_key(r) for r in ours})}
    first = next(iter(by.values()))  # one at a time and greedy, where that was measured
    _speedups(pictures / "speedup.png", by, [n for n in names if any(r["name"] == n for r in ours)])
    _places(pictures / "places.png", first)
    _stages(pictures / "stages.png", first)
    tables: list[str] = []
    for key, found in by.items():
        missing = [f"`{name}`" for name in names if all(r["name"] != name for r in found)]
        left = [f"Not measured: {', '.join(missing)}.", ""] if missing else []
        tables += [f"### {_told(key)}", "", *_table(found), "", *left, *_costs(found), ""]
    text = TEMPLATE.read_text(encoding="utf-8").format(
        prompts=ours[0]["prompts"], tokens=ours[0]["new_tokens"], repeat=ours[0]["repeat"],
        tables="\n".join(tables).rstrip(), peers="\n".join(_peers(theirs, by.get((0.0, 1), []))),
    )  # fmt: skip
    (folder / "speculation.md").write_text(text.rstrip() + "\n", encoding="utf-8")


def ratios(results: list[Result]) -> list[str]:
    """Lines of two tables of each batch and temperature: the ratios of each recipe and kind, and what a check takes."""
    found = list[str]()
    for key in sorted({_key(r) for r in results}):
        some = [r for r in results if _key(r) == key]
        found += ["", _told(key), "", *_table(some), "", *_costs(some)]
    return found


def _key(result: Result) -> tuple[float, int]:
    return result["temperature"], result["batch"]


def _told(key: tuple[float, int]) -> str:
    temperature, batch = key
    rows = "One prompt at a time" if batch == 1 else f"{batch} prompts at a time"
    return f"{rows}, temperature {temperature:g}" if temperature else f"{rows}, greedy"


def _table(results: list[Result]) -> list[str]:
    kinds = [r["kind"] for r in results[0]["rows"]]
    rows = [
        "| recipe | " + " | ".join(kinds) + " | tokens/check | least | equal |",
        "|---" * (len(kinds) + 4) + "|",
    ]
    for r in results:
        cells = [f"{x['speedup']:.2f}" for x in r["rows"]]
        each = [x["tokens_per_check"] for x in r["rows"]]
        rows.append(
            f"| `{r['name']}` | " + " | ".join(cells) + f" | {min(each):.2f}–{max(each):.2f} | "
            f"{min(x['slowest'] for x in r['rows']):.2f} | {_equal(r)} |"
        )
    return rows


def _equal(result: Result) -> str:
    """Prompts whose tokens are those of plain decoding, of all."""
    rows = result["rows"]
    return f"{sum(x['equal'] for x in rows)}/{result['prompts'] * len(rows)}"


def _costs(results: list[Result]) -> list[str]:
    """Lines of a table: what each recipe gains and takes over all kinds, each kind as much."""
    stages = list(STAGES)
    rows = [
        "| recipe | speed | tokens/check | drafted that stand | "
        + " | ".join(f"{stage}, ms" for stage in stages)
        + " | plain step, ms | bytes | equal |",
        "|---" * (len(stages) + 7) + "|",
    ]
    for r in results:
        of = r["rows"]
        speed = geometric_mean(x["speedup"] for x in of)
        each = fmean(x["tokens_per_check"] for x in of)
        stood = fmean(x["accepted"] for x in of)
        spent = [fmean(x["milliseconds"].get(stage, 0.0) for x in of) for stage in stages]
        plain = fmean(1000 * r["batch"] / x["plain_tokens_per_second"] for x in of)
        cells = [f"{speed:.2f}", f"{each:.2f}", f"{stood:.0%}"]
        cells += [f"{value:.2f}" for value in (*spent, plain)]
        cells += [f"{r['draft_bytes']:,}", _equal(r)]
        rows.append(f"| `{r['name']}` | " + " | ".join(cells) + " |")
    return rows


def _peers(theirs: Result | None, ours: list[Result]) -> list[str]:
    """Tokens a second of both, where transformers was measured."""
    if theirs is None:
        return []
    ways = [w for w in theirs["rows"][0] if w != "kind"]
    mine = [r for r in ours if r["name"] in ("prompt-lookup", "draft-model")]
    heads = [f"transformers {w.removeprefix('transformers ')}" for w in ways] + [
        f"`{r['name']}`" for r in mine
    ]
    rows = ["| prompts | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for i, row in enumerate(theirs["rows"]):
        found = [row[w] for w in ways] + [r["rows"][i]["whole_tokens_per_second"] for r in mine]
        rows.append(f"| {row['kind']} | " + " | ".join(f"{x:.0f}" for x in found) + " |")
    return rows


def _speedups(
    file: Path, by: Mapping[tuple[float, int], list[Result]], names: Sequence[str]
) -> None:
    """A field for each recipe and kind of prompt, a part for each batch and temperature; what was not measured is
    empty.
    """
    import matplotlib.pyplot as plt
    import numpy as np
    from matplotlib.colors import TwoSlopeNorm

    kinds = [x["kind"] for x in next(iter(by.values()))[0]["rows"]]
    figure, parts = plt.subplots(
        1, len(by), figsize=(1.8 + 3.4 * len(by), 1.2 + 0.3 * len(names)), layout="constrained",
        sharey=True, squeeze=False,
    )  # fmt: skip
    most = max([2.0, *(x["speedup"] for found in by.values() for r in found for x in r["rows"])])
    for axes, (key, found) in zip(parts[0], by.items(), strict=True):
        values = np.full((len(names), len(kinds)), np.nan)
        for r in found:
            values[names.index(r["name"])] = [x["speedup"] for x in r["rows"]]
        axes.imshow(values, cmap="RdYlGn", norm=TwoSlopeNorm(1.0, 0.5, most), aspect="auto")
        for y, x in zip(*np.nonzero(~np.isnan(values)), strict=True):
            axes.text(x, y, f"{values[y, x]:.2f}", ha="center", va="center", color=INK, fontsize=7)
        axes.set_xticks(range(len(kinds)), kinds, fontsize=7)
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.set_title(_told(key), fontsize=9, color=INK)
    figure.suptitle("Speed with drafts, that of plain decoding being 1", fontsize=10, color=INK)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def _places(file: Path, results: list[Result]) -> None:
    """How likely the token at each place of a draft stands, where those before it do."""
    import matplotlib.pyplot as plt

    kinds = [r["kind"] for r in results[0]["rows"]]
    colours = plt.get_cmap("tab20").colors
    figure, grid = plt.subplots(
        2,
        3,
        figsize=(10, max(5.0, 1 + 0.2 * len(results))),
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    for axes, (i, kind) in zip(grid.flat, enumerate(kinds), strict=False):
        for n, r in enumerate(results):
            found = r["rows"][i]["by_place"][:PLACES]
            axes.plot(
                range(1, len(found) + 1), found, marker="o", markersize=3, linewidth=1, label=r["name"],
                color=colours[n % len(colours)], linestyle=LINES[n // len(colours) % len(LINES)],
            )  # fmt: skip
        axes.set_title(kind, fontsize=9, color=INK)
        axes.set_ylim(-0.03, 1.03)
        axes.grid(alpha=0.3)
    figure.supxlabel("place in the draft", fontsize=9)
    figure.supylabel("share that stands", fontsize=9)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=8)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def _stages(file: Path, results: list[Result]) -> None:
    """Where the time of rounds goes, over all prompts."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 0.9 + 0.32 * len(results)), layout="constrained")
    for y, r in enumerate(results):
        left = 0.0
        for stage, colour in STAGES.items():
            share = sum(x["shares"].get(stage, 0.0) for x in r["rows"]) / len(r["rows"])
            axes.barh(y, share, left=left, color=colour, label=stage if not y else None)
            left += share
    axes.set_yticks(range(len(results)), [r["name"] for r in results])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of the time of rounds", fontsize=9)
    figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(file, dpi=120)
    plt.close(figure)
