"""An explanation as words and tables, which the terminal and the page share, and as a page with pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accel.compiler.explain.costs import Prediction
from accel.compiler.explain.drawing import picture as drawn
from accel.compiler.explain.explain import Explanation, Rewrite
from accel.compiler.layer_summary import bytes_text, picture
from accel.compiler.report import rendered


def write_page(path: Path, e: Explanation) -> None:
    """Write it as one file that fetches nothing."""
    from markupsafe import Markup

    pictures, chains = [], []
    if e.pictures is not None:
        before, after = e.pictures
        pictures = [
            ("with base", Markup(drawn(before))),
            (f"with {e.recipe.name}", Markup(drawn(after))),
        ]
        if after.otherwise is not None:
            pictures.append(("where the layer is skipped", Markup(drawn(after.otherwise))))
        chains = [Markup(picture(side["layers"], side["state"])) for side in (e.before, e.after)]
    columns, rows = costs(e)
    near = e.nearest.recipe if e.nearest is not None else None
    path.write_text(
        rendered(
            "explain.html", e=e, grade=grade(e), nearest=nearest(e), facts=_facts(e), notes=e.notes,
            tables=near.tables if near is not None else {}, effects=[effect(r) for r in e.rewrites],
            pictures=pictures, chains=chains, picture_title=title(e), columns=columns, rows=rows, rests=rests(e),
        ),
        encoding="utf-8",
    )  # fmt: skip


def grade(e: Explanation) -> str:
    """The promise, and what is declared of the logits."""
    if not e.grade:
        return ""
    said = {
        "lossless": "same tokens as the model, up to rounding from a different summation order",
        "distribution-exact": "each token has the model's own probabilities",
        "approximate": "tokens may differ from the model's",
    }[e.grade]
    bound = (
        f"; declared to change the logits by up to {e.error:g} of the largest" if e.error else ""
    )
    return f"{e.grade}: {said}{bound}"


def effect(r: Rewrite) -> str:
    """What a pass did, in a line."""
    parts = [f"{r.changed} sites"]
    parts += [f"{name} {a} → {b}" for name, (a, b) in r.operators.items()]
    parts += [f"a new entry '{name}'" for name in r.entries]
    a, b = r.bytes_per_token
    parts += [f"state {bytes_text(a)} → {bytes_text(b)} per token"] if a != b else []
    return "; ".join(parts)


def nearest(e: Explanation) -> str:
    """The recipe that works in place of one that is refused."""
    if e.nearest is None:
        return ""
    if e.nearest.recipe is None:
        return f"No small change of the recipe works ({e.nearest.tried} were tried)."
    return f"The nearest recipe that works: {e.recipe.name} {e.nearest.change}"


def title(e: Explanation) -> str:
    """Which layer is drawn, and why."""
    count = len(e.changed_layers)
    if not count:
        same = (
            "no layer changes"
            if len(e.after["layers"]) == len(e.before["layers"])
            else "those that stay"
        )
        return f"Layer {e.drawn}, before and after ({same})"
    return f"Layer {e.drawn}, before and after ({count} of {len(e.before['layers'])} drawn layers change)"


def costs(e: Explanation) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: base, the recipe, their ratio."""
    if e.cache is None or e.cache_base is None or e.weights is None or e.weights_base is None:
        return [], []
    base, made = e.cache_base, e.cache
    rows = [_row("KV of a token", base.slot, made.slot)]
    if made.kept_slot:
        rows.append(["KV per kept token", "", bytes_text(made.kept_slot), ""])
    for prompt in made.tokens:
        rows.append(_row(f"KV after a prompt of {prompt}", base.bytes(prompt), made.bytes(prompt)))
    rows.append(_row("weights read per token", e.weights_base.total, e.weights.total))
    rows += _depths(e)
    for prompt, pair in e.speed.items():
        rows.append(_speed(f"tokens/s after {prompt}, predicted", *pair))
    return ["", "base", e.recipe.name, "ratio"], rows


def _depths(e: Explanation) -> list[list[str]]:
    """The share of the layers that decoding runs for a token, or of each of their branches; none where it runs all
    and a call cannot say otherwise. A share, since a large model is drawn with fewer layers than it has.
    """
    base, depth = len(e.before["layers"]), e.after.get("depth")
    if depth is None:
        count = len(e.after["layers"])
        found = {"attentions": count} if count < base else {}
    elif depth["mlp"] is None:
        found = {"layers": sum(depth["plan"])}
    else:
        found = {"attentions": sum(depth["plan"]), "MLPs": sum(depth["mlp"])}
    return [
        [f"{name} run for a token", "100%", f"{count / base:.0%}", f"{count / base:.2f}"]
        for name, count in found.items()
    ]


def _row(name: str, a: float, b: float) -> list[str]:
    return [name, bytes_text(a), bytes_text(b), f"{b / a:.2f}" if a else ""]


def _speed(name: str, a: Prediction | str, b: Prediction | str) -> list[str]:
    shown = [f"{x.tokens_per_second:.3g}" if isinstance(x, Prediction) else "–" for x in (a, b)]
    both = isinstance(a, Prediction) and isinstance(b, Prediction)
    return [name, *shown, f"{b.tokens_per_second / a.tokens_per_second:.2f}" if both else ""]  # type: ignore[union-attr]


def rests(e: Explanation) -> list[str]:
    """What the figures rest on."""
    if e.cache is None:
        return []
    lines = [
        "Bytes are computed from the state layout and the budget, with slots allocated by 256."
    ]
    depth = e.after.get("depth") or {}
    if any(depth.get("until") or ()):
        tokens = max(depth["until"])
        lines.append(
            f"Layers, weights and speed are for tokens from {tokens} after the prompt on; more run before."
        )
    if depth.get("threshold") is not None or depth.get("by_prompt") is not None:
        lines.append(
            "Layers, weights and speed are for a token that runs all; which ones pass some by depends on the text."
        )
    if any(m.axis == "loop" for m in e.methods):
        lines.append(
            "Figures assume one call per token. How many tokens the loop gains per call depends on the text; "
            "accel-compile bench measures it, with --speculation for recipes that draft."
        )
    r = e.rates
    if r is None:
        return lines
    large = {k: f"{pair[1] / 1e9:.1f}" for k, pair in r.weights.items()}
    held = {k: f"{pair[1] / 1e9:.1f}" for k, pair in r.caches.items()}
    by = "accel's operators" if r.native else "onnxruntime's operators"
    lines.append(
        f"Speed: bytes over this machine's measured rates with {by}, {e.threads} threads, in GB/s: weights "
        + ", ".join(f"{k} {v}" for k, v in large.items())
        + ", KV "
        + ", ".join(f"{k} {v}" for k, v in held.items())
        + " (faster if all data fits in a processor cache). docs/figures/details/builds.md has the measured error."
    )
    lines += [
        f"Not predicted: {x}." for pair in e.speed.values() for x in pair if isinstance(x, str)
    ][:1]
    return lines


def _facts(e: Explanation) -> list[tuple[str, Any]]:
    """The figures at the top of the page."""
    columns, rows = costs(e)
    return [(row[0], f"{row[2]} ({row[3]}×)" if row[3] else row[2]) for row in rows]
