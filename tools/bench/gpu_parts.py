"""The parts of tools/bench/bench_gpu.py; each is run as `gpu_parts.py PART LINES` and reads its seconds when it is to
begin.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_figures import BATCHES, CONTEXTS, CUDA, DEVICE, TINY, WARM, Figures, on_device, steps_of
from gpu_models import add_weights, at_context, built, decoding, fits, on_triton
from gpu_peers import peers

REFERENCE = Path(__file__).resolve().parents[2] / "api" / "reference"


def machine(figures: Figures) -> None:
    """The card, copies and products: what all else is held against."""
    import transformers
    import triton

    name = torch.cuda.get_device_name() if CUDA else "none"
    figures.add("machine", name, "", f"torch {torch.__version__}, triton {triton.__version__}, transformers "
                f"{transformers.__version__}, {time.strftime('%Y-%m-%d')}")  # fmt: skip
    count = 1 << (12 if TINY else 30)
    source = torch.empty(count, dtype=torch.uint8, device=DEVICE)
    goal = torch.empty_like(source)
    figures.add(
        "copy", 2 * count / on_device(lambda: goal.copy_(source)) / 1e9, "GB/s", "read and written"
    )
    figures.add(
        "read", count / on_device(lambda: source.view(torch.float32).sum()) / 1e9, "GB/s", "a sum"
    )
    size = 64 if TINY else 8192
    for dtype, tf32 in (
        (torch.bfloat16, False),
        (torch.float16, False),
        (torch.float32, False),
        (torch.float32, True),
    ):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        x = torch.randn(size, size, device=DEVICE).to(dtype)
        label = f"matmul {str(dtype).removeprefix('torch.')}{' (TF32)' if tf32 else ''}"
        figures.add(
            label, 2 * size**3 / on_device(lambda x=x: x @ x, 5) / 1e12, "TFLOP/s", f"{size}²"
        )
    torch.backends.cuda.matmul.allow_tf32 = False


def correctness(figures: Figures) -> None:
    """The bundled model on the device against the eager target on the host: logits, tokens, drafts, recorded steps."""
    import accel

    prompts, new = ["def add(a, b):", "The list"][TINY:], 2 if TINY else 24
    recipes = ["base", "kv-int8", "prompt-lookup"]
    if not TINY:
        recipes += ["int8", "snapkv", "quest", "kv-float16", "unified-skip"]
    for recipe in recipes:
        with figures.trying(recipe, 4.0) as time_left:
            if not time_left:
                continue
            eager = accel.optimize(
                REFERENCE, recipe, target="eager", verify=False, max_context=64 if TINY else 256
            )
            with eager, on_triton(eager) as model:
                want, got = (m.generate(prompts, new, eos=[]).tokens for m in (eager, model))
                alike = [
                    a == b
                    for x, y in zip(want, got, strict=True)
                    for a, b in zip(x, y, strict=True)
                ]
                ids = [eager.tokenizer.encode(prompts[0])]
                with model.session(1) as session:
                    right, found = eager.logits(ids), session.run(ids)
                    apart = abs(right - found).max() / abs(right).max()
                    figures.add(
                        recipe,
                        sum(alike) / len(alike),
                        "of tokens alike",
                        f"logits differ by {apart:.1e} of the largest",
                    )
                    for _ in range(1 if TINY else 4):
                        session.run([[5]])
                    recorded = session._core.backend._recorded
                    waits = model.program.compiled["step"].waits
                    said = "the step waits for the device" if waits else "nothing records here"
                    said = said if recorded is None else f"{len(recorded)} recorded"
                    refused = list(recorded.refused.values()) if recorded else []
                    figures.add(f"{recipe}: CUDA graphs", said, "", "; ".join(refused))


def decode(figures: Figures, name: str) -> None:
    """Decode of a shape, by batch and context; checks of drafts; where a step's time goes."""
    with figures.trying(f"{name}: build", 10.0) as time_left:
        if not time_left:
            return
        start = time.perf_counter()
        model = built(name)
        figures.add(
            f"{name}: build",
            time.perf_counter() - start,
            "s",
            "capture, passes, weights on the device",
        )
        add_weights(figures, name, model)
        for batch in BATCHES:
            for context in CONTEXTS:
                what = f"{name}: batch {batch}, context {context}"
                with figures.trying(what, 3.0) as time_left:
                    if not time_left:
                        continue
                    if why := fits(model, batch, context):
                        figures.add(what, "not measured", "", why)
                        continue
                    median, least = decoding(model, batch, context)
                    note = f"least {1e3 * least:.3f} ms; {batch / median:.0f} tokens/s"
                    figures.add(what, 1e3 * median, "ms a step", note)
            if batch == BATCHES[0]:
                one_row(figures, name, model)
        del model
        what = f"{name} in float32: batch 1, context {CONTEXTS[0]}"
        with figures.trying(what, 15.0) as time_left:
            if time_left:
                model = built(name, dtype=torch.float32)
                add_weights(figures, f"{name} in float32", model)
                median, least = decoding(model, 1, CONTEXTS[0])
                figures.add(what, 1e3 * median, "ms a step", f"least {1e3 * least:.3f} ms")


def one_row(figures: Figures, name: str, model: Any) -> None:
    """Where a step's time goes, and checks of drafts."""
    with figures.trying(f"{name}: kernels of a step", 5.0) as time_left:
        if time_left:
            profiled(figures, name, model)
    for width in (2,) if TINY else (8, 64, 16, 4):
        what = f"{name}: {width} tokens a step"
        with figures.trying(what, 3.0) as time_left:
            if time_left:
                median, _ = decoding(model, 1, CONTEXTS[0], width)
                figures.add(what, 1e3 * median, "ms", f"batch 1, context {CONTEXTS[0]}")


def profiled(figures: Figures, name: str, model: Any) -> None:
    """The kernels that take most of a recorded step, by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if CUDA else [])]
    with model.session(1) as session:
        at_context(session, CONTEXTS[1], 64)
        for _ in range(WARM):
            session.run([[5]])
        with profile(activities=kinds) as seen:
            for _ in range(3):
                session.run([[5]], here=False)
    rows = seen.key_averages()
    key = "self_device_time_total" if CUDA else "self_cpu_time_total"
    for row in sorted(rows, key=lambda r: -getattr(r, key))[:12]:
        figures.add(
            f"{name}: {row.key[:70]}",
            getattr(row, key) / 3,
            "µs a step",
            f"{row.count / 3:.0f} times",
        )


def kernels(figures: Figures) -> None:
    """Attention of one step by itself, as a share of what reading its keys and values would take: first as caches store
    them, then in float32 for all batches and contexts.
    """
    from accel.lowering.triton.rules import accel_attention as rules

    size = 1 << (12 if TINY else 30)
    source = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    speed = size / on_device(lambda: source.view(torch.float32).sum())
    shapes = {"llama-8b": (32, 8, 128), "llama-1b": (32, 8, 64)}
    asked = [
        ("llama-8b", kind, BATCHES[1], context)
        for context in CONTEXTS[1:]
        for kind in ("float32", "float16", "int8", "4 bits")
    ]
    every = [(n, "float32", b, c) for n in shapes for b in BATCHES for c in CONTEXTS]
    for label, kind, batch, context in dict.fromkeys([*asked, *every]):
        what = f"attention of {label}, {kind}: batch {batch}, context {context}"
        heads, groups, width = shapes[label]
        with figures.trying(what, 2.0) as time_left:
            if not time_left:
                continue
            if 8 * batch * groups * context * width > 2e10:
                figures.add(what, "not measured", "", "keys and values take over 20 GB")
                continue
            (k, v), scales, codes = cached(kind, (batch, groups, context, width))
            q = torch.randn(batch, heads, 1, width, device=DEVICE)
            q_pos = torch.full((batch, 1), context - 1, device=DEVICE)
            k_pos = torch.arange(context, device=DEVICE).expand(batch, -1).contiguous()
            lists = rules.survey(q_pos, k_pos, "causal", 0, heads // groups, width)
            parts = [(k, v, k_pos, scales, lists, None, None, codes)]
            call = lambda q=q, q_pos=q_pos, parts=parts: rules.attended(  # noqa: E731
                q, q_pos, parts, None, 0.1, 0.0, "causal", 0, None, None, None
            )
            spent = on_device(call)
            share = (k.nbytes + v.nbytes) / spent / speed
            figures.add(what, 1e6 * spent, "µs", f"{100 * share:.0f} % of the speed of reading")


def cached(kind: str, shape: tuple[int, ...]) -> tuple[list[torch.Tensor], Any, Any]:
    """Keys and values [B,G,C,D] as a cache stores them; scales of slots, and how they are stored, as attention takes
    both.
    """
    if kind in ("float32", "float16"):
        dtype = getattr(torch, kind)
        return [torch.randn(shape, dtype=dtype, device=DEVICE) for _ in "kv"], None, ((), ())
    if kind == "int8":
        codes = [torch.randint(-127, 128, shape, dtype=torch.int8, device=DEVICE) for _ in "kv"]
        return codes, tuple(torch.full(shape[:3], 0.01, device=DEVICE) for _ in "kv"), ((), ())
    *most, width = shape
    codes = [
        torch.randint(0, 256, (*most, width // 2), dtype=torch.uint8, device=DEVICE) for _ in "kv"
    ]
    step = torch.full((1, 1), 0.3, device=DEVICE)
    return codes, None, (("static", width, 4, 0, 1, step),) * 2


def low_bit(figures: Figures, name: str) -> None:
    """Weights of 8 and 4 bits, and halves; matrices that a recipe leaves are in bfloat16."""
    for label, recipe, bits in (
        ("int4", {"weights": {"use": "int8"}, "kv.codec": {"use": "kv-float32"}}, 4),
        ("int8", {"weights": {"use": "int8"}, "kv.codec": {"use": "kv-float32"}}, 8),
        ("float16", "float16", 0),
    ):
        with figures.trying(f"{name}, {label}", 12.0) as time_left:
            if not time_left:
                continue
            model = built(name, recipe, bits=bits)
            add_weights(figures, f"{name}, {label}", model)
            for batch in BATCHES[:2]:
                median, least = decoding(model, batch, CONTEXTS[0])
                what = f"{name}, {label}: batch {batch}, context {CONTEXTS[0]}"
                figures.add(what, 1e3 * median, "ms a step", f"least {1e3 * least:.3f} ms")


def caches(figures: Figures, name: str) -> None:
    """Codecs of the cache, and eviction, behind prompts that ran; the full cache is in `decode`."""
    for recipe in ("kv-int8", "snapkv", "kv-float16", "streaming-llm"):
        with figures.trying(f"{name}, {recipe}", 10.0) as time_left:
            if not time_left:
                continue
            model = built(name, recipe, CONTEXTS[1] + 256)
            with model.session(1) as session:
                prompt = torch.randint(3, 200, (1, CONTEXTS[1])).numpy()
                start = time.perf_counter()
                session.prompt(prompt)
                spent = time.perf_counter() - start
                median, _ = steps_of(lambda s=session: s.run([[5]], here=False))
                note = f"its prompt took {spent:.2f} s with compiling; state {session.stats['kv_bytes'] / 1e6:.0f} MB"
                figures.add(
                    f"{name}, {recipe}: context {CONTEXTS[1]}", 1e3 * median, "ms a step", note
                )


def layers(figures: Figures, name: str) -> None:
    """Half of the layers left out by the plan, which the host knows."""
    recipe = {"depth": {"use": "unified-skip"}}
    with figures.trying(f"{name}, layers", 12.0) as time_left:
        if not time_left:
            return
        model = built(name, recipe, CONTEXTS[0] + 256)
        count = len(model.facts.layers)
        for label, plan in (
            ("all layers", [True] * count),
            ("half of the layers", [n % 2 == 0 for n in range(count)]),
        ):
            median, _ = decoding(model, 1, CONTEXTS[0], run_layers=plan)
            figures.add(f"{name}, {label}", 1e3 * median, "ms a step", f"context {CONTEXTS[0]}")


def drafts(figures: Figures) -> None:
    """The bundled model, which has trained weights and heads: plain, prompt lookup, a trained head."""
    import accel

    call = "def add(a, b):\n"
    prompt, new = (call, 3) if TINY else (f"{call}    return a + b\n\n{call}", 128)
    for recipe in ("base", "prompt-lookup", "eagle3"):
        with figures.trying(f"bundled model, {recipe}", 8.0) as time_left:
            if not time_left:
                continue
            with accel.optimize(
                REFERENCE, recipe, target="triton", verify=False, max_context=64 if TINY else 512
            ) as model:
                for _ in range(1 if TINY else 2):  # the first compiles and records
                    start = time.perf_counter()
                    out = model.generate([prompt], new, eos=[])
                    spent = time.perf_counter() - start
                stats = {
                    k: v
                    for k, v in (out.stats or {}).items()
                    if k in ("drafted", "accepted", "rounds", "calls")
                }
                figures.add(
                    f"bundled model, {recipe}",
                    new / spent,
                    "tokens/s",
                    json.dumps(stats, default=str),
                )


@dataclass(frozen=True)
class Part:
    """A part, the seconds that it may take, and those in which launches of each of its models may be tuned."""

    run: Callable[..., None]
    seconds: float
    told: Sequence[str] = ()
    tuning: float = 0.0


PARTS = {
    "correctness": Part(correctness, 60),
    "machine": Part(machine, 15),
    "decode-1b": Part(decode, 70, ["llama-1b"], 15),
    "kernels": Part(kernels, 25, tuning=10),
    "decode-8b": Part(decode, 60, ["llama-8b"], 12),
    "low-bit-1b": Part(low_bit, 45, ["llama-1b"], 5),
    "caches-1b": Part(caches, 40, ["llama-1b"], 2),
    "layers-1b": Part(layers, 20, ["llama-1b"], 2),
    "drafts": Part(drafts, 30, tuning=2),
    "peers-1b": Part(peers, 90, ["llama-1b"]),
}
SPARE = {
    "low-bit-8b": Part(low_bit, 60, ["llama-8b"], 5),
    "decode-smollm2": Part(decode, 50, ["smollm2-135m"], 8),
    "peers-smollm2": Part(peers, 60, ["smollm2-135m"]),
}


def ready() -> None:
    """Import what the parts do; the device is not touched."""
    import transformers.models.llama.modeling_llama  # noqa: F401

    import accel  # noqa: F401
    from accel.lowering.triton.lowered import _load_rules

    _load_rules()


def main() -> None:
    """The part that is named, in the seconds that are told."""
    from accel.lowering.triton.writer import tuned
    from accel.runtime.decode import costs

    if TINY:  # a call takes seconds in the interpreter
        costs.TOKENS = (costs.TOKENS[0], costs.TOKENS[-1])
    part = (PARTS | SPARE)[sys.argv[1]]
    ready()
    seconds = float(input())
    tuned.LIMIT = part.tuning * seconds / part.seconds
    part.run(Figures(Path(sys.argv[2]), seconds), *part.told)


if __name__ == "__main__":
    main()
