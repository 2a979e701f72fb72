"""nn.Module or ExportedProgram -> Program: `torch.export` with symbolic batch and sequence.

The captured program takes `tokens [B,T]` and `positions [B,T]` (and what an encoder takes, see
`ir/encoder.py`) and returns `logits [B,T,V]`; it is checked against the module on odd sizes before
anything else happens.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch._dynamo.config as dynamo
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram

from accel.ir.adapter import Adapter, facts_of, inference_mode, own_limit, vocabulary, widened
from accel.ir.encoder import (
    INPUTS,
    EncoderDecoder,
    as_taken,
    counted_padding,
    encoder_example,
    encoder_facts,
    is_encoder_decoder,
)
from accel.ir.errors import CaptureError
from accel.ir.exported import interface_of
from accel.ir.flex import flex_uncompiled, flex_written_out
from accel.ir.forms import forms, short_chunks
from accel.ir.functional import unchanged, without_writes
from accel.ir.program import Entry, Facts, Program
from accel.ir.sdpa import causal_at_any_length
from accel.ir.steady import end_context, steady
from accel.ir.suits import alike, both_ways, no_logits, refuse_kind
from accel.ir.weights import Stored, Weights, reading

_INPUTS = ("tokens", "positions")
PREFIX = "model."  # of the adapter's one child; parameters keep the user's own names
_DETACH = torch.ops.aten.detach_.default  # of a constant made in the forward: nothing is written
_PRIMES = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)


def capture(
    model: Any,
    facts: Facts | None = None,
    max_context: int = 2048,
    stored: Mapping[Tensor, Stored] | None = None,
) -> Program:
    """Capture a decoder.

    Args:
        model: an `nn.Module` whose forward takes token ids [B,T] (and optionally positions) and
            returns logits [B,T,V], or an `ExportedProgram` of one with dynamic B and T, or a
            transformers encoder-decoder model.
        facts: what is already known of the model.
        max_context: the longest sequence that the program will be asked for.
        stored: for tensors of the module that only stand in for others, where the values lie.

    Raises:
        CaptureError: the module cannot be exported, or computes something else once exported.
    """
    if isinstance(model, ExportedProgram):
        return _from_exported(model, facts, max_context)
    model = getattr(model, "_orig_mod", model)  # under torch.compile
    if not isinstance(model, nn.Module):
        raise CaptureError(
            f"cannot capture a {type(model).__name__}; give an nn.Module, a Hugging Face model "
            "directory, or a torch.export ExportedProgram"
        )
    if any(p.is_meta for p in model.parameters()):
        raise CaptureError(
            f"{type(model).__name__} has weights on the meta device, which hold no values; load them first"
        )
    refuse_kind(model)
    notes: list[str] = []
    model, stored = widened(model, stored or {}, notes)
    two = is_encoder_decoder(model)
    kind = EncoderDecoder if two else Adapter
    held = steady(model, max_context)
    with (
        inference_mode(model, kind) as adapter,
        flex_uncompiled(),
        _uncached(),
        short_chunks(model),
        held as limits,
    ):
        batch, length, width = _example_sizes(model)
        facts = facts or facts_of(model, max_context)
        end_context(facts, limits)
        if two and facts.encoder is None:
            facts.encoder = encoder_facts(model, max_context, notes)
        tokens, positions = example(batch, length, vocabulary(model))
        given = {"tokens": alike(tokens, vocabulary(model)), "positions": positions}
        for name, value in encoder_example(facts.encoder, batch, length=width).items():
            value[1] = value[0]  # alike too
            given[name] = value

        def forward(*inputs: Tensor) -> Tensor:
            with reading(stored):
                out: Tensor = adapter(*inputs)
            return out

        with torch.no_grad():
            try:
                with reading(stored):
                    adapter.settle(given["tokens"], positions)
                logits = forward(*given.values())
            except CaptureError as error:
                raise CaptureError(f"{type(model).__name__}.{error}{no_logits(model)}") from None
            except Exception as error:
                raise CaptureError(
                    f"{type(model).__name__}.forward failed on token ids [B,T] int64: "
                    f"{type(error).__name__}: {error}"
                ) from error
            facts.diffusion = both_ways(model, lambda: forward(*given.values()), logits, facts.diffusion)
            with forms(model):
                exported = _export(model, adapter, given, facts)
        facts.vocab_size = int(logits.shape[-1])
        facts.notes += notes
        lies = {n: stored[t] for n, t in _named_tensors(adapter) if t in stored}
        names = _original_names(adapter)
        program = _to_program(exported, facts, names, PREFIX, lies, tuple(given))
        _check(program, forward, type(model).__name__, counted_padding(model))
    return program


def example(batch: int, length: int, vocab: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random tokens [B,T] and their positions [B,T]; both contiguous (a stride guard is a trap)."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab, (batch, length), generator=generator)
    return tokens, torch.arange(length).repeat(batch, 1)


def _example_sizes(model: nn.Module) -> tuple[int, int, int]:
    """B, T and X for tracing: different, and equal to no size of the model (specialisation)."""
    taken = {d for p in model.parameters() for d in p.shape}
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "to_dict"):
        taken |= {v for v in config.to_dict().values() if isinstance(v, int)}
    free = [p for p in _PRIMES if p not in taken]
    return free[0], free[1], free[2]


def _export(
    model: nn.Module, adapter: nn.Module, given: dict[str, Tensor], facts: Facts
) -> ExportedProgram:
    """Export with B, T and X symbolic; a table made for some longest sequence lowers `max_context`."""
    longest = facts.max_context if facts.max_context > given["tokens"].shape[1] + 1 else None
    again = False
    while True:
        # at T = longest a slice of such a table is the whole of it, which torch.export guards against
        rows = {0: Dim("B", min=1)}
        shape = {**rows, 1: Dim("T", min=1, max=longest and longest - 1)}
        wide = {**rows, 1: Dim("X", min=1)}
        shapes = [shape if n in _INPUTS else wide if v.dim() == 2 else rows for n, v in given.items()]
        try:
            with _silence(), flex_written_out(), causal_at_any_length():
                return torch.export.export(
                    adapter, tuple(given.values()), dynamic_shapes=as_taken(shapes), strict=False
                )
        except Exception as error:
            found = _end_of_guard(str(error), _table_sizes(model) | {own_limit(model)})
            if found is None or again:
                raise CaptureError(_explain(model, error)) from error
        if found < facts.max_context:
            facts.max_context = found
            facts.notes.append(f"max_context is {found}: a table of the model ends there")
        longest, again = found, True


def _end_of_guard(text: str, known: set[int | None]) -> int | None:
    """The longest sequence that a guard on T allows, where it is one of the model's known sizes."""
    suggested = re.findall(r"T = Dim\('T',[^)]*max=(\d+)", text)
    guards = re.findall(r"generated guard ([^\n]*size\(\)\[1\][^\n]*)", text)
    numbers = suggested or [n for g in guards for n in re.findall(r"\d{2,}", g)]
    return next((int(n) for n in numbers if int(n) in known), None)


def _uncached() -> Any:
    """torch caches the shapes of what it traces; where sizes are symbols that costs more than it saves."""
    config: Any = dynamo
    return config.patch(fake_tensor_cache_enabled=False)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """torch logs and prints the whole graph that it gives up on; the error that we raise says enough."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _table_sizes(model: nn.Module) -> set[int | None]:
    """Sizes of all tensors: masks and position tables, learned ones too, end at some longest sequence."""
    plain = [v for m in model.modules() for v in vars(m).values() if isinstance(v, Tensor)]
    return {size for t in (*model.parameters(), *model.buffers(), *plain) for size in t.shape}


def _explain(model: nn.Module, error: Exception) -> str:
    """Which module and which guard stopped the capture, out of torch.export's own words."""
    text = str(error)
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\w+)', text)
    own = [f for f in frames if "/torch/" not in f[0]]
    trace = error.__traceback__
    place = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        holder = trace.tb_frame.f_locals.get("self")
        if (
            isinstance(holder, nn.Module)
            and not isinstance(holder, Adapter)
            and "torch/" not in code.co_filename
        ):
            place = f"{_name_in(model, holder)} ({type(holder).__name__}.{code.co_name}, line {trace.tb_lineno})"
        trace = trace.tb_next
    if not place and own:
        place = f"{own[-1][2]} (line {own[-1][1]})"
    guard = next(
        (m.group(0) for m in (re.search(p, text) for p in _GUARDS) if m),
        text.strip().splitlines()[0] if text.strip() else type(error).__name__,
    )
    return (
        f"{type(model).__name__} cannot be captured: {place or 'its forward'}: {guard}. "
        "Batch and sequence length must stay symbolic and no Python branch may depend on a tensor's "
        "value; rewrite that line with torch.where or shape arithmetic"
    )


_GUARDS = (
    r"Could not guard on data-dependent expression[^\n]*",
    r"Could not extract specialized integer[^\n]*",
    r"Constraints violated[^\n]*(\n[^\n]+)?",
    r"[^\n]*specializ[^\n]*",
)


def _name_in(model: nn.Module, child: nn.Module) -> str:
    return next((name or "model" for name, m in model.named_modules() if m is child), "model")


def _original_names(adapter: nn.Module) -> dict[str, str]:
    """Every name of a tensor -> the first name of the same tensor: tied weights stay tied."""
    first: dict[tuple[Any, ...], str] = {}
    names: dict[str, str] = {}
    for name, tensor in _named_tensors(adapter):
        key = (
            tensor.data_ptr(),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            tensor.numel() == 0 and name,
        )
        names[name] = first.setdefault(key, name)
    return names


def _named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Every parameter and buffer under all its names."""
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]


def _from_exported(exported: ExportedProgram, facts: Facts | None, max_context: int) -> Program:
    """Take a program that the user exported."""
    interface = interface_of(exported)
    facts = facts or Facts("ExportedProgram", 0, max_context)
    facts.vocab_size = interface.vocab_size
    canonical = _tied({**exported.state_dict, **exported.constants})
    facts.parameters = sum(
        t.numel() for n, t in exported.state_dict.items() if canonical.get(n, n) == n
    )
    module = exported.module()
    with unchanged(exported.graph):
        program = _to_program(
            exported, facts, canonical, names=interface.inputs, output=interface.output
        )
    _check(program, lambda t, p: interface.call(module, t, p), facts.name)
    return program


def _tied(tensors: dict[str, Any]) -> dict[str, str]:
    first: dict[tuple[Any, ...], str] = {}
    return {
        n: first.setdefault((t.data_ptr(), tuple(t.shape), t.stride(), t.dtype), n)
        for n, t in tensors.items()
        if isinstance(t, Tensor) and t.numel()
    }


def _to_program(
    exported: ExportedProgram,
    facts: Facts,
    canonical: dict[str, str],
    prefix: str = "",
    stored: Mapping[str, Stored] | None = None,
    names: tuple[str, ...] = _INPUTS,
    output: int = 0,
) -> Program:
    """Lift parameters out of the inputs; name the inputs, and the output logits."""
    without_writes(exported.graph)
    if _needs_functions(exported.graph):
        exported = exported.run_decompositions({})
    signature = exported.graph_signature
    sources = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    tensors = {**exported.constants, **exported.state_dict, **(stored or {})}
    users = [str(n) for n in signature.user_inputs]
    renames = dict(zip(users, names, strict=False))
    graph, params = fx.Graph(), Weights()
    copied: dict[fx.Node, fx.Node] = {}
    for node in exported.graph.nodes:
        if node.op == "placeholder" and node.name in sources:
            full = sources[node.name]
            name = canonical.get(full, full)
            name = name.removeprefix(prefix)
            value = tensors[full]
            params[name] = value.detach() if isinstance(value, Tensor) else value
            new = graph.create_node("get_attr", name)
        elif node.op == "placeholder":
            new = graph.placeholder(renames[node.name])
        elif node.op == "output":
            chosen = signature.user_outputs[output]
            target = next(n for n in copied if n.name == chosen)
            graph.output((copied[target],))
            continue
        else:
            new = graph.node_copy(node, copied.__getitem__)
            if node.target is _DETACH:
                new.target = torch.ops.aten.detach.default
        new.meta = dict(node.meta)
        copied[node] = new
    if "positions" not in [n.target for n in graph.find_nodes(op="placeholder")]:
        _add_positions(graph)
    step = Entry(graph, ["logits"])
    dims: dict[str, str] = {}
    for name, letters in (("tokens", "BT"), (INPUTS, "BX")):
        if name in step.inputs:
            dims |= zip(map(str, step.input(name).meta["val"].shape), letters, strict=True)
    return Program(params, {"step": step}, facts, dims=dims)


def _add_positions(graph: fx.Graph) -> None:
    tokens = next(iter(graph.find_nodes(op="placeholder")))
    with graph.inserting_after(tokens):
        node = graph.placeholder("positions")
    value = tokens.meta["val"]
    with value.fake_mode:
        node.meta["val"] = torch.empty_like(value)


def _needs_functions(graph: fx.Graph) -> bool:
    """Whether the graph writes in place, holds sub-graphs or traced vmap, which decomposition removes."""
    for node in graph.nodes:
        if node.op != "call_function" or node.target is _DETACH:
            continue
        schema = getattr(node.target, "_schema", None)
        if isinstance(node.target, torch._ops.HigherOrderOperator) or (schema and schema.is_mutable):
            return True
        if str(getattr(node.target, "__module__", "")).startswith("torch._functorch"):
            return True
    return False


def _check(program: Program, reference: Any, name: str, reserved: Iterable[int] = ()) -> None:
    """The captured program against the module, at odd sizes; mandatory, since a guard can lie."""
    for seed, (batch, length) in enumerate([(1, 1), (3, 2), (2, 17)]):
        length = min(length, program.facts.max_context)
        tokens = example(batch, length, program.facts.vocab_size, seed)
        given = dict(zip(_INPUTS, tokens, strict=True))
        given |= encoder_example(program.facts.encoder, batch, seed)
        for number, key in itertools.product(reserved, ("tokens", INPUTS)):
            given[key] = given[key].masked_fill(given[key] == number, number + 1)
        with torch.no_grad():
            want = reference(*given.values()).float()
        got = program.run("step", given)["logits"].float()
        scale = max(1.0, float(want.abs().max()))
        error = float((got - want).abs().max()) / scale
        if not error <= 1e-4:  # also refuses NaN
            raise CaptureError(
                f"{name}: the captured graph differs from the module by {error:.1e} at B={batch}, T={length}; "
                "its forward depends on Python state or randomness that torch.export froze"
            )
