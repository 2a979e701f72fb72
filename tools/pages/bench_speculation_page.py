"""docs/figures/speculation.md and its pictures, out of what tools/bench/bench_speculation.py measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEMPLATE = Path(__file__).with_name("speculation.md")  # the page, and what people wrote on it
INK, STAGES = "#1f2937", {"draft": "#ff7f0e", "verify": "#1f77b4", "host": "#7f7f7f"}
PLACES = 10
Result = dict[str, Any]


def write(folder: Path, results: list[Result]) -> None:
    """The page and its pictures."""
    import matplotlib

    matplotlib.use("Agg")
    pictures = folder / "speculation"
    pictures.mkdir(parents=True, exist_ok=True)
    ours = [r for r in results if r["name"] != "transformers"]
    theirs = next((r for r in results if r["name"] == "transformers"), None)
    _speedups(pictures / "speedup.png", ours)
    _places(pictures / "places.png", ours)
    _stages(pictures / "stages.png", ours)
    first = ours[0]
    text = TEMPLATE.read_text(encoding="utf-8").format(
        prompts=first["prompts"], tokens=first["new_tokens"], repeat=first["repeat"],
        table="\n".join(_table(ours)), peers="\n".join(_peers(theirs, ours)),
    )  # fmt: skip
    (folder / "speculation.md").write_text(text.rstrip() + "\n", encoding="utf-8")


def _table(results: list[Result]) -> list[str]:
    kinds = [r["kind"] for r in results[0]["rows"]]
    rows = [
        "| recipe | " + " | ".join(kinds) + " | tokens/check | least | equal |",
        "|---" * (len(kinds) + 4) + "|",
    ]
    for r in results:
        cells = [f"{x['speedup']:.2f}" for x in r["rows"]]
        each = [x["tokens_per_check"] for x in r["rows"]]
        equal, asked = sum(x["equal"] for x in r["rows"]), r["prompts"] * len(kinds)
        rows.append(
            f"| `{r['name']}` | " + " | ".join(cells) + f" | {min(each):.2f}–{max(each):.2f} | "
            f"{min(x['slowest'] for x in r['rows']):.2f} | {equal}/{asked} |"
        )
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


def _speedups(file: Path, results: list[Result]) -> None:
    """A field for each recipe and kind of prompt."""
    import matplotlib.pyplot as plt
    from matplotlib.colors import TwoSlopeNorm

    kinds = [r["kind"] for r in results[0]["rows"]]
    values = [[x["speedup"] for x in r["rows"]] for r in results]
    figure, axes = plt.subplots(figsize=(7.5, 1.2 + 0.42 * len(results)), layout="constrained")
    most = max(2.0, *(v for row in values for v in row))
    axes.imshow(values, cmap="RdYlGn", norm=TwoSlopeNorm(1.0, 0.5, most), aspect="auto")
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            axes.text(x, y, f"{value:.2f}", ha="center", va="center", color=INK, fontsize=9)
    axes.set_xticks(range(len(kinds)), kinds)
    axes.set_yticks(range(len(results)), [r["name"] for r in results])
    axes.set_title("Speed with drafts, that of plain decoding being 1", fontsize=10, color=INK)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def _places(file: Path, results: list[Result]) -> None:
    """How likely the token at each place of a draft stands, where those before it do."""
    import matplotlib.pyplot as plt

    kinds = [r["kind"] for r in results[0]["rows"]]
    figure, grid = plt.subplots(
        2, 3, figsize=(9, 5), sharex=True, sharey=True, layout="constrained"
    )
    for axes, (i, kind) in zip(grid.flat, enumerate(kinds), strict=False):
        for r, colour in zip(results, plt.get_cmap("tab20").colors, strict=False):
            found = r["rows"][i]["by_place"][:PLACES]
            places = range(1, len(found) + 1)
            axes.plot(
                places, found, marker="o", markersize=3, linewidth=1, color=colour, label=r["name"]
            )
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
