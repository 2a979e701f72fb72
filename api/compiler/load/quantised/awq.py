"""AWQ (arXiv:2306.00978), as AutoAWQ writes it: the layout "gemm".

qweight [K,N/8] and qzeros [G,N/8] hold eight codes of 4 bits in a word, along the rows' axis and in an order of
their own; scales is [G,N].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from accel.compiler.load.quantised import Base, Weight, modules, needed, number, sized, typed
from accel.compiler.load.quantised._packing import from_words
from accel.ir.codes import Coded, Codes
from accel.ir.errors import CaptureError

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of a word's eight rows among its codes


@dataclass
class Awq(Base):
    """4 bits with zero points."""

    def weights(self, tensors: Mapping[str, Tensor]) -> Iterator[Weight]:
        version = str(self.config.get("version") or "gemm").lower()
        if version != "gemm":
            raise CaptureError(
                f"quantization_config.version is {version}; accel reads gemm: quantise the model in that version"
            )
        number(self.config, "bits", (4,))
        for module, parts in modules(tensors, "qweight"):
            needed(module, "qweight", parts, "qzeros", "scales")
            for part in ("qweight", "qzeros"):
                typed(f"{module}.{part}", parts[part], 2, torch.int32)
            weight, scales = parts["qweight"], parts["scales"]
            typed(f"{module}.scales", scales, 2)
            count, words = weight.shape
            many = scales.shape[0]
            sized(f"{module}.qzeros", parts["qzeros"], many, words)
            sized(f"{module}.scales", scales, many, 8 * words)
            if not many or count % many:
                raise CaptureError(
                    f"{module}.scales has {many} groups for {count} columns: fetch it again"
                )
            group = count // many
            read = partial(_codes, parts, group)
            stored = Coded.of_shape((8 * words, count), read, (4, group), self.pages)
            used = [f"{module}.{part}" for part in parts if part != "bias"]
            yield Weight(f"{module}.weight", stored, used)


def _codes(parts: Mapping[str, Tensor], group: int) -> Codes:
    scales = parts["scales"].float().t().contiguous()
    return Codes(_rows(parts["qweight"]), scales, _rows(parts["qzeros"]), 4, group)


def _rows(words: Tensor) -> Tensor:
    """Words [K,N/8] -> codes [N,K]."""
    codes = from_words(words, 4, 8 * words.shape[1])
    ordered: Tensor = codes.unflatten(1, (-1, 8))[:, :, list(_PLACES)].flatten(1)
    return ordered.t().contiguous()
