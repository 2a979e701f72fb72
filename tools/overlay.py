"""Lay a virtual environment over this one: `python tools/overlay.py FOLDER`. What it does not have comes from here."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

NAME = "zz_beneath.pth"  # the last to be read, so that its own packages come first


def lay(folder: Path, beneath: Path) -> Path:
    """Let the environment in `folder` find the packages in `beneath`, and what their own .pth files name."""
    found = [*folder.glob("lib/python*/site-packages"), *folder.glob("Lib/site-packages")]
    if not found:
        raise SystemExit(f"{folder} is no virtual environment: python -m venv {folder}")
    path = found[0] / NAME
    path.write_text(f"import site; site.addsitedir({str(beneath)!r})\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    lay(Path(sys.argv[1]), Path(sysconfig.get_path("purelib")))
