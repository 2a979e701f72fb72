"""onnxruntime-genai's generator behind a thin server (bench/load/genai_http.py): batches that nothing joins.

Weights of 4 bits as its model builder makes them for a CPU, or of float32.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

INSTALL = "onnxruntime-genai and uvicorn, and --python with the python that has them"
VARIANTS = ("",)
BODY: dict[str, Any] = {}
HTTP = Path(__file__).resolve().parents[1] / "bench" / "load" / "genai_http.py"
WORKER = HTTP.parents[1] / "bench_worker.py"
PEER = HTTP.parents[2] / "peers" / "genai.py"


def prepare(checkpoint: Path, folder: Path, precision: str, variant: str, where: Any) -> Path:
    out = folder / f"genai-{precision}"
    if not out.exists():
        words = [PEER, "prepare", precision, checkpoint, out, where.context, where.rows]
        lent = os.pathsep.join(map(str, where.packages))
        subprocess.run(
            [where.python, str(WORKER), *map(str, words)],
            check=True,
            env={**os.environ, "BENCH_PACKAGES": lent, "PYTHONPATH": ""},
        )
    return out


def command(model: Path, port: int, variant: str, where: Any) -> list[str]:
    words = [where.python, HTTP, model, "--port", port, "--rows", where.rows]
    return [str(word) for word in (*words, "--threads", where.threads)]


def version(where: Any) -> str:
    told = "import onnxruntime_genai as g, onnxruntime as o; print(g.__version__, 'over onnxruntime', o.__version__)"
    done = subprocess.run([where.python, "-c", told], capture_output=True, text=True, check=True)
    return f"onnxruntime-genai {done.stdout.strip()}"
