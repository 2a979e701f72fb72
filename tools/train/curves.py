"""A picture of a run's log: loss by kind of text, held-out loss, and how often each exit agrees."""

from __future__ import annotations

import json
from pathlib import Path


def draw(folder: Path) -> None:
    """`curves.png` from `log.jsonl`; nothing where the log has fewer than two lines."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    if len(lines) < 2:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    tokens = [line["tokens"] / 1e6 for line in lines]
    for kind in dict.fromkeys(kind for line in lines for kind in line["loss"]):
        points = [
            (at, line["loss"][kind])
            for at, line in zip(tokens, lines, strict=True)
            if kind in line["loss"]
        ]
        left.plot(*zip(*points, strict=True), label=kind, linewidth=1)
    left.plot(tokens, [line["held_out"] for line in lines], "k", label="held out")
    left.set(xlabel="million tokens", ylabel="loss (nats per token)", ylim=(0, 6))
    left.legend(fontsize=7, ncols=2)
    for layer in range(len(lines[0]["exits"]) - 1):
        right.plot(
            tokens, [100 * line["exits"][layer] for line in lines], label=f"layer {layer + 1}"
        )
    right.set(xlabel="million tokens", ylabel="exit agrees with the last layer, %", ylim=(0, 100))
    right.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(folder / "curves.png", dpi=110)
    pyplot.close(figure)
