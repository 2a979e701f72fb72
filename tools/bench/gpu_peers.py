"""transformers with the shapes of tools/bench/bench_gpu.py."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from gpu_figures import BATCHES, CONTEXTS, CUDA, DEVICE, STEPS, TINY, WARM, Figures, steps_of
from gpu_models import shape_of


def peers(figures: Figures, name: str) -> None:
    """transformers with the same shape: compiled with a static cache, eager, FlexAttention; in bfloat16, and then in
    float32. A compiled shape takes most of a minute, so each stands by itself.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_grad_enabled(False)
    torch.set_float32_matmul_precision("highest")
    given = shape_of(name)
    config = AutoConfig.for_model(given.pop("model_type"), **given)
    short, long = CONTEXTS[:2]
    ways = [
        ("sdpa", True, "bfloat16", BATCHES[:1], [short]),
        ("sdpa", False, "bfloat16", BATCHES[:2], [short, long]),
        ("flex_attention", True, "bfloat16", BATCHES[:1], [short]),
        ("sdpa", True, "bfloat16", BATCHES[:1], [long]),
        ("sdpa", True, "float32", BATCHES[:1], [short]),
    ]
    for attention, compiled, dtype, batches, contexts in ways:
        if TINY and attention == "flex_attention":  # which is for a GPU
            continue
        label = f"transformers {name}, {attention}, {dtype}{', compiled, static cache' if compiled else ''}"
        with figures.trying(label, 20.0 if compiled else 5.0) as time_left:
            if not time_left:
                continue
            with torch.device(DEVICE):
                model = AutoModelForCausalLM.from_config(
                    config, dtype=getattr(torch, dtype), attn_implementation=attention
                ).eval()
            for batch, context in product(batches, contexts):
                what = f"{label}: batch {batch}, context {context}"
                with figures.trying(what, 3.0) as time_left:
                    if time_left:
                        median, least = stepping(model, batch, context, compiled)
                        figures.add(what, 1e3 * median, "ms a step", f"least {1e3 * least:.3f} ms")
            del model


def stepping(model: Any, batch: int, context: int, compiled: bool) -> tuple[float, float]:
    """Seconds of a greedy step behind a prompt of random tokens."""
    from transformers import DynamicCache, StaticCache

    room = context + STEPS + WARM + 8
    cache: Any = DynamicCache(config=model.config)
    call, place = model, 0
    if compiled:
        cache = StaticCache(config=model.config, max_cache_len=room)
        torch._dynamo.reset()
        call = torch.compile(
            model, **({"mode": "reduce-overhead"} if CUDA else {"backend": "eager"})
        )

    def run(step: Any, tokens: torch.Tensor) -> torch.Tensor:
        nonlocal place
        at = torch.arange(place, place + tokens.shape[1], device=DEVICE)
        out = step(
            tokens, past_key_values=cache, use_cache=True,
            position_ids=at[None].expand(len(tokens), -1), logits_to_keep=1,
        )  # fmt: skip
        place += tokens.shape[1]
        found: torch.Tensor = out.logits[:, -1].argmax(-1)[:, None].clone()
        found.tolist()
        return found

    token = run(model, torch.randint(3, 200, (batch, context), device=DEVICE))

    def step() -> None:
        nonlocal token
        token = run(call, token)

    return steps_of(step)
