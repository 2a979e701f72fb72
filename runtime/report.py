"""The build report as a page that people look at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_html(path: Path, report: dict[str, Any]) -> None:
    """Write a self-contained page of a build report."""
    path.write_text(f"<pre>{json.dumps(report, indent=1)}</pre>", encoding="utf-8")
