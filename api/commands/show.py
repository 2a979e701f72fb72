"""A build report and a model's layers, as tables: what `build` and `inspect` share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accel.commands.console import error_text, pairs, size, table
from accel.runtime.report import kinds, state_bytes, state_text


def show_layers(
    layers: Sequence[Mapping[str, Any]], state: Mapping[int | None, int] | None = None
) -> None:
    """Each different layer: what it attends to, its heads, the bytes that one token adds."""
    columns = ["layers", "attention", ">window", ">heads", ">kv heads", ">head size"]
    rows = [
        [
            *(kind["which"], kind["attention"], kind["window"] or "-"),
            *(kind["num_heads"], kind["num_kv_heads"], kind["head_dim"], size(kind["state"])),
        ]
        for kind in kinds(layers, state)
    ]
    if rows:
        table([*columns, ">state/token"], rows)


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
    if all(step["error"] is None for step in report["steps"]):
        errors = "not checked"
    show_layers(model["layers"], state_bytes(report["state"]) if "state" in report else None)
    show_steps(report["steps"])
    pairs([
        ("model", f"{model['name']}, {model['parameters']:,} parameters"),
        ("recipe", f"{report['recipe']['name']} ({report['grade']})"),
        ("layers", model["num_layers"] or "none found: the model is one piece"),
        ("entries", entries),
        ("bytes", f"{size(total)}: {files}" if files else ""),
        ("state", state_text(report["state"], size)),
        ("seconds", f"{report['seconds']['total']:.1f}: {seconds}"),
        ("largest error", errors),
        ("peak memory", size(report["peak_memory"]) if report["peak_memory"] else ""),
        *(("note", note) for note in report["notes"]),
    ])  # fmt: skip
