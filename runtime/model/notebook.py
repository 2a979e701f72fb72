"""Small HTML for notebooks (`_repr_html_`): text is escaped, nothing is fetched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from accel.ir.facts import Facts

CELL = "text-align:left;vertical-align:top;white-space:pre-wrap"


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table under a title, any value as its text."""
    head = "".join(f"<th style='{CELL}'>{escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td style='{CELL}'>{escape(str(v))}</td>" for v in row) + "</tr>"
        for row in rows
    )
    top = f"<thead><tr>{head}</tr></thead>" if columns else ""
    return f"<div><b>{escape(title)}</b><table>{top}<tbody>{body}</tbody></table></div>"


def model_table(facts: Facts, recipe: dict[str, Any], report: dict[str, Any]) -> str:
    """What a compiled model is: its sizes, the recipe's methods, and what its build found."""
    sizes = report.get("bytes", {})
    methods = {axis: t["use"] for axis, t in recipe.get("tables", {}).items() if "use" in t}
    errors = [e for e in report.get("errors", {}).values() if e is not None]
    rows = {
        "vocabulary": f"{facts.vocab_size:,}",
        "layers": report.get("model", {}).get("num_layers"),
        "context": f"{facts.max_context:,} tokens",
        "batch": facts.max_batch,
        "recipe": recipe.get("about"),
        **methods,
        "grade": report.get("grade"),
        "target": report.get("target"),
        "artifact": f"{sizes['total'] / 1e6:.3g} MB" if sizes.get("total") else None,
        "state per token": f"{kept:,} B" if (kept := report.get("kv_bytes_per_token")) else None,
        "largest error": f"{max(errors):.1e}" if errors else None,
    }
    shown = [(name, value) for name, value in rows.items() if value not in (None, "")]
    return table(facts.name, [], shown)
