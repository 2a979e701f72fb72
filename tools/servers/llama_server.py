"""llama.cpp's own `llama-server`: a slot for each row, all of them in one batch; weights f32 or q4_0, KV in f16.

Each slot has the whole context. Prompts are new each time, so its stores of prompts are off: they would only copy.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

INSTALL = (
    "llama.cpp: the targets llama-server and llama-quantize, and --llama with the folder of both"
)
VARIANTS = ("",)
BODY = {"ignore_eos": True, "top_k": 1, "cache_prompt": False}
KINDS = {"float32": "f32", "int4": "q4_0"}


def prepare(checkpoint: Path, folder: Path, precision: str, variant: str, where: Any) -> Path:
    sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))
    from bench_worker import read_engine

    whole, out = folder / "f32.gguf", folder / f"{KINDS[precision]}.gguf"
    if not whole.exists():
        engine = read_engine(Path(__file__).resolve().parents[1] / "peers" / "llama_cpp.py")
        engine.prepare(checkpoint, whole, "f32", where.context, where.rows)
    if not out.exists():  # every matrix in the one format, the head and the embedding too
        words = [where.llama / "llama-quantize", "--pure", whole, out, KINDS[precision]]
        subprocess.run([str(word) for word in words], check=True)
    return out


def command(model: Path, port: int, variant: str, where: Any) -> list[str]:
    words = [where.llama / "llama-server", "-m", model, "--port", port, "-np", where.rows]
    words += ["-c", where.rows * where.context, "-t", where.threads, "-tb", where.threads]
    return [str(word) for word in (*words, "--cache-ram", 0, "--no-ui")]


def version(where: Any) -> str:
    done = subprocess.run(
        [str(where.llama / "llama-server"), "--version"], capture_output=True, text=True
    )
    told = (done.stdout + done.stderr).splitlines()
    return f"llama.cpp {next((x.removeprefix('version: ') for x in told if x.startswith('version')), '')}"
