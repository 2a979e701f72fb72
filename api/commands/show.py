"""A build report and a model's layers, as tables: what `build` and `inspect` share."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from accel.commands.console import error_text, pairs, size, table


def show_layers(layers: list[dict[str, Any]], state: dict[int, int] | None = None) -> None:
    """Runs of equal layers: what each attends to, its heads, the bytes that one token adds."""

    def kind(pair: tuple[int, dict[str, Any]]) -> list[object]:
        index, layer = pair
        heads = (layer.get(n) for n in ("num_heads", "num_kv_heads", "head_dim"))
        kept = [size(state.get(index, 0))] if state is not None else []
        return [layer.get("attention", "?"), layer.get("window") or "-", *heads, *kept]

    columns = ["layers", "attention", ">window", ">heads", ">kv heads", ">head size"]
    if state is not None:
        columns.append(">state/token")
    rows: list[list[object]] = []
    for key, run in groupby(enumerate(layers), kind):
        indices = [index for index, _ in run]
        name = f"{indices[0]}-{indices[-1]}" if len(indices) > 1 else f"{indices[0]}"
        rows.append([name, *key])
    if rows:
        table(columns, rows)


def show_steps(steps: list[dict[str, Any]]) -> None:
    """The passes, and below them why they left something as it was."""
    rows = [
        [s["name"], s["changed"], len(s["refused"]), f"{s['seconds']:.2f}", error_text(s["error"])]
        for s in steps
    ]
    if rows:
        table(["pass", ">changed", ">refused", ">seconds", ">largest error"], rows)
    pairs(
        [(f"{s['name']} refused", reason) for s in steps for reason in dict.fromkeys(s["refused"])]
    )


def show_report(report: dict[str, Any]) -> None:
    """What was built, how long it took and how exact it is."""
    model, total = report["model"], report["bytes"].get("total", 0)
    files = ", ".join(f"{n} {size(b)}" for n, b in report["bytes"].items() if n != "total")
    entries = ", ".join(f"{name} ({nodes} nodes)" for name, nodes in report["entries"].items())
    seconds = ", ".join(f"{n} {s:.1f}" for n, s in report["seconds"].items() if n != "total")
    errors = ", ".join(f"{name} {error_text(e)}" for name, e in report["errors"].items())
    show_layers(model["layers"])
    show_steps(report["steps"])
    pairs([
        ("model", f"{model['name']}, {model['parameters']:,} parameters"),
        ("recipe", f"{report['recipe']['name']} ({report['grade']})"),
        ("layers", model["num_layers"] or "none found: the model is one piece"),
        ("entries", entries),
        ("bytes", f"{size(total)}: {files}" if files else ""),
        ("state", f"{size(report['kv_bytes_per_token'])} per token"),
        ("seconds", f"{report['seconds']['total']:.1f}: {seconds}"),
        ("largest error", errors),
        ("peak memory", size(report["peak_memory"]) if report["peak_memory"] else ""),
        *(("note", note) for note in report["notes"]),
    ])  # fmt: skip


def state_per_token(state: Any) -> dict[int | None, int]:
    """Bytes that one more token adds, by layer; None holds what layers share."""
    import math

    import numpy as np

    found: dict[int | None, int] = {}
    for value in state:
        if "C" in value.shape:
            sizes = [d for d in value.shape if not isinstance(d, str)]
            bytes_ = math.prod(sizes) * np.dtype(value.dtype).itemsize
            found[value.layer] = found.get(value.layer, 0) + bytes_
    return found
