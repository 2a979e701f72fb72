"""The logits in what a forward returns."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from accel.ir.errors import CaptureError


def chosen(out: Any) -> Any:
    """What stands for the logits in a forward's result: itself, `.logits`, or an element of a tuple or dict."""
    if isinstance(out, dict):
        return out.get("logits")
    if hasattr(out, "logits"):
        return out.logits
    return out[0] if isinstance(out, (tuple, list)) and out else out


def vectors_of(out: Any) -> Tensor:
    """The last vectors [B,T,E] in whatever a forward returns: a tensor, or an object with `.last_hidden_state`."""
    found = getattr(out, "last_hidden_state", out)
    if not isinstance(found, Tensor) or found.dim() != 3 or not found.is_floating_point():
        raise CaptureError(
            f"forward returned {type(out).__name__}, not a vector for each token [B,T,E]; give a model without a head, "
            "as AutoModel loads it, whose forward returns them or an object with `.last_hidden_state`"
        )
    return found


def logits_of(out: Any) -> Tensor:
    """The logits in whatever a forward returns: a tensor, an object with `.logits`, a tuple or dict."""
    given, out = type(out).__name__, chosen(out)
    if not isinstance(out, Tensor) or out.dim() != 3 or not out.is_floating_point():
        found = (
            f"a tensor of shape {list(out.shape)} and dtype {out.dtype}"
            if isinstance(out, Tensor)
            else given
        )
        raise CaptureError(
            f"forward returned {found}, not logits [B,T,V]; give a causal language model whose "
            "forward(tokens [B,T]) returns logits, or an object with `.logits`"
        )
    return out
