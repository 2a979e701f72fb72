"""The parts of tools/bench/bench_gpu.py; each is run as `gpu_parts.py PART LINES SECONDS`."""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

TINY = os.environ.get("GPU_BENCH_TINY") == "1"
CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
DEVICE = "cuda" if CUDA else "cpu"
LLAMA = {"model_type": "llama", "max_position_embeddings": 40960, "rope_theta": 500000.0}
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": dict(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, head_dim=64, tie_word_embeddings=True,
    ),
    "llama-1b": dict(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
        num_attention_heads=32, num_key_value_heads=8, head_dim=64, tie_word_embeddings=True,
    ),
    "llama-8b": dict(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
    ),
}  # fmt: skip
SMALLEST = dict(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True,
)  # fmt: skip
CONTEXTS = (16, 24, 32) if TINY else (512, 8192, 32768)
BATCHES = (1, 2) if TINY else (1, 8, 64)
STEPS = 2 if TINY else 24
WARM = 3  # steps that compile, record and replay for the first time
REFERENCE = Path(__file__).resolve().parents[2] / "api" / "reference"


class Figures:
    """Writes figures as they come, until a time is over."""

    def __init__(self, file: Path, seconds: float):
        self._file, self._until = file.open("a"), time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds."""
        return self._until - time.monotonic()

    def add(self, what: str, value: Any, unit: str = "", note: str = "") -> None:
        """One figure, on a line."""
        print(
            json.dumps({"what": what, "value": value, "unit": unit, "note": note}),
            file=self._file,
            flush=True,
        )

    @contextmanager
    def trying(self, what: str, seconds: float = 0.0) -> Iterator[bool]:
        """Figures of one thing: where they fail, the reason stands in their place. Yields whether there is time."""
        if self.left < seconds:
            self.add(what, "not measured", "", f"no time: {seconds:.0f} s are needed")
        try:
            yield self.left >= seconds
        except Exception as error:
            said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            self.add(what, "not measured", "", said)
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()


# What is measured


def shape_of(name: str) -> dict[str, Any]:
    """A model's sizes; tiny ones where all is tiny."""
    return LLAMA | (SMALLEST if TINY else SHAPES[name])


def hollow(name: str) -> Any:
    """A module of a shape whose weights take no memory: each is one number, which its shape repeats."""
    from transformers import AutoConfig, AutoModelForCausalLM

    given = shape_of(name)
    config = AutoConfig.for_model(given.pop("model_type"), **given)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for module in model.modules():
        for key, weight in module._parameters.items():
            if weight is not None:
                one = torch.full((1,), 1e-3 if weight.dim() > 1 else 1.0).expand(weight.shape)
                module._parameters[key] = torch.nn.Parameter(one, requires_grad=False)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


class Repeated(TorchDispatchMode):
    """Within it, products with a number that its shape repeats take no time, so that a build of a hollow model is
    about its graph alone.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        aten = torch.ops.aten
        if func is aten.mm.default and repeats(args[1]):
            x, one = args[0], args[1][0, 0]
            return (x.sum(1, keepdim=True) * one).repeat(1, args[1].shape[1])
        if func is aten.cat.default and all(map(repeats, args[0])):
            first, axis = args[0][0], (args[1] if len(args) > 1 else 0)
            if all(bool(part[0, 0] == first[0, 0]) for part in args[0]):
                sizes = list(first.shape)
                sizes[axis] = sum(part.shape[axis] for part in args[0])
                return first.new_full((1,), float(first[0, 0])).expand(sizes)
        return func(*args, **(kwargs or {}))


def repeats(x: Any) -> bool:
    """Whether a tensor with values is a number that its shape repeats."""
    real = isinstance(x, torch.Tensor) and type(x) in (torch.Tensor, torch.nn.Parameter)
    return (
        real and x.dim() == 2 and x.device.type == "cpu" and x.numel() > 1 and not any(x.stride())
    )


@contextmanager
def blank_codes(bits: int) -> Iterator[None]:
    """Within it, `int8` stores weights in so many bits, whose codes nobody computes."""
    from accel.ir.weights import Stored, Weights
    from accel.passes.weights import _blocks, int8

    def rounded(weight: torch.Tensor, _: int, block: int, symmetric: bool) -> Any:
        rows, blocks = weight.shape[0], -(-weight.shape[1] // block)
        codes = torch.zeros((), dtype=torch.uint8).expand(rows, blocks, block * bits // 8)
        return _blocks.Packed(
            codes, torch.full((), 1e-3).bfloat16().float().expand(rows, blocks), None, bits, block
        )

    kept = _blocks.round_to_nearest, Weights.hold, int8.Int8.bits
    _blocks.round_to_nearest = rounded
    Weights.hold = lambda self, tensor: Stored(tensor)  # type: ignore[method-assign]
    int8.Int8.bits = lambda *_: bits  # type: ignore[method-assign]
    try:
        yield
    finally:
        _blocks.round_to_nearest, Weights.hold, int8.Int8.bits = kept  # type: ignore[method-assign]


def filled(blank: torch.Tensor, seed: int) -> torch.Tensor:
    """Random numbers in place of a parameter, on the device."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    if not blank.dtype.is_floating_point:
        return torch.randint(
            0, 255, blank.shape, dtype=blank.dtype, device=DEVICE, generator=generator
        )
    if blank.dim() == 1:
        return torch.ones(blank.shape, dtype=blank.dtype, device=DEVICE)
    return torch.empty(blank.shape, dtype=blank.dtype, device=DEVICE).normal_(
        0, 0.02, generator=generator
    )


def built(
    name: str,
    recipe: Any = "base",
    room: int = CONTEXTS[-1] + 256,
    bits: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> Any:
    """A model of a shape on the Triton target, whose matrices a checkpoint stores in `dtype`. Its weights are made on
    the device, and never on the host.
    """
    import accel
    from accel.lowering.triton.lowered import lower_program
    from accel.lowering.triton.writer.halves import multiplied
    from accel.runtime.backends.triton.backend import TritonBackend
    from accel.runtime.model.compiled import CompiledModel

    with blank_codes(bits) if bits else nullcontext(), Repeated():
        made = accel.optimize(
            hollow(name),
            recipe,
            target="eager",
            max_context=room,
            max_batch=BATCHES[-1],
            verify=False,
        )
    program = made.program
    assert program is not None
    blanks = {n: program.params.blank(n) for n in program.params if not n.startswith("rope.")}
    for n in multiplied(program):
        if n in blanks and blanks[n].dtype == torch.float32:
            blanks[n] = blanks[n].to(dtype)
    params = {n: filled(blank, i) for i, (n, blank) in enumerate(blanks.items())}
    lowered = lower_program(program, params)
    return CompiledModel(TritonBackend(lowered), made.facts, recipe=made.recipe, program=lowered)


def weight_bytes(model: Any) -> dict[str, int]:
    """Bytes of all that a step reads of weights, as they lie on the device, by type."""
    tensors = {n: t for n, t in model.program.tensors.items() if not n.startswith("rope.")}
    own_head = any(n.startswith("lm_head") for n in tensors)  # else the embedding is the head, too
    found: dict[str, int] = {}
    for name, tensor in tensors.items():
        if not (own_head and "embed_tokens" in name):
            dtype = str(tensor.dtype).removeprefix("torch.")
            found[dtype] = found.get(dtype, 0) + tensor.nbytes
    return found


def add_weights(figures: Figures, label: str, model: Any) -> None:
    """What a step reads of weights, in all and by type."""
    read = weight_bytes(model)
    each = "; ".join(f"{dtype} {count / 1e9:.3g} GB" for dtype, count in sorted(read.items()))
    figures.add(f"{label}: weights that a step reads", sum(read.values()) / 1e9, "GB", each)


def at_context(session: Any, tokens: int, more: int) -> None:
    """Let each row of an empty session hold so many tokens, whose keys and values are as buffers begin."""
    core = session._core
    core.need([tokens + more])
    for value in core.backend._program.state:
        if value.positions:
            core.backend._state[value.name][:, :tokens] = torch.arange(tokens, device=DEVICE)
    for row in range(session.batch):
        core.set_length(row, tokens)


def fits(model: Any, batch: int, tokens: int) -> str:
    """Why a cache does not fit on the device; "" where it does."""
    if not CUDA:
        return ""
    facts = model.facts
    state = [v for v in model.program.state if len(v.shape) == 4]
    size = {torch.float32: 4, torch.float16: 2, torch.int8: 1, torch.uint8: 1}
    each = sum(size[getattr(torch, v.dtype)] * int(v.shape[1]) * int(v.shape[3]) for v in state)
    need, free = each * batch * (tokens + tokens // 8 + 256), torch.cuda.mem_get_info()[0]
    del facts
    return (
        ""
        if need < 0.8 * free
        else f"the cache takes {need / 1e9:.0f} GB and {free / 1e9:.0f} GB are free"
    )


def steps_of(run: Callable[[], Any], count: int = STEPS) -> tuple[float, float]:
    """Seconds of a call: the median, and the least."""
    for _ in range(WARM):
        run()
    found = []
    for _ in range(count):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return statistics.median(found), min(found)


def decoding(
    model: Any, batch: int, context: int, width: int = 1, **told: Any
) -> tuple[float, float]:
    """Seconds of a greedy step of `width` tokens behind a context that nothing ran, as a loop takes it."""
    with model.session(batch) as session:
        at_context(session, context, 128 + width * (WARM + STEPS))
        token = torch.full((batch, width), 5).numpy()

        def step() -> None:
            nonlocal token
            logits = session.run(token, here=False, **told)
            token = logits.argmax(-1)
            if width > 1:
                session.rewind(context)

        found = steps_of(step)
        recorded = session._core.backend._recorded
        if CUDA and not told and (recorded is None or not len(recorded)):
            raise RuntimeError(
                f"no step was recorded: {recorded.refused if recorded else 'the step waits'}"
            )
        return found


def on_device(run: Callable[[], Any], count: int = 20) -> float:
    """Seconds that a call takes on the device, of the best of several."""
    for _ in range(WARM):
        run()
    if not CUDA:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    pairs = []
    for _ in range(count):
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        pair[0].record()
        run()
        pair[1].record()
        pairs.append(pair)
    torch.cuda.synchronize()
    return min(a.elapsed_time(b) for a, b in pairs) / 1e3


# Parts


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

    prompts = ["def add(a, b):", "The list"]
    recipes = ["base", "kv-int8", "prompt-lookup"]
    if not TINY:
        recipes += ["kv-float16", "snapkv", "int8", "unified-skip", "quest"]
    for recipe in recipes:
        with figures.trying(recipe, 5.0) as time_left:
            if not time_left:
                continue
            new, told = (2, {}) if TINY else (24, {"max_context": 256})
            with (
                accel.optimize(REFERENCE, recipe, target="eager", verify=False, **told) as eager,
                accel.optimize(
                    REFERENCE, recipe, target="triton", verify=not TINY, **told
                ) as model,
            ):
                want, got = (m.generate(prompts, new, eos=[]).tokens for m in (eager, model))
                same = sum(
                    a == b
                    for x, y in zip(want, got, strict=True)
                    for a, b in zip(x, y, strict=True)
                )
                ids = [eager.tokenizer.encode(prompts[0])]
                apart = (
                    abs(eager.logits(ids) - model.logits(ids)).max() / abs(eager.logits(ids)).max()
                )
                figures.add(
                    recipe,
                    same / (2 * new),
                    "of tokens alike",
                    f"logits differ by {apart:.1e} of the largest",
                )
                with model.session(1) as session:
                    session.run(ids)
                    for _ in range(4):
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
        for context in CONTEXTS:
            for batch in BATCHES:
                what = f"{name}: batch {batch}, context {context}"
                with figures.trying(what, 4.0) as time_left:
                    if not time_left:
                        continue
                    if why := fits(model, batch, context):
                        figures.add(what, "not measured", "", why)
                        continue
                    median, least = decoding(model, batch, context)
                    note = f"least {1e3 * least:.3f} ms; {batch / median:.0f} tokens/s"
                    figures.add(what, 1e3 * median, "ms a step", note)
        for width in (2,) if TINY else (4, 8, 16, 64):
            with figures.trying(f"{name}: {width} tokens a step", 4.0) as time_left:
                if time_left:
                    median, _ = decoding(model, 1, CONTEXTS[0], width)
                    figures.add(
                        f"{name}: {width} tokens a step",
                        1e3 * median,
                        "ms",
                        f"batch 1, context {CONTEXTS[0]}",
                    )
        with figures.trying(f"{name}: kernels of a step", 5.0) as time_left:
            if time_left:
                profiled(figures, name, model)
        del model
        what = f"{name} in float32: batch 1, context {CONTEXTS[0]}"
        with figures.trying(what, 15.0) as time_left:
            if time_left:
                model = built(name, dtype=torch.float32)
                add_weights(figures, f"{name} in float32", model)
                median, least = decoding(model, 1, CONTEXTS[0])
                figures.add(what, 1e3 * median, "ms a step", f"least {1e3 * least:.3f} ms")


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
    """Attention of one step by itself, as a share of what reading its keys and values would take."""
    from accel.lowering.triton.lowered import _load_rules

    _load_rules()
    from accel.lowering.triton.rules import accel_attention as rules

    size = 1 << (12 if TINY else 30)
    source = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    speed = size / on_device(lambda: source.view(torch.float32).sum())
    for label, heads, groups, width in (("llama-1b", 32, 8, 64), ("llama-8b", 32, 8, 128)):
        for batch in BATCHES:
            for context in CONTEXTS:
                what = f"attention of {label}: batch {batch}, context {context}"
                with figures.trying(what, 2.0) as time_left:
                    if not time_left or 8 * batch * groups * context * width > 2e10:
                        continue
                    k = torch.randn(batch, groups, context, width, device=DEVICE)
                    v, q = torch.randn_like(k), torch.randn(batch, heads, 1, width, device=DEVICE)
                    q_pos = torch.full((batch, 1), context - 1, device=DEVICE)
                    k_pos = torch.arange(context, device=DEVICE).expand(batch, -1).contiguous()
                    lists = rules.survey(q_pos, k_pos, "causal", 0, heads // groups, width)
                    parts = [(k, v, k_pos, None, lists)]
                    call = lambda q=q, q_pos=q_pos, parts=parts: rules.attended(  # noqa: E731
                        q, q_pos, parts, None, 0.1, 0.0, "causal", 0, None, None, None
                    )
                    spent = on_device(call)
                    share = (k.nbytes + v.nbytes) / spent / speed
                    figures.add(
                        what, 1e6 * spent, "µs", f"{100 * share:.0f} % of the speed of reading"
                    )


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
                                tokens, past_key_values=cache, cache_position=at, use_cache=True,
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


def low_bit(figures: Figures, name: str) -> None:
    """Weights of 8 and 4 bits, and halves; matrices that a recipe leaves are in bfloat16."""
    for label, recipe, bits in (
        ("int8", {"weights": {"use": "int8"}, "kv.codec": {"use": "kv-float32"}}, 8),
        ("int4", {"weights": {"use": "int8"}, "kv.codec": {"use": "kv-float32"}}, 4),
        ("float16", "float16", 0),
    ):
        with figures.trying(f"{name}, {label}", 15.0) as time_left:
            if not time_left:
                continue
            model = built(name, recipe, bits=bits)
            add_weights(figures, f"{name}, {label}", model)
            for batch in BATCHES[:2]:
                median, least = decoding(model, batch, CONTEXTS[0])
                what = f"{name}, {label}: batch {batch}, context {CONTEXTS[0]}"
                figures.add(what, 1e3 * median, "ms a step", f"least {1e3 * least:.3f} ms")


def caches(figures: Figures, name: str) -> None:
    """Codecs of the cache, and eviction, beside the full cache, behind prompts that ran."""
    for recipe in ("base", "kv-int8", "kv-float16", "snapkv", "streaming-llm"):
        with figures.trying(f"{name}, {recipe}", 15.0) as time_left:
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
    with figures.trying(f"{name}, layers", 15.0) as time_left:
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

    prompt = "def add(a, b):\n    return a + b\n\ndef add(a, b):\n"
    for recipe in ("base", "prompt-lookup", "eagle3"):
        with figures.trying(f"bundled model, {recipe}", 10.0) as time_left:
            if not time_left:
                continue
            with accel.optimize(
                REFERENCE, recipe, target="triton", verify=False, max_context=512
            ) as model:
                new = 3 if TINY else 128
                model.generate([prompt], new, eos=[])
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
    """A part and the seconds that it may take."""

    run: Callable[..., None]
    seconds: float
    told: Sequence[str] = ()


PARTS = {
    "machine": Part(machine, 30),
    "correctness": Part(correctness, 75),
    "decode-1b": Part(decode, 90, ["llama-1b"]),
    "peers-1b": Part(peers, 90, ["llama-1b"]),
    "decode-smollm2": Part(decode, 50, ["smollm2-135m"]),
    "decode-8b": Part(decode, 90, ["llama-8b"]),
    "low-bit-1b": Part(low_bit, 75, ["llama-1b"]),
    "kernels": Part(kernels, 30),
    "caches-1b": Part(caches, 75, ["llama-1b"]),
    "layers-1b": Part(layers, 40, ["llama-1b"]),
    "drafts": Part(drafts, 50),
    "low-bit-8b": Part(low_bit, 75, ["llama-8b"]),
    "peers-smollm2": Part(peers, 60, ["smollm2-135m"]),
}

if __name__ == "__main__":
    chosen = PARTS[sys.argv[1]]
    chosen.run(Figures(Path(sys.argv[2]), float(sys.argv[3])), *chosen.told)
