"""Program -> a Program whose entries run as compiled graphs on one device."""

from __future__ import annotations

import importlib
import pkgutil
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, fx

from accel.ir.entries import kind_of
from accel.ir.program import Program
from accel.ir.state import output_of
from accel.ir.ties import TOPK
from accel.lowering import triton
from accel.lowering.triton import rules
from accel.lowering.triton.writer.flags import CALL, Flag
from accel.passes.check import codes_slack, differs, noise, quantile, token_errors
from accel.passes.drive import run_both_ways, run_whole

_ONE_AT_A_TIME = threading.Lock()  # Triton's interpreter has one grid


@dataclass(frozen=True)
class Compiled:
    """One entry. `outputs` are what it gives besides the `states`, which it leaves in their buffers. `plan`: what the
    host's branches go by, whose values it takes, too: inputs, and `flags` that the host computes. `waits`: it has a
    branch whose flag the device computes.
    """

    module: fx.GraphModule
    inputs: list[str]
    outputs: list[str]
    states: list[str]
    defaults: dict[str, Tensor]  # of the inputs that a caller may leave out
    plan: tuple[str, ...] = ()
    waits: bool = False
    flags: Mapping[str, Flag] = field(default_factory=dict)

    def __call__(
        self, args: Sequence[Any], plan: Sequence[Any] | None = None
    ) -> tuple[Tensor, ...]:
        """What the entry gives for its inputs, in order. plan: the values of `plan` (None: they are read off the
        inputs).
        """
        if plan is None:
            inputs = dict(zip(self.inputs, args, strict=True))
            told = {**plan_of(self, inputs), **flags_of(self, inputs)}
            plan = [told[name] for name in self.plan]
        with _ONE_AT_A_TIME if triton.interpreted() else nullcontext(), torch.no_grad():
            found: tuple[Tensor, ...] = self.module(*args, *plan)
        return found


def plan_of(compiled: Compiled, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    """What the host's branches go by, of the inputs that are there: a bool, or a tuple of them."""
    values = {n: inputs[n].tolist() for n in compiled.plan if n in inputs}
    return {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}


def flags_of(compiled: Compiled, inputs: Mapping[str, Tensor]) -> dict[str, bool]:
    """What the host computes for its branches. Values are read of the inputs in `CALL` alone."""
    read = {name for flag in compiled.flags.values() for name in flag.inputs}
    inputs = {n: inputs[n].cpu() if n in CALL else inputs[n] for n in read}
    return {name: flag(inputs) for name, flag in compiled.flags.items()}


@dataclass
class Lowered(Program):
    """A Program as it is, run by kernels. Its parameters are on the device, once: `tensors`, by name.

    halves: those that lie in half precision, and to which type products round their inputs.
    """

    device: str = "cpu"
    compiled: dict[str, Compiled] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    halves: dict[str, torch.dtype] = field(default_factory=dict)

    def run(self, entry: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run an entry; inputs and outputs by name, on the device. State is written in place: what is
        given as an input is given back as its output.
        """
        e = self.compiled[entry]
        inputs = {**e.defaults, **inputs}
        out = dict(zip(e.outputs, e([inputs[name] for name in e.inputs]), strict=True))
        return out | {output_of(name): inputs[name] for name in e.states}


def lower_program(program: Program, device_params: dict[str, Tensor] | None = None) -> Lowered:
    """Compile every entry for the device at hand. `device_params`: parameters on the device, by name, to which
    it adds.

    Raises:
        LoweringError: this process can run no kernels.
    """
    triton.need()
    _load_rules()
    from accel.lowering.triton.writer import tuned
    from accel.lowering.triton.writer.builder import Builder
    from accel.lowering.triton.writer.halves import stored_in_half

    tuned.begin()
    device = triton.device()
    same = {f.name: getattr(program, f.name) for f in fields(Program)}
    lowered = Lowered(**same, device=device)
    tensors = {} if device_params is None else device_params  # which all entries share
    narrow = stored_in_half(program)
    for name, entry in program.entries.items():
        builder = Builder(program, device, tensors, narrow)
        kind = kind_of(name)
        in_place = kind is not None and kind.in_place
        states = [i for i in entry.inputs if output_of(i) in entry.outputs] if in_place else []
        outputs = builder.entry(entry, states)
        defaults = {n: value.to(device) for n, value in entry.defaults.items()}
        lowered.compiled[name] = Compiled(
            *(builder.module(), entry.inputs, outputs, states, defaults),
            tuple(builder.plan),
            builder.waits,
            builder.flags,
        )
    lowered.tensors = {name: tensors[name] for name in program.params if name in tensors}
    whole = Builder(program, device, tensors, narrow)
    lowered.halves = {n: t.dtype for n, t in lowered.tensors.items() if whole.in_half(n)}
    return lowered


def _load_rules() -> None:
    """Import every file of lowering rules; they import triton."""
    for module in pkgutil.iter_modules(rules.__path__):
        importlib.import_module(f"{rules.__name__}.{module.name}")


def rounded_logits(lowered: Program, cases: Sequence[Tensor]) -> list[Tensor]:
    """Logits of tokens by the reference, which rounds inputs of products with weights in half precision to their type;
    none where there are no such weights.
    """
    from accel.lowering.triton.writer.halves import rounding

    if not isinstance(lowered, Lowered) or not lowered.halves:
        return []
    same = {f.name: getattr(lowered, f.name) for f in fields(Program)}
    program = rounding(Program(**same), lowered.halves)
    with program.params.read_once():
        return [run_whole(program, tokens) for tokens in cases]


def triton_error(
    lowered: Program, cases: Sequence[tuple[Tensor, Tensor]], rounded: Sequence[Tensor] = ()
) -> float:
    """The largest error of a token over the cases (tokens [B,T], logits [B,T,V] with nothing rounded), relative to the
    largest logit, in one call and in several; where the cache rounds, and where products round their inputs as in the
    `rounded` logits of each case, that of nine tokens in ten. Where weights lie in half precision, the reference
    computes these logits here.

    Raises:
        Miscompiled: the kernels compute something else.
    """
    rounded = rounded_logits(lowered, [tokens for tokens, _ in cases]) or rounded
    slack, chooses = codes_slack(lowered), bool(lowered.nodes(TOPK))
    share = (0.5 if chooses else 0.9) if slack or rounded else 1.0
    bound, worst = max(1e-3, slack), 0.0
    for i, (tokens, want) in enumerate(cases):
        ways = run_both_ways(lowered, tokens)
        errors = torch.cat([token_errors(got, want[:, rows]) for got, rows in ways])
        found = quantile(errors, share)
        said = f"target 'triton' differs from the model by {found:.2e} of the largest logit"
        if not rounded and found > bound:
            raise differs(f"{said}, more than {bound:g}", lowered)
        if rounded and (over := noise(errors, token_errors(rounded[i], want), chooses)):
            raise differs(
                f"{said}, more than the reference, which rounds likewise: {over[0]:.2e} where {over[1]:.2e} is allowed",
                lowered,
            )
        worst = max(worst, found)
    return worst
