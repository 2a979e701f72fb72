"""A program that the user exported: which of its inputs are tokens and positions, and where its logits are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.export import ExportedProgram

from accel.ir.adapter import chosen, logits_of
from accel.ir.errors import CaptureError


@dataclass(frozen=True)
class Interface:
    """How to call an exported program: `inputs` in its own order, each 'tokens' or 'positions'."""

    inputs: tuple[str, ...]
    output: int  # which of the flat outputs the logits are
    vocab_size: int
    in_spec: Any

    def call(self, module: nn.Module, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits [B,T,V], whatever the inputs are called and the outputs are packed in."""
        given = {"tokens": tokens, "positions": positions}
        args, kwargs = pytree.tree_unflatten([given[n] for n in self.inputs], self.in_spec)
        return logits_of(module(*args, **kwargs))


def interface_of(exported: ExportedProgram) -> Interface:
    """Read it off the signature.

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
            "positions [B,T] under a name like position_ids, and nothing else: wrap the model and export "
            "again"
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
    return Interface(inputs, index, int(logits.shape[-1]), exported.call_spec.in_spec)
