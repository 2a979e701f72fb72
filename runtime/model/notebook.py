"""Small HTML for notebooks (`_repr_html_`): text is escaped, nothing is fetched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

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
