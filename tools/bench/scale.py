"""What a build needs as models grow: peak memory against the checkpoint's float32 bytes, and seconds.

    python tools/bench/scale.py                              a 1.1B Llama shape (TinyLlama's), float32
    python tools/bench/scale.py --recipe float16 --shards 3
    python tools/bench/scale.py --dtype bfloat16
    python tools/bench/scale.py --layers 8,16,32 --hidden 512 --ffn 1408 --heads 8 --kv-heads 4 --vocab 4096

Each build runs in a fresh process, on a checkpoint of random weights in a temporary folder. The peak is
what the system counts as resident (files that are mapped among it); docs/figures/details/builds.md keeps the figures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import turns
import typer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_PARTS = ("load", "capture", "passes", "lower", "verify")


def main(
    layers: Annotated[str, typer.Option(help="layers of each build, by commas")] = "22",
    hidden: int = 2048,
    ffn: int = 5632,
    heads: int = 32,
    kv_heads: int = 4,
    vocab: int = 32000,
    dtype: Annotated[str, typer.Option(help="of the checkpoint: " + ", ".join(_NAMES))] = "float32",
    shards: Annotated[int, typer.Option(help="files of the checkpoint")] = 1,
    recipe: str = "base",
    folder: Annotated[Path | None, typer.Option(help="where the temporary folder goes")] = None,
) -> None:
    """Build and measure; the last column is what one more layer cost since the row above."""
    names = ("layers", "checkpoint", "float32", "peak", "of float32", "anonymous", "seconds")
    turns.head(*names, *_PARTS, "CPU seconds", "a layer")
    before: tuple[int, float] | None = None
    for count in map(int, layers.split(",")):
        config = LlamaConfig(
            vocab_size=vocab, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=count,
            num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=False,
        )  # fmt: skip
        with tempfile.TemporaryDirectory(dir=folder, prefix="accel-scale-") as temporary:
            model = Path(temporary) / "model"
            wide = write(model, config, dtype, shards)
            small = sum(f.stat().st_size for f in model.glob("*.safetensors"))
            peak, anonymous, cpu, report = build(model, Path(temporary) / "artifact", recipe)
        seconds = report["seconds"]
        layer = f"{(cpu - before[1]) / (count - before[0]):.2f}" if before else "-"
        before = (count, cpu)
        small_, wide_, peak_, own = (f"{n / 1e6:.0f} MB" for n in (small, wide, peak, anonymous))
        parts = (f"{seconds.get(part, 0):.1f}" for part in ("total", *_PARTS))
        turns.row(
            count, small_, wide_, peak_, f"{peak / wide:.2f}", own, *parts, f"{cpu:.1f}", layer
        )


def build(model: Path, out: Path, recipe: str, *more: str) -> tuple[int, int, float, Any]:
    """Of a build by the command line with `more` options: peak resident bytes, the most anonymous ones among samples,
    CPU seconds, and its report.
    """
    command = [sys.executable, "-m", "accel.cli", "build", str(model), "--out", str(out)]
    command += ["--recipe", recipe, "--json", *more]
    with tempfile.TemporaryFile() as output:
        worker = subprocess.Popen(command, stdout=output)
        anonymous = 0
        while True:
            status = Path(f"/proc/{worker.pid}/status").read_text()
            fields = dict(line.split(":", 1) for line in status.splitlines())
            anonymous = max(anonymous, int(fields.get("RssAnon", "0 kB").split()[0]) * 1024)
            done, code, usage = os.wait4(worker.pid, os.WNOHANG)
            if done:
                break
            time.sleep(0.02)
        if code:
            raise typer.Exit(1)
        output.seek(0)
        cpu = usage.ru_utime + usage.ru_stime
        return usage.ru_maxrss * 1024, anonymous, cpu, json.loads(output.read())


def write(folder: Path, config: LlamaConfig, dtype: str, shards: int) -> int:
    """A checkpoint of random weights, a tensor in memory at a time; returns its bytes in float32."""
    folder.mkdir()
    config.dtype = dtype
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {n: t.shape for n, t in LlamaForCausalLM(config).state_dict().items()}
    names = list(shapes)
    cut = -(-len(names) // shards)
    places = {}
    for i in range(shards):
        part = names[i * cut : (i + 1) * cut]
        file = (
            f"model-{i + 1:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors"
        )
        places |= dict.fromkeys(part, file)
        _write_file(folder / file, {n: shapes[n] for n in part}, dtype)
    if shards > 1:
        index = {"metadata": {}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(4 * s.numel() for s in shapes.values())


def _write_file(path: Path, shapes: dict[str, torch.Size], dtype: str) -> None:
    kind = getattr(torch, dtype)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + shape.numel() * kind.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in _random(shapes):
            file.write(tensor.to(kind).view(torch.uint8).numpy().data)


def _random(shapes: dict[str, torch.Size]) -> Iterator[Tensor]:
    """Weights as a Llama is initialised: norms of one, the rest small."""
    generator = torch.Generator().manual_seed(0)
    for name, shape in shapes.items():
        if name.endswith("norm.weight"):
            yield torch.ones(shape)
        else:
            yield torch.randn(shape, generator=generator).mul_(0.02)


if __name__ == "__main__":
    typer.run(main)
