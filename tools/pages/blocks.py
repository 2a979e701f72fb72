"""Tables in a page that a command prints: between `<!-- python COMMAND -->` and `<!-- end -->`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

_BLOCK = re.compile(r"(<!-- python (.+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def commands(page: Path) -> list[str]:
    """The commands of a page's blocks, in order."""
    return [found[1] for found in _BLOCK.findall(page.read_text(encoding="utf-8"))]


def fill(page: Path, printed: Callable[[str], str | None]) -> None:
    """Put what each block's command printed into it; a block of which nothing is known (None) stays."""

    def filled(found: re.Match[str]) -> str:
        text = printed(found[2])
        return found[0] if text is None else f"{found[1]}\n{text.strip()}\n\n{found[4]}"

    old = page.read_text(encoding="utf-8")
    new = _BLOCK.sub(filled, old)
    if new != old:
        page.write_text(new, encoding="utf-8")
