"""Models whose rotary pairs are halves of a head, which llama.cpp's converter puts beside one another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from accel.compiler.load.gguf import FACTORS, Base
from accel.compiler.load.gguf._blocks import stored
from accel.compiler.load.gguf._file import GgufTensor
from accel.compiler.load.gguf._metadata import LONG, SHORT
from accel.ir.weights import Stored


@dataclass(frozen=True)
class Paired(Base):
    """The rows of queries and keys are put back in the order of the model."""

    read_apart = (FACTORS, LONG, SHORT)

    def weight(self, kind: str, name: str, tensor: GgufTensor) -> Stored:
        if kind not in ("attn_q", "attn_k"):
            return super().weight(kind, name, tensor)
        heads = self.metadata.count("attention.head_count")
        if kind == "attn_k":
            heads = self.metadata.sole_count("attention.head_count_kv")
        rows = tensor.shape[0]
        if rows % (2 * heads):
            raise self.metadata.wrong(f"{name} is {list(tensor.shape)} for {heads} heads")
        return stored(name, tensor, self.metadata.file.pages, paired(rows, heads))


def paired(rows: int, heads: int) -> Tensor:
    """Rows [rows] of queries or keys where the rotary pairs are halves of a head, in a file where they are
    neighbours.
    """
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()
