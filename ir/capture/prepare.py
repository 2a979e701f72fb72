"""A model made ready for capture and put back as it was: its precision, its forms, an adapter around it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo.config as dynamo
from torch import Tensor, nn
from torch.export import ExportedProgram

from accel.ir.capture.adapter import Adapter, CrossEncoder, EncoderDecoder, UsersProgram
from accel.ir.capture.flex import flex_uncompiled
from accel.ir.capture.forms import short_chunks
from accel.ir.capture.inspect import unwrapped
from accel.ir.capture.length_limits import short_forms
from accel.ir.capture.traits import Kind, ModelTraits, Swaps
from accel.ir.weights import Stored, reading, stand_in

_OBSERVERS = "transformers.utils.output_capturing"
_OBSERVED = "_output_capturing_hooks_installed"


@dataclass(frozen=True)
class Prepared:
    """A model behind an adapter, where the weights of its stand-ins lie, and what is to be said of them."""

    adapter: Adapter | UsersProgram
    stored: Mapping[Tensor, Stored]
    notes: tuple[str, ...] = ()

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Logits [B,T,V]."""
        with torch.no_grad(), reading(self.stored):
            out: Tensor = self.adapter(*inputs)
        return out


@contextlib.contextmanager
def prepared(
    model: Any, traits: ModelTraits, stored: Mapping[Tensor, Stored] | None = None
) -> Iterator[Prepared]:
    """The model as `export` and `check` take it; `stored`: see `capture`."""
    if isinstance(model, ExportedProgram):
        assert traits.interface is not None  # it was not refused
        yield Prepared(UsersProgram(model, traits.interface), {})
        return
    notes: list[str] = []
    model, stored = _widened(unwrapped(model), stored or {}, notes)
    pairs = traits.embedding is not None and traits.embedding.pairs is not None
    kind = CrossEncoder if pairs else Adapter
    kind = EncoderDecoder if traits.kind in (Kind.ENCODER_DECODER, Kind.MODULE_PAIR) else kind
    with (
        inference_mode(model, traits),
        unobserved(model),
        flex_uncompiled(),
        _uncached(),
        short_chunks(model, traits.swaps.chunked),
        short_forms(model, traits.swaps),
    ):
        yield Prepared(kind(model, traits).eval(), stored, tuple(notes))


@contextlib.contextmanager
def inference_mode(model: Any, traits: ModelTraits) -> Iterator[None]:
    """The module in eval mode and in the forms that export, put back as it was afterwards."""
    training = [m for m in model.modules() if m.training]
    config = getattr(model, "config", None)
    attention = getattr(config, "_attn_implementation", None)
    experts = getattr(config, "_experts_implementation", None)
    model.eval()
    try:
        if traits.hugging_face:
            _choose_forms(model, traits.swaps)
        yield
    finally:
        for module in training:
            module.training = True
        if traits.hugging_face and attention is not None:
            model.set_attn_implementation(attention)
        if traits.swaps.experts and experts is not None:
            model.set_experts_implementation(experts)


@contextlib.contextmanager
def unobserved(model: nn.Module) -> Iterator[None]:
    """The module as it was before transformers was asked for its layers' states. Each layer has kept a hook of its own
    since, so no two would be of one kind (`repeats`); where the forward asks for states, it has hooks again.
    """
    before = [
        (hooks, dict(hooks))
        for hooks in (module._forward_hooks for module in model.modules())
        if any(getattr(hook, "__module__", "") == _OBSERVERS for hook in hooks.values())
    ]
    marked = [m for m in model.modules() if m.__dict__.pop(_OBSERVED, False)] if before else []
    for hooks, kept in before:
        for number, hook in kept.items():
            if getattr(hook, "__module__", "") == _OBSERVERS:
                del hooks[number]
    try:
        yield
    finally:
        for hooks, kept in before:
            hooks.clear()
            hooks.update(kept)
        for module in marked:
            module.__dict__[_OBSERVED] = True


def _choose_forms(model: Any, swaps: Swaps) -> None:
    """The forms that export: sdpa, or written-out attention where sdpa is missing or leaves something
    out (a soft cap; a scale by the layer; causality, beside a sparse choice of keys); experts as batched
    products, without a loop over what each token chose.
    """
    try:
        model.set_attn_implementation("eager" if swaps.written_attention else "sdpa")
    except (ValueError, ImportError):
        model.set_attn_implementation("eager")
    if swaps.experts:
        model.set_experts_implementation("batched_mm")


def _uncached() -> Any:
    """torch caches the shapes of what it traces; where sizes are symbols that costs more than it saves."""
    config: Any = dynamo
    return config.patch(fake_tensor_cache_enabled=False)


def _widened(
    model: nn.Module, stored: Mapping[Tensor, Stored], notes: list[str]
) -> tuple[nn.Module, dict[Tensor, Stored]]:
    """The model in float32, and what is stored for its parameters that are stand-ins.

    A half-precision model is copied with stand-ins for its parameters, each of which is widened when
    it is read; the model itself stays as it is.
    """
    tensors = {*model.parameters(), *model.buffers()}
    narrow = {t for t in tensors if t.is_floating_point() and t.dtype is not torch.float32}
    found = {t.dtype for t in narrow}
    found |= {s.source.dtype for t, s in stored.items() if s.blank.dtype != s.source.dtype}
    if found:
        names = " and ".join(sorted(str(d).removeprefix("torch.") for d in found))
        notes.append(f"the program is in float32, its weights are stored in {names}")
    stored = dict(stored)
    if not narrow:
        return model, stored
    copies: dict[int, Any] = {id(t): t for t in model.parameters() if t not in narrow}
    for tensor in narrow:
        if isinstance(tensor, nn.Parameter):
            wide: Tensor = nn.Parameter(stand_in(tensor.shape), requires_grad=False)
            stored[wide] = stored.get(tensor) or Stored(tensor.detach(), (Tensor.float,))
        else:
            wide = tensor.float()
        copies[id(tensor)] = wide
    return copy.deepcopy(model, copies), stored
