"""The build report as a page that people look at: one file, nothing fetched, everything escaped."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accel.compiler.layer_summary import bytes_text, picture, why_not
from accel.ir.sizes import grows, per_slot
from accel.ir.state import Part, Writer, by_row, ragged_heads, writer_of

TEMPLATES = Path(__file__).parent
WIDE, HALF = 7.2, 4.4  # inches of a picture; the page scales it down where it must
INK, BAR, FAINT = "#1f2937", "#2f6f9f", "#d5dbe3"
FLOOR = 1e-9  # an error of exactly 0 is drawn here, on a logarithmic axis


def write_html(path: Path, report: dict[str, Any]) -> None:
    """Write a self-contained page of a build report (`CompiledModel.report`)."""
    path.write_text(rendered("report.html", **_context(report)), encoding="utf-8")


def rendered(template: str, **context: Any) -> str:
    """A page of the templates that lie here."""
    from jinja2 import Environment, FileSystemLoader

    pages = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True)
    pages.filters.update(bytes=bytes_text, error=_error, code=_code)
    return pages.get_template(template).render(**context)


def _context(report: dict[str, Any]) -> dict[str, Any]:
    """What the template shows, each part empty where the report does not tell."""
    from markupsafe import Markup

    model = report.get("model", {})
    steps = report.get("steps", [])
    sizes = {n: b for n, b in report.get("bytes", {}).items() if n != "total"}
    seconds = {n: s for n, s in report.get("seconds", {}).items() if n != "total"}
    state = state_bytes(report["state"]) if "state" in report else None
    layers = kinds(model.get("layers", []), state)
    checked = {s["name"]: s["error"] for s in steps if s["error"] is not None}
    return {
        "model": model,
        "recipe": report.get("recipe", {}),
        "report": report,
        "facts": _facts(report, model),
        "kinds": layers,
        "chain": Markup(picture(model.get("layers", []), report.get("state", []), why_not(report))),
        "steps": steps,
        "notes": report.get("notes", []),
        "bytes_picture": _bars(sizes, "bytes", {n: bytes_text(b) for n, b in sizes.items()}),
        "seconds_picture": _bars(seconds, "seconds", {n: f"{s:.2f} s" for n, s in seconds.items()}),
        "error_picture": _errors(checked),
    }


def _facts(report: dict[str, Any], model: dict[str, Any]) -> list[tuple[str, str]]:
    """The figures at the top of the page."""
    errors = [e for e in report.get("errors", {}).values() if e is not None]
    mapped = report.get("kv_mapped_per_token", 0)
    return [
        ("parameters", f"{model.get('parameters', 0):,}"),
        ("layers", str(model.get("num_layers", 0))),
        ("vocabulary", f"{model.get('vocab_size', 0):,}"),
        ("context", f"{model.get('max_context', 0):,} tokens"),
        ("artifact", bytes_text(report.get("bytes", {}).get("total", 0))),
        ("state per token", bytes_text(report.get("kv_bytes_per_token", 0))),
        *([("of it in mapped files", bytes_text(mapped))] if mapped else []),
        *_weights(report.get("weights", {}), report.get("loss", {})),
        *_encoder(model.get("encoder"), report.get("state", [])),
        *adapters_text(model.get("adapters"), bytes_text),
        ("built in", f"{report.get('seconds', {}).get('total', 0):.1f} s"),
        ("largest error", _error(max(errors, default=None))),
    ]


def _weights(weights: Mapping[str, Any], lost: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Figures of weights in fewer bits, and of what was lost, where there are some."""
    found = [("bits per weight", f"{weights['bits_per_weight']:.3g}")] if weights else []
    if lost:
        against = f"{lost['perplexity']:.4g}, float32 {lost['perplexity_float32']:.4g}"
        found += [("KL from float32", f"{lost['kl']:.2g}"), ("perplexity", against)]
    return found


def _encoder(
    encoder: Mapping[str, Any] | None, state: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str]]:
    """Figures of an encoder, where there is one."""
    if encoder is None:
        return []
    shape = " × ".join(str(n) for n in encoder["features"])
    takes = f"{shape} features" if shape else f"{encoder['max_length']:,} tokens"
    return [
        ("encoder input", takes),
        ("state per encoder position", bytes_text(cross_bytes(state))),
    ]


def state_bytes(state: Sequence[Mapping[str, Any]]) -> dict[int | None, int]:
    """Bytes that one more token adds, by layer; under None what the layers share."""
    import numpy as np

    found: dict[int | None, float] = {}
    for value in state:
        if grows(value["shape"]):
            size = per_slot(value["shape"]) * np.dtype(value["dtype"]).itemsize
            found[value["layer"]] = found.get(value["layer"], 0) + size
    return {layer: math.ceil(size) for layer, size in found.items()}


def state_text(state: Sequence[Mapping[str, Any]], size: Callable[[int], str]) -> str:
    """What the state takes: bytes that each token adds, bytes that each row always has."""
    import numpy as np

    fixed = kept = 0
    heads = ragged_heads(state)
    for value in state:
        if not grows(value["shape"]) and writer_of(value["role"]) is not Writer.ENCODE:
            sizes = (d for d in value["shape"] if not isinstance(d, str))
            count = math.prod(sizes) * np.dtype(value["dtype"]).itemsize
            if writer_of(value["role"]) is not Writer.STEP and not by_row(value["role"]):
                kept += count * heads.get(value["layer"], 1)
            else:
                fixed += count
    text = f"{size(sum(state_bytes(state).values()))} per token"
    snapshot = sum(
        math.prod(d for d in value["shape"] if not isinstance(d, str))
        * np.dtype(value["dtype"]).itemsize
        for value in state
        if value["role"] == Part.RECURRENT
    )
    more = f", {size(kept)} per kept token" if kept else ""
    more += f", {size(fixed)} per row, independent of length" if fixed else ""
    back = f" (rewinding recomputes some tokens from snapshots of {size(snapshot)})"
    return text + more + (back if snapshot else "")


def weights_text(weights: Mapping[str, Any], size: Callable[[int], str]) -> list[tuple[str, str]]:
    """What storing weights in fewer bits saved; nothing where it was not done."""
    if not weights:
        return []
    return [
        ("weights", f"{weights['bits_per_weight']:.3g} bits per weight, {size(weights['bytes'])}")
    ]


def loss_text(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was lost on a text, and what loses less; nothing where nothing approximates."""
    lost = report.get("loss", {})
    if not lost:
        return [("loss", "not measured")] if report.get("weights") else []
    text = {"given": "the text given", "bundled": "accel's own text", "random": "random tokens"}
    said = (
        f"KL {lost['kl']:.2g} per token (1 in 100 above {lost['kl_99']:.2g}); perplexity {lost['perplexity']:.4g}, in "
        f"float32 {lost['perplexity_float32']:.4g} ({lost['tokens']:,} tokens of {text[lost['text']]})"
    )
    return [("loss", f"{said}; {lost['advice']}" if lost.get("advice") else said)]


def adapters_text(
    adapters: Mapping[str, Any] | None, size: Callable[[int], str]
) -> list[tuple[str, str]]:
    """The adapters that sessions choose; nothing where there are none."""
    if not adapters:
        return []
    each = (
        f"{name} (rank {rank}, {size(adapters['bytes'][name])})"
        for name, rank in adapters["ranks"].items()
    )
    return [("adapters", f"{', '.join(each)}; of {len(adapters['modules'])} modules")]


def cross_bytes(state: Sequence[Mapping[str, Any]]) -> int:
    """Bytes of cross state for one position of a row's encoder input."""
    import numpy as np

    total = 0
    for value in state:
        if writer_of(value["role"]) is Writer.ENCODE:
            axis = 1 if len(value["shape"]) == 2 else 2  # of positions
            sizes = (d for i, d in enumerate(value["shape"]) if i not in (0, axis))
            total += math.prod(sizes) * np.dtype(value["dtype"]).itemsize
    return total


def kinds(
    layers: Sequence[Mapping[str, Any]], state: Mapping[int | None, int] | None = None
) -> list[dict[str, Any]]:
    """Each different layer once: its facts, `layers`: those that are so, `which`: "0-3, 5", and
    `state`: bytes per token, by default those of a dense float32 K and V.
    """
    names = ("attention", "window", "num_heads", "num_kv_heads", "head_dim", "nodes")
    found: dict[tuple[Any, ...], list[int]] = {}
    for index, layer in enumerate(layers):
        if state is None:
            kept = 8 * layer.get("num_kv_heads", 0) * layer.get("head_dim", 0)
        else:
            kept = state.get(index, 0)
        found.setdefault((*(layer.get(n) for n in names), kept), []).append(index)
    return [
        {
            **dict(zip((*names, "state"), key, strict=True)),
            "layers": numbers,
            "which": _which(numbers),
        }
        for key, numbers in found.items()
    ]


def _which(numbers: list[int]) -> str:
    """Ascending numbers, runs of neighbours as ranges: 0-3, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _bars(values: dict[str, float], name: str, labels: dict[str, str]) -> str:
    """Horizontal bars, the first on top, each with its label; "" for nothing."""
    if not values:
        return ""
    figure, axes = _figure(list(values), HALF)
    axes.barh(range(len(values)), list(values.values()), color=BAR, height=0.62)
    most = max(values.values()) or 1
    for row, (key, value) in enumerate(values.items()):
        axes.text(value + most * 0.012, row, labels[key], va="center", fontsize=9, color=INK)
    axes.set_xlim(0, most * 1.3)
    axes.set_xticks([])
    axes.spines[["bottom"]].set_visible(False)
    return _svg(figure, name)


def _errors(errors: dict[str, float]) -> str:
    """The largest error after each pass that was checked, on a logarithmic axis; exact ones hollow."""
    if not errors:
        return ""
    figure, axes = _figure(list(errors), WIDE)
    values = [max(e, FLOOR) for e in errors.values()]
    axes.set_xscale("log")
    axes.hlines(range(len(values)), FLOOR, values, color=FAINT, linewidth=2, zorder=1)
    for row, (error, value) in enumerate(zip(errors.values(), values, strict=True)):
        axes.scatter(
            value, row, s=38, zorder=2, edgecolors=BAR, facecolors=BAR if error else "#ffffff"
        )
        axes.text(value * 1.5, row, _error(error), va="center", fontsize=9, color=INK)
    axes.set_xlim(FLOOR * 0.7, max(1e-5, *values) * 30)
    axes.minorticks_off()
    axes.grid(axis="x", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    return _svg(figure, "errors")


def _figure(names: list[str], width: float) -> tuple[Any, Any]:
    """A figure of a row per name, without pyplot and so without global state."""
    from matplotlib.figure import Figure

    height = 0.35 + 0.29 * len(names)
    figure = Figure(figsize=(width, height))
    left = min(0.4, (0.3 + 0.085 * max(map(len, names))) / width)
    axes = figure.add_axes((left, 0.28 / height, 0.98 - left, 1 - 0.33 / height))
    axes.set_yticks(range(len(names)), [_plain(n) for n in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(length=0, labelsize=9, labelcolor=INK)
    return figure, axes


def _svg(figure: Any, name: str) -> str:
    """An inline <svg>, the same for the same figures; ids start with the name, so that none clash."""
    from markupsafe import Markup
    from matplotlib import rc_context

    out = io.StringIO()
    # Text stays text: smaller, searchable, and in the page's own font.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    for before in ('id="', 'href="#', "url(#"):
        text = text.replace(before, f"{before}{name}-")
    return Markup(text)


def _plain(name: str) -> str:
    """A name that matplotlib takes as it is: a dollar sign would start mathematics."""
    return name.replace("$", r"\$")


def _error(error: float | None) -> str:
    return "–" if error is None else "exact" if error == 0 else f"{error:.1e}"


def _code(text: str) -> str:
    """A docstring's text, what it quotes as code."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))
