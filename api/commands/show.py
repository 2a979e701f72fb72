"""A build report and a model's layers, as tables: what `build` and `inspect` share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accel.commands.console import error_text, pairs, size, table
from accel.compiler.layer_summary import groups, summaries, why_not
from accel.compiler.report import adapters_text, loss_text, state_text, weights_text

if TYPE_CHECKING:
    from accel.runtime.backends.tuning import Tuning
    from accel.runtime.decode.costs import Costs


def show_chain(
    layers: Sequence[Mapping[str, Any]], state: Sequence[Mapping[str, Any]], refused: str = ""
) -> None:
    """The layers in order, equal ones as one line, a pattern that repeats as a bracket of lines: what
    each attends to, its heads, its state. `refused`: why they were not outlined.
    """
    rows = []
    for group in groups(summaries(layers, state)):
        for index, (link, count) in enumerate(group.runs):
            last = index == len(group.runs) - 1
            bracket = "" if len(group.runs) == 1 else "┌└│"[0 if not index else 1 if last else 2]
            over = f"{group.times} × {count}" if bracket else count
            heads = [link.heads, link.kv_heads, link.head_dim] if link.heads else ["-", "-", "-"]
            rows.append(
                ["" if index else group.which, bracket, over, link.attention, link.window or "-"]
                + [*heads, link.state()]
            )
    columns = ["layers", "", ">times", "attention", ">window", ">heads", ">kv heads", ">head size"]
    if rows:
        table([*columns, "state"], rows)
    if refused:
        pairs([("not split into layers", refused)])


def show_steps(steps: list[dict[str, Any]]) -> None:
    """The passes, and below them why they left something as it was."""
    rows = [
        [s["name"], s["changed"], len(s["refused"]), f"{s['seconds']:.2f}", error_text(s["error"])]
        for s in steps
    ]
    if rows:
        table(["pass", ">changed", ">left as is", ">seconds", ">largest error"], rows)
    pairs([("note", f"{s['name']} left {reason}") for s in steps for reason in _left(s["refused"])])


def _left(reasons: list[str]) -> list[str]:
    """`node: why`, one line for all nodes of the same reason."""
    nodes: dict[str, list[str]] = {}
    for reason in reasons:
        node, colon, why = reason.partition(": ")
        nodes.setdefault(why if colon else reason, []).append(node if colon else "the model")
    return [_named(list(dict.fromkeys(names)), why) for why, names in nodes.items()]


def _named(names: list[str], why: str) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more} as it is: {why}"


def show_tuning(tuning: Tuning | None, costs: Costs | None) -> None:
    """The variant of the step on this machine, what its kernels cost in each, and the costs of calls."""
    if tuning is None:
        pairs(
            [
                (
                    "kernels",
                    "not measured on this machine yet; --measure or the first use measures them",
                )
            ]
        )
    else:
        pairs([("kernels", f"{tuning.kernels} ({tuning.why})"), *tuning.refused.items()])
        names = list(tuning.costs[0].seconds) if tuning.costs else []
        rows = [
            [c.tokens, c.context, *(f"{c.seconds[n] * 1e3:.3g}" for n in names)]
            for c in tuning.costs
        ]
        if rows:
            table([">tokens", ">slots", *(f">{name} ms" for name in names)], rows)
    if costs is None:
        pairs([("costs of a call", "not measured on this machine yet; --measure measures them")])
        return
    least = costs.seconds[0]
    bars = [
        [
            t,
            f"{s * 1e3:.3g}",
            f"{s / least:.2f}",
            f"{s / least / t:.2f}",
            "█" * round(4 * s / least),
        ]
        for t, s in zip(costs.tokens, costs.seconds, strict=True)
    ]
    table([">tokens", ">ms", ">c(T)/c(1)", ">per token", ""], bars, title="costs of a call")


def seconds_text(report: dict[str, Any]) -> str:
    """Where a build's time went: all of it, and its parts in order."""
    seconds = report.get("seconds", {})
    parts = ", ".join(f"{n} {s:.1f}" for n, s in seconds.items() if n != "total")
    return f"{seconds['total']:.1f}: {parts}" if parts else ""


def show_report(report: dict[str, Any]) -> None:
    """What was built, how long it took and how exact it is."""
    model, total = report["model"], report["bytes"].get("total", 0)
    files = ", ".join(f"{n} {size(b)}" for n, b in report["bytes"].items() if n != "total")
    entries = ", ".join(f"{name} ({nodes} nodes)" for name, nodes in report["entries"].items())
    errors = ", ".join(f"{name} {error_text(e)}" for name, e in report["errors"].items())
    if all(step["error"] is None for step in report["steps"]):
        errors = "not checked"
    show_chain(model["layers"], report["state"], why_not(report))
    show_steps(report["steps"])
    pairs([
        ("model", f"{model['name']}, {model['parameters']:,} parameters"),
        ("recipe", f"{report['recipe']['name']} ({report['grade']})"),
        ("layers", model["num_layers"] or "none found: the model is not split into layers"),
        ("entries", entries),
        ("bytes", f"{size(total)}: {files}" if files else ""),
        *weights_text(report.get("weights", {}), size),
        *loss_text(report),
        *adapters_text(model.get("adapters"), size),
        ("state", state_text(report["state"], size)),
        ("seconds", seconds_text(report)),
        ("largest error", errors),
        ("peak memory", size(report["peak_memory"]) if report["peak_memory"] else ""),
        *(("note", note) for note in report["notes"]),
    ])  # fmt: skip
