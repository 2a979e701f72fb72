"""A device beside the processor, for tests: its tensors hold numbers of the processor's memory, and no operator takes
tensors of both, as on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

NAME = "lazy"  # PyTorch has the name, and no kernels for it
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class Held(Tensor):
    """A tensor of the device. `inner`: its numbers."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Held:
        found: Held = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=NAME
        )
        found.inner = inner
        return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


def computed(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operator gives, on the device if its operands, or what it is told, are. Raises RuntimeError."""
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    held = any(isinstance(one, Held) for one in tensors)
    foreign = [one for one in tensors if not isinstance(one, Held) and one.ndim]
    if held and foreign and func not in COPIES:
        raise RuntimeError(f"{func}: tensors of {NAME} and of {foreign[0].device}")
    told = kwargs.get("device")
    goes = held if told is None else torch.device(told).type == NAME
    more = {**kwargs, **({} if told is None else {"device": "cpu"})}
    inner = tree_map_only(Held, lambda one: one.inner, (args, more))
    out = func(*inner[0], **inner[1])
    if goes:
        out = tree_map(lambda one: Held(one) if isinstance(one, Tensor) else one, out)
    return return_and_correct_aliasing(func, args, kwargs, out) if held else out


class SecondDevice(TorchDispatchMode):
    """Within it, PyTorch has the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})
