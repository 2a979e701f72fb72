"""Benchmarks, side by side: accel and its peers take turns in one run, and ratios are medians over rounds.

    python tools/bench.py shape OUT [--layers 16]       write the 213M Llama shape (random weights)
    python tools/bench.py build MODEL                   seconds and peak memory of accel-compile build
    python tools/bench.py decode ARTIFACT [--transformers MODEL] [--llama GGUF --llama-python PYTHON]

`accel-compile bench ARTIFACT` gives the time per step spent outside onnxruntime. Nothing is installed:
a peer is measured when it is pointed at. docs/benchmarks.md keeps what was printed.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)
WORKER = Path(__file__).with_name("bench_worker.py")


@app.command()
def shape(out: Path, layers: int = 16, seed: int = 0) -> None:
    """Write a Llama checkpoint: hidden 1024, FFN 2816, 16 query and 4 KV heads, vocabulary 32000, tied."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=4096,
        tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).eval().save_pretrained(out)


@app.command()
def build(model: Path, rounds: int = 3) -> None:
    """Wall seconds and peak resident memory of a build in a fresh process, artifact written included."""
    checkpoint = sum(f.stat().st_size for f in model.glob("*.safetensors"))
    seconds, peaks = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(dir=model.parent) as folder:
            start = time.perf_counter()
            command = [
                "accel-compile",
                "build",
                str(model),
                "--out",
                f"{folder}/artifact",
                "--json",
            ]
            worker = Path(sys.executable).with_name(command[0])
            done = subprocess.run([str(worker), *command[1:]], capture_output=True, text=True)
            seconds.append(time.perf_counter() - start)
            if done.returncode:
                raise typer.Exit(typer.echo(done.stderr, err=True) or 1)
            peaks.append(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
    print(
        "| model | checkpoint | seconds (median) | peak memory | peak / checkpoint |\n|---|---|---|---|---|"
    )
    print(
        f"| {model.name} | {checkpoint / 1e6:.0f} MB | {statistics.median(seconds):.1f} "
        f"| {max(peaks) / 1e6:.0f} MB | {max(peaks) / checkpoint:.2f} |"
    )


class Peer:
    """A worker process that waits for its turn."""

    def __init__(self, name: str, python: str, path: Path, threads: int):
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self.name = name
        self.process = subprocess.Popen(
            [python, str(WORKER), name, str(path), str(threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, env=environment,
        )  # fmt: skip
        self._line("ready")

    def _line(self, wanted: str = "") -> str:
        assert self.process.stdout
        line = self.process.stdout.readline().strip()
        if not line or (wanted and line != wanted):
            raise typer.BadParameter(
                f"{self.name} did not start: is it installed in its environment?"
            )
        return line

    def run(self, prompt: int, new: int) -> tuple[float, float]:
        """(prefill tokens/s, decode tokens/s) of one turn; decode by the median step."""
        assert self.process.stdin
        self.process.stdin.write(f"{prompt} {new}\n")
        self.process.stdin.flush()
        times = json.loads(self._line())
        return prompt / times["prefill"], 1 / statistics.median(times["steps"])

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@app.command()
def decode(
    artifact: Path,
    transformers: Annotated[
        Path | None, typer.Option(help="checkpoint for transformers eager")
    ] = None,
    llama: Annotated[Path | None, typer.Option(help="GGUF file of the same shape")] = None,
    llama_python: Annotated[
        str, typer.Option(help="python with llama-cpp-python")
    ] = sys.executable,
    prompt: int = 500,
    new: int = 32,
    rounds: int = 7,
    threads: int = 2,
) -> None:
    """Prefill and decode tokens/s, engines taking turns; ratios are medians of per-round ratios."""
    peers = [Peer("accel", sys.executable, artifact, threads)]
    if transformers:
        peers.append(Peer("transformers", sys.executable, transformers, threads))
    if llama:
        peers.append(Peer("llama.cpp", llama_python, llama, threads))
    results: dict[str, list[tuple[float, float]]] = {p.name: [] for p in peers}
    try:
        for turn in range(rounds):
            for peer in peers[turn % len(peers) :] + peers[: turn % len(peers)]:
                results[peer.name].append(peer.run(prompt, new))
            print(f"round {turn + 1}/{rounds}", file=sys.stderr)
    finally:
        for peer in peers:
            peer.close()
    print(
        "| engine | prefill tokens/s | accel / it | decode tokens/s | accel / it |\n|---|---|---|---|---|"
    )
    for name, rows in results.items():
        ratios = [
            statistics.median(a[i] / b[i] for a, b in zip(results["accel"], rows, strict=True))
            for i in (0, 1)
        ]
        prefill, step = (statistics.median(r[i] for r in rows) for i in (0, 1))
        print(f"| {name} | {prefill:.0f} | {ratios[0]:.2f} | {step:.1f} | {ratios[1]:.2f} |")


if __name__ == "__main__":
    app()
