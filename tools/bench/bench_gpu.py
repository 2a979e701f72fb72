"""The Triton target on one CUDA GPU, in parts, the most important first: correctness, the card's own speed, decode
beside transformers, low-bit weights, caches, layers left out, drafts.

    python tools/bench/bench_gpu.py OUT.json [--seconds N] [--only PART …] [--tiny]

Each part is a process of its own with a time of its own (`gpu_parts.PARTS`), so one that crashes or hangs loses itself
alone. OUT.json is written anew whenever a figure is there, and the table is printed in the end. What was not measured
says so, and why. `--tiny` runs all of it on a tiny model, on the CPU where there is no GPU: then figures mean nothing.
Weights are random and made on the device, but for those of the bundled model.
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
    from gpu_parts import PARTS

    start, slower = time.monotonic(), SLOWER if tiny else 1
    found: dict[str, Any] = {"tiny": tiny, "parts": {}}
    for name, part in PARTS.items():
        if only and name not in only:
            continue
        left = seconds * slower - (time.monotonic() - start)
        if left < LEAST:
            found["parts"][name] = {"status": f"{NOT_MEASURED}: no time was left", "figures": []}
        else:
            found["parts"][name] = measured(name, min(left, part.seconds * slower), tiny, out)
        out.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{name}: {found['parts'][name]['status']}", flush=True)
    print(table(found))


def measured(name: str, seconds: float, tiny: bool, out: Path) -> dict[str, Any]:
    """A part in a process of its own, which writes its figures as they come."""
    lines, log = out.with_suffix(f".{name}.jsonl"), out.with_suffix(f".{name}.log")
    lines.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / "gpu_parts.py"), name, str(lines), str(seconds)]
    begun = time.monotonic()
    environment = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        **({"GPU_BENCH_TINY": "1"} if tiny else {}),
    }
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
        try:
            code = process.wait(seconds)
            status = "done" if not code else f"stopped with exit code {code}: {last_line(log)}"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            status = f"its {seconds:.0f} s were over"
    figures = [json.loads(x) for x in lines.read_text().splitlines()] if lines.exists() else []
    lines.unlink(missing_ok=True)
    return {"status": status, "seconds": round(time.monotonic() - begun, 1), "figures": figures}


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
