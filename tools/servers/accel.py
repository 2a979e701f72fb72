"""`accel-compile serve`; the variant `sarathi` runs prompts in chunks, else they run whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

INSTALL = "accel-compile[serve]"
VARIANTS = ("", "sarathi")
BODY = {"ignore_eos": True}
CHUNK = 16  # tokens of prompts beside those of all rows
RECIPES = {"float32": "base", "int4": "int4"}


def prepare(checkpoint: Path, folder: Path, precision: str, variant: str, where: Any) -> Path:
    out = folder / "-".join(filter(None, ("accel", precision, variant)))
    if out.exists():
        return out
    names = [RECIPES[precision]]
    if variant:
        file = folder / f"{variant}.toml"
        file.write_text(f'[schedule]\nuse = "{variant}"\ntokens = {where.rows + CHUNK}\n')
        names.append(str(file))
    command = [sys.executable, "-m", "accel.cli", "build", str(checkpoint), "--out", str(out)]
    command += [word for name in names for word in ("--recipe", name)] + ["--no-verify"]
    command += ["--max-context", str(where.context), "--max-batch", str(where.rows)]
    subprocess.run(command, check=True)
    return out


def command(model: Path, port: int, variant: str, where: Any) -> list[str]:
    words = [sys.executable, "-m", "accel.cli", "serve", str(model), "--port", str(port)]
    return [*words, "--threads", str(where.threads)]


def version(where: Any) -> str:
    import onnxruntime

    from accel.ir.version import VERSION

    return f"accel {VERSION} over onnxruntime {onnxruntime.__version__}"
