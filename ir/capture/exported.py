"""A program that the user exported: which of its inputs are tokens and positions, where its logits are, its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor
from torch.export import ExportedProgram

from accel.ir.capture.logits import chosen
from accel.ir.capture.traits import Interface
from accel.ir.errors import CaptureError


def interface_of(exported: ExportedProgram) -> tuple[Interface, int]:
    """How to call it and the size of its vocabulary, off its signature.

    Raises:
        CaptureError: it takes something else, its sizes are fixed, or it returns no logits.
    """
    names = [str(n) for n in exported.graph_signature.user_inputs]
    values = {n.name: n.meta["val"] for n in exported.graph.nodes if "val" in n.meta}
    shapes = [values.get(n) for n in names]
    ints = [isinstance(v, Tensor) and v.dim() == 2 and not v.is_floating_point() for v in shapes]
    inputs = tuple("positions" if len(names) == 2 and "pos" in n else "tokens" for n in names)
    if not all(ints) or sorted(inputs) not in (["tokens"], ["positions", "tokens"]):
        raise CaptureError(
            f"the ExportedProgram takes {names}; accel needs one with tokens [B,T] int64, and optionally "
            "positions [B,T] under a name like position_ids, and no other input: wrap the model "
            "and export again"
        )
    for value in shapes:
        assert isinstance(value, Tensor)
        for axis, letter in enumerate("BT"):
            if isinstance(value.shape[axis], int):
                raise CaptureError(
                    f"the ExportedProgram fixes {letter} = {value.shape[axis]}; export again with "
                    "dynamic_shapes=({0: Dim('B', min=1), 1: Dim('T', min=1)},)"
                )
    outputs = [str(n) for n in exported.graph_signature.user_outputs]
    packed = pytree.tree_unflatten(list(range(len(outputs))), exported.call_spec.out_spec)
    index = chosen(packed)
    logits = values.get(outputs[index]) if isinstance(index, int) else None
    if not isinstance(logits, Tensor) or logits.dim() != 3 or not logits.is_floating_point():
        raise CaptureError(
            f"the ExportedProgram's output has shape {list(getattr(logits, 'shape', []))}, not logits "
            "[B,T,V]; export a module that returns logits, alone, first in a tuple, or under that name"
        )
    return Interface(inputs, index, exported.call_spec.in_spec), int(logits.shape[-1])


def parameters_of(exported: ExportedProgram) -> int:
    """How many parameters and buffers it has; tied ones count once."""
    names = first_names({**exported.state_dict, **exported.constants})
    return sum(t.numel() for n, t in exported.state_dict.items() if names.get(n, n) == n)


def first_names(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Every name of a tensor -> the first name of the same tensor: tied weights stay tied."""
    first: dict[tuple[Any, ...], str] = {}
    return {
        n: first.setdefault((t.data_ptr(), tuple(t.shape), t.stride(), t.dtype), n)
        for n, t in tensors.items()
        if isinstance(t, Tensor) and t.numel()
    }
