"""Program -> a callable step on a GPU: an FX graph of PyTorch operators in which the dialect's are Triton kernels."""

from __future__ import annotations

import importlib.util
import os

from accel.ir.errors import LoweringError

_ASKS = "TRITON_INTERPRET"  # Triton's own variable: kernels are run by its interpreter, on the CPU


def interpreted() -> bool:
    """Whether kernels are to be run by Triton's interpreter."""
    return os.environ.get(_ASKS, "0").lower() in ("1", "true", "on", "yes")


def missing() -> str:
    """Why this process cannot run the target, and what to do; "" where it can."""
    import torch

    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    if not interpreted():
        if torch.cuda.is_available():
            return ""
        return (
            f"there is no CUDA GPU; set {_ASKS}=1 before Python starts to try the kernels on the CPU "
            "(slow), or use target='onnx'"
        )
    import triton
    from triton.language import sum as reduction

    if isinstance(reduction, triton.runtime.JITFunction):  # decorated before it was asked for
        return f"triton was imported before {_ASKS} was set: set it before Python starts"
    return ""


def device() -> str:
    """Where the target's tensors lie."""
    return "cpu" if interpreted() else "cuda"


def need() -> None:
    """Raise LoweringError where this process cannot run the target."""
    if reason := missing():
        raise LoweringError(f"target 'triton': {reason}")
