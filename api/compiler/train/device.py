"""The device on which something learns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from accel.ir.errors import InputError
from accel.ir.program import Program

CPU = "cpu"
_DRAWS = (torch.rand, torch.randn, torch.randint, torch.randperm)


def check_device(device: str) -> None:
    """Raise InputError where PyTorch has no such device."""
    try:
        torch.empty(0, device=device)
    except (
        RuntimeError,
        AssertionError,
    ) as error:  # of a build without it, or a machine without it
        raise InputError(
            f"device is {device!r}, and PyTorch finds none such here ({str(error).splitlines()[0]}); give "
            f"{CPU!r}, or install a PyTorch build for the device"
        ) from error


@contextmanager
def made_on(device: str) -> Iterator[None]:
    """Within it new tensors are made on a device. What the host says, and what a generator draws, is moved there, so
    that a seed gives the same numbers on every device.
    """
    if device == CPU:
        yield
        return
    with torch.device(device), _Moved(device):
        yield


class _Moved(TorchFunctionMode):
    """Moves what the host makes."""

    def __init__(self, device: str):
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func is torch.tensor or (func in _DRAWS and "generator" in given):
            return func(*args, **{**given, "device": CPU}).to(given.get("device") or self.device)
        return func(*args, **given)


def move(program: Program, device: str) -> None:
    """Put a program's parameters on a device, and let its graphs make their tensors there."""
    for entry in program.entries.values():
        entry.defaults = {name: value.to(device) for name, value in entry.defaults.items()}
    for name in program.params:
        program.params[name] = program.params[name].to(device)
    for node in program.nodes():
        schema = getattr(node.target, "_schema", None)
        makes = schema is not None and any(one.name == "device" for one in schema.arguments)
        given = (one.meta.get("val") for one in node.all_input_nodes)
        if makes and ("device" in node.kwargs or not any(isinstance(v, Tensor) for v in given)):
            node.kwargs = {**node.kwargs, "device": torch.device(device)}
