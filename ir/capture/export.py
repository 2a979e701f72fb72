"""A prepared model -> `torch.export` with symbolic batch and sequence, and the facts that running it tells."""

from __future__ import annotations

import contextlib
import io
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from accel.ir.capture.adapter import Adapter, UsersProgram
from accel.ir.capture.decoder_checks import alike, both_ways, no_logits, sees_later
from accel.ir.capture.examples import encoder_example, example
from accel.ir.capture.exported import first_names
from accel.ir.capture.flex import flex_written_out
from accel.ir.capture.forms import forms
from accel.ir.capture.prepare import Prepared
from accel.ir.capture.repeats import NotRepeated, repeats, unroll
from accel.ir.capture.sdpa import causal_at_any_length
from accel.ir.capture.traits import ModelTraits
from accel.ir.errors import CaptureError
from accel.ir.facts import Facts
from accel.ir.versions import lean, plain_strides
from accel.ir.weights import Stored, reading

_INPUTS = ("tokens", "positions")
_PREFIX = "model."  # of the adapter's one child; parameters keep the user's own names


@dataclass(frozen=True)
class Exported:
    """What `convert` makes a program of. names: every name of a tensor -> the one that it keeps; `prefix` comes
    off it. stored: for stand-ins, where the values lie. output: which of the flat outputs the logits are.
    repeated: whether layers are copies of others.
    """

    program: ExportedProgram
    facts: Facts
    inputs: tuple[str, ...]
    names: Mapping[str, str]
    prefix: str = ""
    stored: Mapping[str, Stored] = field(default_factory=dict)
    output: int = 0
    repeated: bool = False


def export(model: Prepared, traits: ModelTraits, whole: bool = False) -> Exported:
    """Export a model; a program that the user exported is taken as it is. `whole`: trace every layer.

    Raises:
        CaptureError: the module gives no logits, sees later tokens, or cannot be exported.
    """
    if isinstance(model.adapter, UsersProgram):
        program, interface = model.adapter.program, model.adapter.interface
        names = first_names({**program.state_dict, **program.constants})
        return Exported(program, traits.facts(), interface.inputs, names, output=interface.output)
    adapter, facts = model.adapter, traits.facts()
    given = _inputs(traits)
    logits = _settled(model, adapter, traits, given)
    if facts.embedding is None:
        facts.diffusion = both_ways(adapter.model, traits, lambda: model(*given.values()), logits)
        if facts.diffusion is not None:
            facts.blocks = None
        elif facts.blocks is not None and facts.blocks.mask >= logits.shape[-1]:
            facts.notes.append(
                f"config.mask_token_id is {facts.blocks.mask}, and the logits are of {logits.shape[-1]} tokens: it "
                "fills no masks"
            )
            facts.blocks = None
    else:
        looks = sees_later(lambda: model(*given.values()), logits)
        facts.embedding = replace(facts.embedding, width=int(logits.shape[-1]), both_ways=looks)
    with torch.no_grad(), forms(adapter.model, traits.swaps.forms):
        program, repeated = _export(adapter, traits, given, facts, whole)
    if facts.embedding is None:
        facts.set_vocabulary(facts.vocabulary_of(int(logits.shape[-1])))
    facts.notes += [*model.notes, *traits.notes]
    tensors = dict(_named_tensors(adapter))
    stored = {n: model.stored[t] for n, t in tensors.items() if t in model.stored}
    return Exported(
        program, facts, tuple(given), first_names(tensors), _PREFIX, stored, repeated=repeated
    )


def _inputs(traits: ModelTraits) -> dict[str, Tensor]:
    """Example inputs by name; the first two rows are alike up to their last token."""
    batch, length, width = traits.example_sizes
    tokens, positions = example(batch, length, traits.vocab_size)
    given = {"tokens": alike(tokens, traits.vocab_size), "positions": positions}
    for name, value in encoder_example(traits.encoder, batch, length=width).items():
        value[1] = value[0]
        given[name] = value
    return given


def _settled(
    model: Prepared, adapter: Adapter, traits: ModelTraits, example_inputs: dict[str, Tensor]
) -> Tensor:
    """Logits of the example, once the adapter knows what positions the module takes."""
    try:
        with torch.no_grad(), reading(model.stored):
            return adapter.settle(*example_inputs.values())
    except CaptureError as error:
        raise CaptureError(f"{traits.name}.{error}{no_logits(traits)}") from None
    except Exception as error:
        raise CaptureError(
            f"{traits.name}.forward failed on token ids [B,T] int64: {type(error).__name__}: {error}"
        ) from error


def _export(
    adapter: Adapter,
    traits: ModelTraits,
    example_inputs: dict[str, Tensor],
    facts: Facts,
    whole: bool,
) -> tuple[ExportedProgram, bool]:
    """Export with B, T and X symbolic, and whether layers are copies; a table made for some longest sequence lowers
    `max_context`.
    """
    longest = (
        facts.max_context if facts.max_context > example_inputs["tokens"].shape[1] + 1 else None
    )
    again = False
    while True:
        # at T = longest a slice of such a table is the whole of it, which torch.export guards against
        rows = {0: Dim("B", min=1)}
        shape = {**rows, 1: Dim("T", min=1, max=longest and longest - 1)}
        wide = {**rows, 1: Dim("X", min=1)}
        shapes = [
            shape if n in _INPUTS else wide if v.dim() == 2 else rows
            for n, v in example_inputs.items()
        ]
        try:
            with _silence(), flex_written_out(), causal_at_any_length(), plain_strides(), lean():
                return _traced(adapter, tuple(example_inputs.values()), _as_taken(shapes), whole)
        except Exception as error:
            found = _end_of_guard(str(error), traits.table_sizes | {traits.own_limit})
            if found is None or again:
                raise CaptureError(_explain(adapter.model, traits, error)) from error
        if found < facts.max_context:
            facts.max_context = found
            facts.notes.append(f"max_context is {found}: a table of the model ends there")
        longest, again = found, True


def _traced(
    adapter: Adapter, example_inputs: tuple[Tensor, ...], shapes: Any, whole: bool
) -> tuple[ExportedProgram, bool]:
    """The exported program, and whether layers are copies of others in it."""
    if not whole:
        with repeats(adapter) as found:
            program = torch.export.export(
                adapter, example_inputs, dynamic_shapes=shapes, strict=False
            )
        with contextlib.suppress(NotRepeated):
            unroll(program, adapter, found)
            return program, bool(found.again)
    return torch.export.export(adapter, example_inputs, dynamic_shapes=shapes, strict=False), False


def _as_taken(shapes: list[Any]) -> tuple[Any, ...]:
    """Sizes as an adapter's forward takes its inputs: the encoder's as one tuple."""
    return (*shapes[:2], tuple(shapes[2:])) if len(shapes) > 2 else tuple(shapes)


def _end_of_guard(text: str, known: frozenset[int | None]) -> int | None:
    """The longest sequence that a guard on T allows, where it is one of the model's known sizes."""
    suggested = re.findall(r"T = Dim\('T',[^)]*max=(\d+)", text)
    guards = re.findall(r"generated guard ([^\n]*size\(\)\[1\][^\n]*)", text)
    numbers = suggested or [n for g in guards for n in re.findall(r"\d{2,}", g)]
    return next((int(n) for n in numbers if int(n) in known), None)


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


def _explain(model: nn.Module, traits: ModelTraits, error: Exception) -> str:
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
    guard = _ways(text) or next(
        (m.group(0) for m in (re.search(p, text) for p in _GUARDS) if m),
        text.strip().splitlines()[0] if text.strip() else type(error).__name__,
    )
    return (
        f"{traits.name} cannot be captured: {place or 'its forward'}: {guard}. "
        "Batch and sequence length must stay symbolic and no Python branch may depend on a tensor's "
        "value; rewrite that line with torch.where or shape arithmetic"
    )


def _ways(text: str) -> str:
    """What a module's code takes of the sizes of a batch, where that is what stopped the capture; "": it is not."""
    size = {"0": "rows", "1": "tokens"}
    for axis, guard in re.findall(r"size\(\)\[([01])\][^\n]*generated guard ([^\n]+)", text):
        shown = re.sub(
            r"L\['\w+'\]\.size\(\)\[[01]\]", axis.replace("0", "B").replace("1", "T"), guard
        )
        where = shown.rstrip(".")
        return f"it computes in one way for some numbers of {size[axis]}, where {where}, and otherwise for others"
    for axis, number in re.findall(
        r"marked ([BT]) as dynamic but your code specialized it to be a constant \((\d+)\)", text
    ):
        return (
            f"it takes the number of {'rows' if axis == 'B' else 'tokens'} for a constant, {number}"
        )
    return ""


_GUARDS = (
    r"Could not guard on data-dependent expression[^\n]*",
    r"Could not extract specialized integer[^\n]*",
    r"Constraints violated[^\n]*(\n[^\n]+)?",
    r"[^\n]*specializ[^\n]*",
)


def _name_in(model: nn.Module, child: nn.Module) -> str:
    return next((name or "model" for name, m in model.named_modules() if m is child), "model")


def _named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Every parameter and buffer under all its names."""
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
