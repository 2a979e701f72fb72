"""Writes `api/reference/calibration.txt`: prose, code and recall tasks of this repository.

    python tools/train/calibration_text.py

Pieces of a page or so in random order, so that any part of the file is like any other. It is kept as
it was written, since measurements go by it.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from reference_data import REFERENCE, tasks

ROOT = Path(__file__).resolve().parents[2]
PROSE = ("README.md", "docs/guides/*.md", "docs/concepts/*.md", "docs/internals/*.md")
CODE = ("ir/*.py", "passes/recognise/*.py", "runtime/*.py", "tools/**/*.py")
PIECE = 2500  # characters
SHARES = {"prose": 14, "code": 30, "tasks": 12}  # pieces


def pieces(paths: list[Path], rng: random.Random, count: int) -> list[str]:
    """`count` pieces of files, cut between paragraphs; the longest files give the most."""
    found: list[str] = []
    for path in paths:
        piece = ""
        for paragraph in path.read_text(encoding="utf-8").split("\n\n"):
            piece += paragraph + "\n\n"
            if len(piece) >= PIECE:
                found.append(piece)
                piece = ""
    return rng.sample(found, min(count, len(found)))


def text() -> str:
    """The whole file."""
    rng = random.Random(4)
    prose = [p for pattern in PROSE for p in sorted(ROOT.glob(pattern))]
    code = [p for pattern in CODE for p in sorted(ROOT.glob(pattern))]
    found = pieces(prose, rng, SHARES["prose"]) + pieces(code, rng, SHARES["code"])
    for index in range(SHARES["tasks"]):
        task = list(tasks.TASKS)[index % len(tasks.TASKS)]
        prompt, answer = tasks.make(task, rng, 400)
        found.append(f"{prompt}{answer}\n\n")
    rng.shuffle(found)
    return "".join(found)


if __name__ == "__main__":
    raw = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=raw).parse_args()
    (REFERENCE / "calibration.txt").write_text(text(), encoding="utf-8")
