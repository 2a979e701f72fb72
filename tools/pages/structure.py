"""Draw the folders of the package and what imports what: docs/pictures/structure.svg.

    python tools/pages/structure.py

Each arrow leads from a folder to one that it imports; an arrow that follows from two others is left out.
"""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

import matplotlib
import networkx as nx
from statements import imports

matplotlib.use("svg")
from matplotlib import pyplot

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("ir", "passes", "lowering", "runtime", "api")  # the lowest first
COLOURS = dict(zip(LAYERS, ("#4c72b0", "#55a868", "#c44e52", "#8172b3", "#937860"), strict=True))
WIDE = 9  # folders in a row of the picture


def modules() -> dict[str, Path]:
    """Module -> its file."""
    found = {}
    for layer in LAYERS:
        for path in sorted((ROOT / layer).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = ("accel", *(parts[1:] if layer == "api" else parts))
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def folder(path: Path) -> str:
    """Two levels of it."""
    return "/".join(path.parent.relative_to(ROOT).parts[:2])


def graph() -> nx.DiGraph:
    """Folder -> the folders that it imports."""
    known, found = modules(), nx.DiGraph()
    for path in known.values():
        for node in imports(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom):
                continue
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                target = known.get(name) or known.get(str(node.module))
                if target is not None and folder(target) != folder(path):
                    found.add_edge(folder(path), folder(target))
    return found


def places(found: nx.DiGraph) -> dict[str, tuple[float, float]]:
    """Each folder stands above all that it imports; layers are bands."""
    at: dict[str, tuple[float, float]] = {}
    row = 0
    for layer in LAYERS:
        names = [
            n
            for n in nx.lexicographical_topological_sort(found.reverse())
            if n.split("/")[0] == layer
        ]
        height: dict[str, int] = {}
        for name in names:
            below = [height[n] for n in found.successors(name) if n in height]
            height[name] = max(below, default=-1) + 1
        for level in sorted(set(height.values())):
            line = [n for n in names if height[n] == level]
            for start in range(0, len(line), WIDE):
                part = line[start : start + WIDE]
                for i, name in enumerate(part):
                    at[name] = (i - (len(part) - 1) / 2, row)
                row += 1
        row += 1
    return at


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=raw).parse_args()
    found = graph()
    circles = [sorted(c) for c in nx.strongly_connected_components(found) if len(c) > 1]
    if circles:
        raise SystemExit(f"these folders import one another: {circles}")
    drawn, at = nx.transitive_reduction(found), places(found)
    figure, axes = pyplot.subplots(figsize=(8.5, 10.5))
    for a, b in sorted(drawn.edges):
        (x, y), (u, v) = at[a], at[b]
        style = {
            "arrowstyle": "-|>",
            "color": COLOURS[a.split("/")[0]],
            "alpha": 0.45,
            "linewidth": 0.9,
        }
        bend = f"arc3,rad={0.08 if x <= u else -0.08}"
        axes.annotate(
            "", (u, v + 0.28), (x, y - 0.28), arrowprops={**style, "connectionstyle": bend}
        )
    for name, (x, y) in at.items():
        layer, _, rest = name.partition("/")
        axes.text(
            x, y, rest or layer, ha="center", va="center", fontsize=9, color="white",
            bbox={"boxstyle": "round,pad=0.35", "facecolor": COLOURS[layer], "edgecolor": "none"},
        )  # fmt: skip
    for layer in LAYERS:
        rows = [y for name, (_, y) in at.items() if name.split("/")[0] == layer]
        axes.text(-2.6, sum(rows) / len(rows), layer, ha="right", va="center",
                  fontsize=13, color=COLOURS[layer], weight="bold")  # fmt: skip
    axes.set(xlim=(-3.6, 2.4), ylim=(-0.7, max(y for _, y in at.values()) + 0.7))
    axes.axis("off")
    figure.tight_layout()
    matplotlib.rcParams["svg.hashsalt"] = "accel"
    out = ROOT / "docs" / "pictures" / "structure.svg"
    figure.savefig(out, metadata={"Date": None})
    print(f"{out.relative_to(ROOT)}: {len(at)} folders")


if __name__ == "__main__":
    main()
