"""transformers with the shapes of tools/bench/bench_gpu.py."""

from __future__ import annotations

from typing import Any

import torch
from gpu_figures import BATCHES, CONTEXTS, CUDA, DEVICE, STEPS, TINY, WARM, Figures, steps_of
from gpu_models import shape_of


def peers(figures: Figures, name: str) -> None:
    """transformers with the same shape in bfloat16 and float32: eager, compiled with a static cache, FlexAttention."""
    from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache

    torch.set_grad_enabled(False)
    torch.set_float32_matmul_precision("highest")
    given = shape_of(name)
    config = AutoConfig.for_model(given.pop("model_type"), **given)
    ways = [("sdpa", False, "bfloat16"), ("sdpa", True, "bfloat16"), ("sdpa", True, "float32")]
    for attention, compiled, dtype in [
        *ways,
        *([] if TINY else [("flex_attention", True, "bfloat16")]),
    ]:
        label = f"transformers {name}, {attention}, {dtype}{', compiled, static cache' if compiled else ''}"
        with figures.trying(label, 20.0) as time_left:
            if not time_left:
                continue
            with torch.device(DEVICE):
                model = AutoModelForCausalLM.from_config(
                    config, dtype=getattr(torch, dtype), attn_implementation=attention
                ).eval()
            for batch in BATCHES[:1] if compiled else BATCHES[:2]:
                for context in CONTEXTS[:2]:
                    what = f"{label}: batch {batch}, context {context}"
                    with figures.trying(what, 10.0) as time_left:
                        if not time_left:
                            continue
                        room = context + STEPS + WARM + 8
                        cache: Any = (
                            StaticCache(config=config, max_cache_len=room)
                            if compiled
                            else DynamicCache(config=config)
                        )
                        call = model
                        if compiled:
                            torch._dynamo.reset()
                            call = torch.compile(
                                model,
                                **({"mode": "reduce-overhead"} if CUDA else {"backend": "eager"}),
                            )
                        place = 0

                        def run(
                            step: Any, tokens: torch.Tensor, cache: Any = cache
                        ) -> torch.Tensor:
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

                        def step(call: Any = call, run: Any = run) -> None:
                            nonlocal token
                            token = run(call, token)

                        median, least = steps_of(step)
                        figures.add(what, 1e3 * median, "ms a step", f"least {1e3 * least:.3f} ms")
            del model
