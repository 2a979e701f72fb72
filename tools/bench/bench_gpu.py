"""The Triton target on one CUDA GPU, in parts, the most important first: correctness, the card's own speed, decode,
attention, low-bit weights, caches, layers left out, drafts, transformers.

    python tools/bench/bench_gpu.py OUT.json [--seconds N] [--only PART …] [--tiny]

Each part is a process of its own with a time of its own (`gpu_parts.PARTS`), so one that crashes or hangs loses itself
alone. It imports what it needs while the part before it runs. The times add up to less than SECONDS; the parts of
`gpu_parts.SPARE` take what the others leave. `--seconds` shortens or lengthens all of them. OUT.json is written anew
after each part, and the table is printed in the end. What was not measured says so, and why. `--tiny` runs all of it on
a tiny model, on the CPU where there is no GPU: then figures mean nothing. Weights are random and made on the device,
but for those of the bundled model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

HERE = Path(__file__).parent
SECONDS = 470.0
SLOWER = 4  # times that the interpreter may take
LEAST = 5.0  # seconds under which no part is begun
NOT_MEASURED = "not measured"


def main(
    out: Path,
    seconds: Annotated[
        float, typer.Option(help="of all parts; with --tiny four times as many")
    ] = SECONDS,
    only: Annotated[list[str] | None, typer.Option(help="parts; default: all")] = None,
    tiny: bool = False,
) -> None:
    """Measure part by part until the time is over."""
    from gpu_parts import PARTS, SPARE

    start, all_of_it = time.monotonic(), seconds * (SLOWER if tiny else 1)
    parts = {n: p for n, p in (PARTS | SPARE).items() if not only or n in only}
    found: dict[str, Any] = {"tiny": tiny, "parts": {}}
    coming = list(parts)
    following = Running(coming[0], tiny, out) if coming else None
    for name, part in parts.items():
        running, coming = following, coming[1:]
        assert running is not None
        following = Running(coming[0], tiny, out) if coming else None
        left = all_of_it - (time.monotonic() - start)
        if left < LEAST:
            running.stop()
            found["parts"][name] = {"status": f"{NOT_MEASURED}: no time was left", "figures": []}
        else:
            found["parts"][name] = running.measured(min(left, part.seconds * all_of_it / SECONDS))
        out.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{name}: {found['parts'][name]['status']}", flush=True)
    found["seconds"] = round(time.monotonic() - start, 1)
    out.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


class Running:
    """A part in a process of its own, which imports what it needs, waits to be told its seconds, and writes its figures
    as they come.
    """

    def __init__(self, name: str, tiny: bool, out: Path):
        self._lines, self._log = out.with_suffix(f".{name}.jsonl"), out.with_suffix(f".{name}.log")
        self._lines.unlink(missing_ok=True)
        told = {"PYTHONUNBUFFERED": "1", **({"GPU_BENCH_TINY": "1"} if tiny else {})}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "gpu_parts.py"), name, str(self._lines)],
                stdin=subprocess.PIPE, stdout=log, stderr=log, env={**os.environ, **told},
            )  # fmt: skip

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()

    def measured(self, seconds: float) -> dict[str, Any]:
        """What it finds in so many seconds."""
        begun = time.monotonic()
        try:
            self._process.communicate(f"{seconds}\n".encode(), seconds)
            code = self._process.returncode
            status = (
                "done" if not code else f"stopped with exit code {code}: {last_line(self._log)}"
            )
        except subprocess.TimeoutExpired:
            self.stop()
            status = f"its {seconds:.0f} s were over"
        lines = self._lines.read_text().splitlines() if self._lines.exists() else []
        self._lines.unlink(missing_ok=True)
        return {
            "status": status,
            "seconds": round(time.monotonic() - begun, 1),
            "figures": [json.loads(line) for line in lines],
        }


def last_line(log: Path) -> str:
    """What a part said last."""
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return said[-1][:200] if said else ""


def table(found: dict[str, Any]) -> str:
    """Markdown: a table for each part."""
    parts = []
    for name, part in found["parts"].items():
        rows = [
            f"\n### {name}: {part['status']}\n",
            "| what | value | unit | note |",
            "|---|---|---|---|",
        ]
        for one in part["figures"]:
            value = one["value"]
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
            rows.append(f"| {one['what']} | {shown} | {one['unit']} | {one['note']} |")
        parts.append("\n".join(rows if part["figures"] else rows[:1]))
    return "\n".join(parts)


if __name__ == "__main__":
    typer.run(main)
