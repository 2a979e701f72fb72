"""Quantised checkpoints. A file is a format, named as `quant_method` of config.json names it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from accel.ir.axis import Axis
from accel.ir.codes import Coded, Made
from accel.ir.errors import CaptureError
from accel.ir.weights import Experts, Pages, Stored

FORMATS = Axis("checkpoint", __name__)


@dataclass(frozen=True)
class Weight:
    """A float parameter of the model, and the checkpoint's tensors that stand for it."""

    name: str
    stored: Coded | Made | Experts
    parts: Collection[str]


@dataclass
class Base(ABC):
    """One format, of a checkpoint whose `quantization_config` is `config` and whose files are `pages`."""

    config: Mapping[str, Any]
    pages: Pages
    notes: list[str] = field(default_factory=list)  # what of the checkpoint has no effect

    @abstractmethod
    def weights(self, tensors: Mapping[str, Tensor]) -> Iterator[Weight]:
        """The quantised weights among a checkpoint's tensors. The other tensors keep their names.

        Raises:
            CaptureError: a variant of the format that is not read, or tensors that do not fit together.
        """


def dequantised(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    stored: Mapping[str, Stored],
    pages: Pages,
) -> tuple[dict[str, Stored], list[str]]:
    """A checkpoint's tensors as float parameters of the model, and what is to be said of them.

    config: `quantization_config`. tensors, stored: all tensors, as they lie and as parameters.

    Raises:
        CaptureError: as `Base.weights`; or no tensor is quantised.
    """
    method = str(config["quant_method"])
    form = FORMATS.method(method)(config, pages)
    found, left = {}, dict(stored)
    for weight in form.weights(tensors):
        for part in weight.parts:
            left.pop(part, None)
        found[weight.name] = weight.stored
    if not found:
        raise CaptureError(
            f"quantization_config of config.json says {method}, and none of the {len(tensors)} tensors is quantised "
            "so; remove it where the weights are floats, or fetch the checkpoint again"
        )
    floats = sum(isinstance(weight, Made) for weight in found.values())
    notes = [f"{len(found)} weights of the checkpoint are quantised ({method})"]
    if floats:
        notes.append(
            f"{floats} of them are computed in float32: accel has no integer codes for them"
        )
    return {**left, **found}, notes + form.notes


def number(config: Mapping[str, Any], key: str, allowed: Collection[int]) -> int:
    """A whole number of `quantization_config`. Raises CaptureError."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value not in allowed:
        known = (
            f"{min(allowed)} to {max(allowed)}"
            if len(allowed) > 8
            else ", ".join(map(str, allowed))
        )
        raise CaptureError(f"quantization_config.{key} is {value!r}; accel reads {known}")
    return value


def needed(module: str, tensor: str, parts: Mapping[str, Tensor], *names: str) -> None:
    """Raise CaptureError where a module lacks a tensor that belongs to its tensor `tensor`."""
    for name in names:
        if name not in parts:
            raise CaptureError(f"{module}.{tensor} has no {name} beside it: fetch it again")


def typed(name: str, tensor: Tensor, axes: int, *dtypes: torch.dtype) -> None:
    """Raise CaptureError where a tensor has not so many axes, or is of none of these types (of any: none given)."""
    if tensor.dim() == axes and (not dtypes or tensor.dtype in dtypes):
        return
    known = f" of {' or '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)}"
    raise CaptureError(
        f"{name} is {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}, and the format has {axes} axes"
        f"{known if dtypes else ''} there: fetch the checkpoint again"
    )


def sized(name: str, tensor: Tensor, *shape: int) -> None:
    """Raise CaptureError where a tensor has another shape than its neighbours imply."""
    if tuple(tensor.shape) != shape:
        raise CaptureError(
            f"{name} is {list(tensor.shape)}, and by config.json and the tensors beside it it should be "
            f"{list(shape)}: checkpoint and configuration do not match"
        )


def modules(tensors: Mapping[str, Tensor], suffix: str) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """(module, its tensors by the rest of their names) of all modules that have a tensor `suffix`."""
    found: dict[str, dict[str, Tensor]] = {
        name.removesuffix(f".{suffix}"): {} for name in tensors if name.endswith(f".{suffix}")
    }
    for name, tensor in tensors.items():
        module, dot, rest = name, "", ""
        while module and module not in found:
            module, dot, last = module.rpartition(".")
            rest = f"{last}.{rest}" if rest else last
        if dot:
            found[module][rest] = tensor
    yield from found.items()
