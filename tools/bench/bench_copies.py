"""PHD-Transformer: what reading every token several times costs, beside the plain model of the same weights.

    python tools/bench/bench_copies.py [--prompt 512] [--new 12] [--rounds 4]

Random float32 weights of 80.6 million numbers on ONNX Runtime. Each round runs every model once: a prompt, then single
tokens. Told are the best rounds; the cache is that behind the prompt. `apart`: the first copies go through all layers
ahead of the others, and a prompt takes them alone (`prefill.prune = yoco`).
"""

from __future__ import annotations

import time
from typing import Annotated, Any

import numpy as np
import torch
import typer
from turns import head, in_turns, row

import accel
from accel.ir.capture.arch.cla import ClaConfig
from accel.ir.capture.arch.phd import Phd

WAYS = [(1, False), (2, False), (3, False), (4, False), (2, True), (4, True)]
SIZES = ClaConfig(
    vocab_size=8000, hidden_size=1024, intermediate_size=3072, num_hidden_layers=6,
    num_attention_heads=16, num_key_value_heads=4, head_dim=64, factor=1,
)  # fmt: skip
APART = {"prefill": {"prune": {"use": "yoco", "layers": 0}}}


def measured(model: Any, tokens: Any, new: int) -> tuple[float, float, int]:
    """Seconds of a prompt and of a token, and the bytes of the cache behind the prompt."""
    with model.session() as session:
        start = time.perf_counter()
        session.prompt(tokens)
        middle, held = time.perf_counter(), session.stats["kv_bytes"]
        for n in range(new):
            session.run(tokens[:, n : n + 1])
        return middle - start, (time.perf_counter() - middle) / new, held


def main(
    prompt: Annotated[int, typer.Option(min=1)] = 512,
    new: Annotated[int, typer.Option(min=1)] = 12,
    rounds: Annotated[int, typer.Option(min=1)] = 4,
) -> None:
    tokens = np.random.default_rng(0).integers(3, SIZES.vocab_size, (1, prompt))
    made = {}
    for copies, apart in WAYS:
        torch.manual_seed(0)
        module = Phd(SIZES, copies, apart).eval()
        recipe = APART if apart else {}
        made[copies, apart] = accel.optimize(
            module, recipe, max_context=prompt + new + 1, verify=False
        )
    ways = {way: lambda model=model: measured(model, tokens, new) for way, model in made.items()}
    found = in_turns(ways, rounds, warm=1)  # type: ignore[arg-type]
    head("copies", ">prompt, ms", ">token, ms", ">cache behind the prompt, MB")
    for (copies, apart), times in found.items():
        told = f"{copies}, apart" if apart else copies
        best = (min(t[i] for t in times) * 1000 for i in (0, 1))
        row(told, *(f"{one:.1f}" for one in best), f"{times[0][2] / 1e6:.1f}")


if __name__ == "__main__":
    typer.run(main)
