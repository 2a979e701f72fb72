"""What the device has."""

from __future__ import annotations

from typing import Any

import torch

_NO_DEVICE = 1  # multiprocessors that the interpreter is said to have
LARGE = 160 << 10  # bytes on the chip of what the widest tiles take
WAVES = 2  # programs for each multiprocessor


def processors(device: torch.device) -> int:
    """Multiprocessors."""
    if device.type != "cuda":
        return _NO_DEVICE
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def shared(device: torch.device) -> int:
    """Bytes that a program may have on the chip."""
    if device.type != "cuda":
        return LARGE
    properties: Any = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0))


def rows(device: torch.device) -> int:
    """Rows of a tile whose float32 products are three of TF32, at most: before 9.0 more do not fit into registers, as
    Triton 3.7 compiles them.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 9:
        return 64
    return 32


def precision(device: torch.device) -> str:
    """Of float32 products: three on tensor cores, which are as good as one of float32, where there are such."""
    return "tf32x3" if device.type == "cuda" and torch.version.hip is None else "ieee"


def splits(device: torch.device, programs: int, parts: int) -> int:
    """Into how many splits so many parts are cut, so that few programs fill the device too."""
    return max(1, min(parts, WAVES * processors(device) // programs))
