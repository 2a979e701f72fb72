"""GPTQ (arXiv:2210.17323), as AutoGPTQ and GPTQModel write it.

qweight [K*bits/32,N] and qzeros [G,N*bits/32] are words along the first and the second axis, scales is [G,N].
g_idx [K] is the group of each column, which need not be in order (act-order). The format "gptq" stores zero
points less one, "gptq_v2" as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from accel.compiler.load.quantised import Base, Weight, modules, needed, number, sized, typed
from accel.compiler.load.quantised._packing import from_words, words_of
from accel.ir.codes import Coded, Codes
from accel.ir.errors import CaptureError

_FORMATS = ("gptq", "gptq_v2")
_BITS = (2, 3, 4, 8)


@dataclass
class Gptq(Base):
    """2, 3, 4 or 8 bits, with or without act-order."""

    def weights(self, tensors: Mapping[str, Tensor]) -> Iterator[Weight]:
        form = self.config.get("checkpoint_format") or "gptq"
        if form not in _FORMATS or self.config.get("is_marlin_format"):
            raise CaptureError(
                f"quantization_config.checkpoint_format is {form}, which is laid out for one kernel; accel reads "
                f"{' and '.join(_FORMATS)}: give the checkpoint that it was made from"
            )
        given = number(self.config, "bits", _BITS)
        for module, parts in modules(tensors, "qweight"):
            needed(module, "qweight", parts, "qzeros", "scales")
            for part in ("qweight", "qzeros"):
                typed(f"{module}.{part}", parts[part], 2, torch.int32)
            weight, groups = parts["qweight"], parts.get("g_idx")
            typed(f"{module}.scales", parts["scales"], 2)
            if groups is not None:
                typed(f"{module}.g_idx", groups, 1, torch.int32, torch.int64)
            count = weight.shape[0] * 32 // given if groups is None else len(groups)
            bits = (
                weight.shape[0] * 32 // max(1, count)
            )  # some modules may have others than the rest
            if bits not in _BITS:
                raise CaptureError(
                    f"{module}.qweight is {list(weight.shape)}, which does not hold {count} columns of "
                    f"{', '.join(map(str, _BITS))} bits: checkpoint and configuration do not match"
                )
            rows, many = weight.shape[1], parts["scales"].shape[0]
            sized(f"{module}.qweight", weight, words_of(count, bits), rows)
            sized(f"{module}.qzeros", parts["qzeros"], many, words_of(rows, bits))
            sized(f"{module}.scales", parts["scales"], many, rows)
            group = _group(module, count, many, self.config.get("group_size"))
            order = None if groups is None else _out_of_order(module, groups.long(), group, many)
            read = partial(self._codes, parts, bits, group, order, form == "gptq")
            layout = (bits, group, None if order is None else order.numpy().tobytes())
            stored = Coded.of_shape((rows, count), read, layout, self.pages)
            used = [f"{module}.{part}" for part in parts if part != "bias"]
            yield Weight(f"{module}.weight", stored, used)

    def _codes(
        self, parts: Mapping[str, Tensor], bits: int, group: int, groups: Tensor | None, less: bool
    ) -> Codes:
        weight, scales = parts["qweight"], parts["scales"].float().t().contiguous()
        count = weight.shape[0] * 32 // bits
        q = from_words(weight.t(), bits, count)
        zeros = from_words(parts["qzeros"], bits, len(scales)).t().contiguous()
        middle = 2 ** (bits - 1)
        # some writers call the format "gptq" and store the zero points of symmetric codes as they are
        if less and not (self.config.get("sym") and bool((zeros == middle).all())):
            zeros = (zeros + 1) & (2**bits - 1)
        return Codes(q, scales, zeros, bits, group, groups)


def _group(module: str, count: int, many: int, group_size: object) -> int:
    """Columns of a group."""
    if many == 1:
        return count
    if isinstance(group_size, int) and group_size > 0 and -(-count // group_size) == many:
        return group_size
    if not many or count % many:
        raise CaptureError(
            f"{module}.scales has {many} groups for {count} columns, and quantization_config.group_size is "
            f"{group_size!r}: checkpoint and configuration do not match"
        )
    return count // many


def _out_of_order(module: str, groups: Tensor, group: int, many: int) -> Tensor | None:
    """The group of each column, where the groups do not lie one after another."""
    if torch.equal(groups, torch.arange(len(groups)) // group):
        return None
    if not 0 <= int(groups.min()) <= int(groups.max()) < many:
        raise CaptureError(
            f"{module}.g_idx names groups beyond the {many} of scales: fetch it again"
        )
    return groups
