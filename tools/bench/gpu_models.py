"""Models of published shapes for tools/bench/bench_gpu.py: random weights, made on the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from gpu_figures import BATCHES, CONTEXTS, CUDA, DEVICE, STEPS, TINY, WARM, Figures, steps_of
from torch.utils._python_dispatch import TorchDispatchMode

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
    from accel.lowering.triton.writer.halves import multiplied

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
    return on_triton(made, {n: filled(blank, i) for i, (n, blank) in enumerate(blanks.items())})


def on_triton(eager: Any, params: dict[str, torch.Tensor] | None = None) -> Any:
    """A model of the eager target on the Triton target; `params` lie on the device already."""
    from accel.lowering.triton.lowered import lower_program
    from accel.runtime.backends.triton.backend import TritonBackend
    from accel.runtime.model.compiled import CompiledModel

    lowered = lower_program(eager.program, params)
    return CompiledModel(
        TritonBackend(lowered),
        eager.facts,
        recipe=eager.recipe,
        program=lowered,
        tokenizer=eager.tokenizer,
    )


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
    state = [v for v in model.program.state if len(v.shape) == 4]
    size = {torch.float32: 4, torch.float16: 2, torch.int8: 1, torch.uint8: 1}
    each = sum(size[getattr(torch, v.dtype)] * int(v.shape[1]) * int(v.shape[3]) for v in state)
    need, free = each * batch * (tokens + tokens // 8 + 256), torch.cuda.mem_get_info()[0]
    return (
        ""
        if need < 0.8 * free
        else f"the cache takes {need / 1e9:.0f} GB and {free / 1e9:.0f} GB are free"
    )


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
