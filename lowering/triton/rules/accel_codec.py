"""Keys and values in codes: which codes attention reads as they lie, and what it is told of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from accel.ir.ops import codec, groups
from accel.ir.ops.op import operand_of
from accel.ir.region import Conditional, graphs_of
from accel.lowering.triton.writer.builder import Builder
from accel.lowering.triton.writer.sizes import rows
from accel.lowering.triton.writer.table import lower

_GROUPED = ("rows", "channels")


@dataclass(frozen=True)
class Code:
    """How keys or values are stored, as `kernels/_stored.py` has it. width: numbers of a slot, where the tensor does
    not say; rows: slots of a block. coarse: a bool [], of `finer`.
    """

    kind: str = ""
    width: int = 0
    bits: int = 8
    group: int = 1
    rows: int = 1
    more: Tensor | None = None
    least: Tensor | None = None
    finer: Tensor | None = None
    coarse: Tensor | None = None

    def laid(self, tensor: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
        """Codes as the kernel reads them, and its strides of rows, heads and slots."""
        if self.kind in _GROUPED:
            return tensor.contiguous(), (0, 0, 0)
        tensor = rows(tensor)
        return tensor, (tensor.stride(0), tensor.stride(1), tensor.stride(2))

    def constants(self, side: str) -> dict[str, Any]:
        """What the kernel is told of keys, K, or values, V."""
        found = {
            "KIND": self.kind, "BITS": self.bits, "GROUP": self.group, "ROWS": self.rows,
            "FINER": self.finer is not None,
        }  # fmt: skip
        return {f"{side}_{name}": value for name, value in found.items()}


def stored(k: fx.Node, v: fx.Node) -> tuple[Any, ...]:
    """Keys, values, their scales by slot, and what their `Code`s are made of: codes and halves are read as they lie."""
    (k, k_scale, k_code), (v, v_scale, v_code) = _side(k), _side(v)
    scales = None if k_scale is None and v_scale is None else (k_scale, v_scale)
    return k, v, scales, (k_code, v_code)


def _side(node: fx.Node) -> tuple[fx.Node, fx.Node | None, tuple[Any, ...]]:
    x: Any = node
    target = node.target
    if target is codec.decode_rows.default:
        return x.args[0], x.args[1], ()
    if target is codec.decode_halves.default:
        return x.args[0], None, ()
    if target is codec.look_up_rows.default:
        code = ("table", 0, 8, 1, 1, operand_of(x, "table"))
        return operand_of(x, "q"), operand_of(x, "scale"), code
    if target is codec.decode_static.default:
        scale = operand_of(x, "scale")
        each = int(scale.meta["val"].shape[-1] > 1 or scale.meta["val"].shape[0] > 1)
        code = ("static", operand_of(x, "width"), operand_of(x, "bits"), each, 1, scale)
        return operand_of(x, "q"), None, code
    if target in (groups.group_dequantize.default, read_as_asked):
        codes, scale, least, bits, group, along, block, width, *finer = x.args
        return codes, None, (along, width, bits, group, block, scale, least, *finer)
    return x, None, ()


def read_as_asked(
    codes: Tensor,
    scale: Tensor,
    least: Tensor,
    bits: int,
    group: int,
    along: str,
    block: int,
    width: int,
    finer: Tensor,
    coarse: Tensor,
) -> Tensor:
    """`group_dequantize` with finer codes, or where `coarse` [] holds without; it asks the host nothing."""
    given = codes, scale, least, bits, group, along, block, width
    plain: Tensor = groups.group_dequantize(*given)
    return torch.where(coarse, plain, groups.group_dequantize(*given, finer))


@lower(Conditional)
def choice_rule(b: Builder, region: Conditional, args: tuple[fx.Node, ...]) -> Any:
    """Of the same codes with finer ones or without, the kernel chooses."""
    coarsely, wholly = (_only(graph) for graph in graphs_of(region))
    if coarsely is None or wholly is None:
        return NotImplemented
    (plain, names), (fine, _) = coarsely, wholly
    same = len(plain.args) + 1 == len(fine.args) and not plain.kwargs and not fine.kwargs
    if not same or _said(plain) != _said(fine)[: len(plain.args)]:
        return NotImplemented
    given = dict(zip(names, args, strict=True))
    operands = [given[str(a.target)] if isinstance(a, fx.Node) else a for a in fine.args]
    return (b.call(read_as_asked, *operands, args[0]),)


def _only(graph: fx.Graph) -> tuple[Any, list[str]] | None:
    """The `group_dequantize` that a graph is, and the names of its operands; none where it is anything else."""
    calls = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    if len(calls) != 1 or calls[0].target is not groups.group_dequantize.default:
        return None
    return calls[0], [str(n.target) for n in graph.find_nodes(op="placeholder")]


def _said(call: Any) -> list[Any]:
    return [str(a.target) if isinstance(a, fx.Node) else a for a in call.args]
