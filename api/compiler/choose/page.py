"""A choice as a page: one file that fetches nothing."""

from __future__ import annotations

import os
from pathlib import Path

from accel.compiler.choose import summary
from accel.compiler.choose.choose import Choice
from accel.compiler.choose.scatter import scatter
from accel.compiler.report import rendered


def write_page(path: Path, choice: Choice) -> None:
    """Write it, whole or not at all. Raises OSError."""
    from markupsafe import Markup

    found = summary.lines(choice)
    head, cells = summary.columns(found)
    part = path.with_name(path.name + ".part")
    text = rendered(
        "choose.html", choice=choice, lines=found, picks=summary.picks(found), basis=summary.basis(choice),
        picture=Markup(scatter(found)), columns=head, rows=[(line, cells(line)) for line in found],
    )  # fmt: skip
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
