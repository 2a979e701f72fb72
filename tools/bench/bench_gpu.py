"""The Triton target beside transformers on one CUDA GPU: greedy decode steps and prompts, taking turns in one process.

    python tools/bench/bench_gpu.py OUT.json [SHAPE …] [--dtype bfloat16] [--tokens 1024] [--batch 1] [--rounds 5]

transformers runs eagerly with a dynamic cache, and with its decode step under `torch.compile` (CUDA graphs) over a
static one. Times are the host's, around calls that give the next token to the host, as a user has them. The result
keeps, for each shape and engine, seconds of each round, the tokens, and the machine.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from bench import SHAPES
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache

import accel

GPU_SHAPES: dict[str, dict[str, Any]] = {
    **SHAPES,
    "smollm2-135m": dict(
        model_type="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536,
        num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
        max_position_embeddings=8192, tie_word_embeddings=True,
    ),
    "llama1b": dict(
        model_type="llama", vocab_size=128256, hidden_size=2048, intermediate_size=8192,
        num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64,
        max_position_embeddings=8192, tie_word_embeddings=True,
    ),
}  # fmt: skip
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the CPU where kernels are interpreted


def model_of(shape: str, dtype: torch.dtype) -> Any:
    """Random weights, on the CPU."""
    given = dict(GPU_SHAPES[shape])
    config = AutoConfig.for_model(given.pop("model_type"), **given)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


class Ours:
    """accel's session on the Triton target."""

    def __init__(self, model: Any, tokens: int, batch: int, new: int):
        started = time.perf_counter()
        self.model = accel.optimize(
            model, target="triton", max_context=tokens + new + 8, max_batch=batch, verify=False
        )
        self.built = time.perf_counter() - started
        self.session = self.model.session(batch)

    def prefill(self, prompts: torch.Tensor) -> list[int]:
        self.session.rewind(0)
        self.length = prompts.shape[1]
        self.next = self._run(prompts.numpy())
        return list(map(int, self.next[:, 0]))

    def decode(self, new: int) -> list[list[int]]:
        self.session.rewind(self.length)
        token, found = self.next, []
        for _ in range(new):
            token = self._run(token)
            found.append([int(t) for t in token[:, 0]])
        return found

    def _run(self, tokens: Any) -> Any:
        return self.session.run(tokens, last_only=True)[:, -1].argmax(-1)[:, None]

    def close(self) -> None:
        self.session.close()
        self.model.close()


class Theirs:
    """transformers, eager or compiled."""

    def __init__(self, model: Any, room: int, batch: int, compiled: bool):
        self.model, self.compiled = model, compiled
        self.cache: Any = (
            StaticCache(config=model.config, max_cache_len=room)
            if compiled
            else DynamicCache(config=model.config)
        )
        self.step = (
            torch.compile(model, mode="reduce-overhead" if DEVICE == "cuda" else "default")
            if compiled
            else model
        )

    @torch.no_grad()
    def _run(self, call: Any, tokens: torch.Tensor, position: int) -> torch.Tensor:
        places = torch.arange(position, position + tokens.shape[1], device=DEVICE)
        out = call(
            tokens,
            past_key_values=self.cache,
            cache_position=places,
            position_ids=places[None].expand(len(tokens), -1),
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1].argmax(-1)[:, None].clone()

    def prefill(self, prompts: torch.Tensor) -> list[int]:
        self.cache.reset() if self.compiled else self.cache.crop(0)
        self.length = prompts.shape[1]
        self.next = self._run(self.model, prompts.to(DEVICE), 0)
        return list(map(int, self.next[:, 0].tolist()))

    def decode(self, new: int) -> list[list[int]]:
        if not self.compiled:
            self.cache.crop(self.length)
        token, found = self.next, []
        for i in range(new):
            token = self._run(self.step, token, self.length + i)
            found.append(token[:, 0].tolist())
        return found

    def close(self) -> None:
        self.cache = None


def measured(
    shape: str, dtype: str, tokens: int, batch: int, new: int, rounds: int
) -> dict[str, Any]:
    """Seconds by engine and round, of a prompt and of a step, and the tokens that the first round gave."""
    torch.set_grad_enabled(False)
    model = model_of(shape, getattr(torch, dtype))
    ours = Ours(model, tokens, batch, new)
    model.to(DEVICE)
    room = tokens + new + 8
    engines: dict[str, Any] = {
        "accel": ours,
        "transformers": Theirs(model, room, batch, False),
        "transformers, compiled": Theirs(model, room, batch, True),
    }
    prompts = torch.randint(
        3, model.config.vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(1)
    )
    found: dict[str, Any] = {name: {"prefill": [], "step": [], "tokens": None} for name in engines}
    for at in range(rounds + 1):
        for name, engine in engines.items():
            start = time.perf_counter()
            first = engine.prefill(prompts)
            middle = time.perf_counter()
            texts = engine.decode(new)
            end = time.perf_counter()
            if at:  # the first one warms up
                found[name]["prefill"].append(middle - start)
                found[name]["step"].append((end - middle) / new)
            found[name]["tokens"] = [first, *texts]
    for engine in engines.values():
        engine.close()
    return {
        "shape": shape, "dtype": dtype, "prompt": tokens, "batch": batch, "new": new, "built": ours.built,
        "parameters": sum(p.numel() for p in model.parameters()), "engines": found,
    }  # fmt: skip


def told(one: dict[str, Any]) -> None:
    """A line for each engine, with medians; ratios are medians over rounds."""
    ours = one["engines"]["accel"]
    print(
        f"{one['shape']} {one['dtype']} prompt {one['prompt']} batch {one['batch']}, built in {one['built']:.1f} s"
    )
    for name, engine in one["engines"].items():
        step, prefill = (statistics.median(engine[part]) for part in ("step", "prefill"))
        faster = statistics.median(a / b for a, b in zip(engine["step"], ours["step"], strict=True))
        equal = np.mean(np.array(engine["tokens"]) == np.array(ours["tokens"]))
        print(
            f"  {name:24} {1e3 * step:8.3f} ms a step, {one['batch'] / step:8.1f} tokens/s, "
            f"prompt {1e3 * prefill:8.2f} ms; {faster:.2f} times accel's step; "
            f"{100 * equal:.0f} % of the tokens are accel's",
            flush=True,
        )


def main(
    out: Path,
    shapes: Annotated[list[str] | None, typer.Argument(help=", ".join(GPU_SHAPES))] = None,
    dtype: str = "bfloat16",
    tokens: int = 1024,
    batch: Annotated[list[int], typer.Option()] = [1],  # noqa: B006
    new: int = 64,
    rounds: int = 5,
) -> None:
    """Measure each shape; OUT is written anew after each."""
    machine = {
        "gpu": torch.cuda.get_device_name() if DEVICE == "cuda" else "none",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    results = []
    for shape in shapes or ["l213", "llama1b"]:
        for rows in batch:
            results.append(measured(shape, dtype, tokens, rows, new, rounds))
            told(results[-1])
            out.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
