"""Captures that tests share: two modules of the same classes, settings and weights have one program, and it goes once
through the passes that come before a recipe's own. Two that differ in values of weights alone are exported once: what
comes of it is checked against the module, as every capture is.

Export takes most of the time of a small build. What is shared is a copy.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections import OrderedDict
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from accel.compiler import optimize
from accel.compiler import rewrite as rewriting
from accel.compiler.explain import subject
from accel.compiler.over_state import shared as common
from accel.ir.capture import capture as capturing
from accel.ir.capture import export as exporting
from accel.ir.capture.prepare import unobserved
from accel.ir.program import Program
from accel.passes import Pass, Step

from . import traces

KEPT = 16  # programs, the last ones that were asked for
PLAIN = (bool, int, float, str, type(None), torch.dtype)
STEPS = ("prepared", "check_weights", "export", "convert", "check")  # which a test may replace
MODULE = (*vars(nn.Module()), "config")  # what every module holds
FORMS = 64  # exports of modules without their weights
USUAL = 127  # tokens of a text: a context of 128
WAYS = ("repeats", "unroll", "forms", "lean")  # of an export, which a test may replace
_real = capturing.capture_inspected
_trace = exporting._traced
_forms: OrderedDict[Hashable, dict[float, tuple[Any, bool]]] = OrderedDict()  # by longest text
_rewrite, _run = rewriting.rewrite, rewriting.run
_made: OrderedDict[Hashable, Program] = OrderedDict()
_fresh: OrderedDict[int, tuple[Program, Hashable]] = (
    OrderedDict()
)  # the last one, nothing done to it
_begun: list[Hashable] = []  # of a build whose first passes may be shared: what they depend on
_passed: OrderedDict[Hashable, tuple[Program, list[Step]]] = OrderedDict()


def shared(model: Any, traits: Any, stored: Any = None) -> Program:
    """`capture_inspected`, or a copy of what it gave for a module like this."""
    key = None
    if not stored and isinstance(model, nn.Module):
        with unobserved(model):
            key = key_of(model, traits)
    if key is None:
        return traces.shared(_real(model, traits, stored))
    if key not in _made:
        _made[key] = _real(model, traits, stored)
        while len(_made) > KEPT:
            _made.popitem(last=False)
    _made.move_to_end(key)
    program = traces.shared(_made[key].copy())
    _fresh[id(program)] = program, key
    while len(_fresh) > 1:
        _fresh.popitem(last=False)
    return program


def traced(
    adapter: nn.Module, given: tuple[torch.Tensor, ...], shapes: Any, whole: bool
) -> tuple[Any, bool]:
    """`_traced` of an export, or what it gave for a module of the same form, with the weights of this one: for texts as
    long or longer.
    """
    plain = [(k, v) for k, v in sorted(vars(adapter).items()) if not k.startswith("_")]
    form = None if traces.patched() else key_of(adapter.model, plain, values=False)
    if form is None:
        return _trace(adapter, given, shapes, whole)
    most = getattr(shapes[0].get(1), "max", None)
    longest = most if isinstance(most, int) else math.inf
    ways = [getattr(exporting, name) for name in WAYS]
    key = (form, *ways, *(tuple(x.shape) for x in given), len(shapes), whole)
    known = _forms.setdefault(key, {})
    _forms.move_to_end(key)
    while len(_forms) > FORMS:
        _forms.popitem(last=False)
    long_enough = [other for other in known if other >= longest]
    if not long_enough:
        reached, program, repeated = _longest(adapter, given, shapes, whole, longest)
        known[reached] = _with_values(program, {}), repeated
        return program, repeated
    program, repeated = known[min(long_enough)]
    return _with_values(program, dict(exporting._named_tensors(adapter))), repeated


def _longest(
    adapter: nn.Module, given: tuple[torch.Tensor, ...], shapes: Any, whole: bool, longest: float
) -> tuple[float, Any, bool]:
    """How long texts of an export may be, the program, and whether layers are copies: as most tests ask where the
    module can, else as this one does.
    """
    if longest < USUAL:
        size = Dim("T", min=1, max=USUAL)
        wider = (*({**shape, 1: size} for shape in shapes[:2]), *shapes[2:])
        with suppress(Exception):
            return USUAL, *_trace(adapter, given, wider, whole)
    return longest, *_trace(adapter, given, shapes, whole)


def _with_values(program: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """An exported program over these parameters and buffers; without any it keeps its lifted constants alone."""
    made = copy.copy(program)
    signature = program.graph_signature
    buffers = {*signature.inputs_to_buffers.values()}
    lifted = {n: x for n, x in program.constants.items() if n not in buffers}
    names = {*signature.inputs_to_parameters.values(), *buffers}
    made._state_dict = {n: x for n, x in tensors.items() if n in names}
    made._constants = lifted
    return made


def rewritten(job: Any, program: Program, check: Any) -> None:
    """`_rewrite` of a build. Of a capture that is shared, the first passes are those of an earlier build."""
    fresh, key = _fresh.pop(id(program), (None, None))
    plain = fresh is program and job.dump is None and not job.modules and not traces.patched()
    _begun[:] = [(key, check is None, job.target)] if plain else []
    try:
        _rewrite(job, program, check)
    finally:
        _begun.clear()


def run(
    program: Program, passes: list[Pass], check: Any = None, watch: Any = lambda *_: None
) -> list[Step]:
    """`run` of a build's passes."""
    if not _begun:
        return _run(program, passes, check, watch)
    own = common(passes)
    key = (*_begun, repr(program.facts), *passes[:own])
    if key not in _passed:
        steps = _run(program, passes[:own], check, watch)
        _passed[key] = (
            replace(program.copy(), calibration=None, spelling=None, second_model=None),
            steps,
        )
        while len(_passed) > KEPT:
            _passed.popitem(last=False)
    else:
        after, steps = _passed[key]
        for name, value in vars(after.copy()).items():
            if name not in ("traces", "calibration", "spelling", "second_model"):
                setattr(program, name, value)
        for step, line in zip(passes[:own], steps, strict=True):
            watch(step, line, program)

    def told(
        step: Pass, line: Step, program: Program
    ) -> None:  # a run checks its first pass always
        watch(step, line if line.changed else replace(line, error=None), program)

    return [*steps, *_run(program, passes[own:], check, told, done=passes[:own])]


def key_of(model: nn.Module, traits: Any, values: bool = True) -> Hashable:
    """What a capture depends on; nothing where that cannot be told. Without `values`, what an export does."""
    config = getattr(model, "config", None)
    settings = config.to_json_string(use_diff=False) if hasattr(config, "to_json_string") else ""
    parts: list[Hashable] = [repr(traits), settings, *(getattr(capturing, name) for name in STEPS)]
    for name, module in model.named_modules(remove_duplicate=False):
        if any(v for k, v in vars(module).items() if k.endswith("_hooks")):
            return None
        parts += [name, type(module), type(module).forward, module.training]
        for k, v in sorted(vars(module).items()):
            if isinstance(v, (*PLAIN, BuiltinFunctionType)):
                parts.append((k, v))
            elif isinstance(v, FunctionType):
                parts.append((k, v if v.__closure__ else v.__code__))
            elif isinstance(v, partial):
                parts.append((k, v.func, v.args, repr(v.keywords)))
            elif callable(v) and not isinstance(v, (nn.Module, type)):
                return None  # code of this module alone
            elif not values and v is not config and k not in MODULE:
                parts.append((k, repr(v)))
    first: dict[int, str] = {}
    held = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    for name, x in held:
        if type(x) not in (torch.Tensor, nn.Parameter) or x.device.type != "cpu":
            return None
        told = _digest(x) if values else x.requires_grad
        tied = first.setdefault(x.data_ptr(), name)
        parts.append((name, x.dtype, tuple(x.shape), x.stride(), told, tied))
    return tuple(parts)


def _digest(x: torch.Tensor) -> bytes:
    return hashlib.sha256(x.detach().contiguous().flatten().view(torch.uint8).numpy()).digest()


def share() -> None:
    """Let builds and captures of all tests share."""
    for module in (capturing, optimize, subject):
        module.capture_inspected = shared  # type: ignore[attr-defined]
    exporting._traced = traced
    optimize.rewrite, rewriting.run = rewritten, run  # type: ignore[assignment]
