"""RWKV-X (arXiv:2504.21463): chunks of the cache by their mean key, one choice for all heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from accel.ir.axis import option
from accel.passes.kv.select import PAGES, Sizes
from accel.passes.kv.select._pages import Pages


@dataclass(frozen=True)
class RwkvX(Pages):
    """Attend to the chunks with the largest q · mean, over the heads together: all heads read the same chunks. A token
    always reads the newest chunk, of which it is one.

    The paper's chunks have 2048 tokens, of which three are read beside the newest; here they are pages. Its model was
    trained so, and its attention has no positions (`accel.ir.capture.arch.rwkv_x` is a small one); each layer with
    attention chooses. It also reads a prompt of more than 6144 tokens chunk by chunk; here prompts read everything.
    """

    page: int = option(128, one_of=PAGES)
    dense_layers: int = option(0, least=0)

    small: ClassVar[Mapping[str, Any]] = {"tokens_read": 12, "page": 4}

    def parts(self, width: int) -> dict[str, tuple[str, Sizes]]:
        return {"mean": ("float32", (width,))}

    def summary(self, keys: Tensor) -> dict[str, Tensor]:
        return {"mean": keys.float().mean(3)}

    def score(self, queries: Tensor, parts: dict[str, Tensor]) -> Tensor:
        return queries.float() @ parts["mean"].transpose(-1, -2)

    def vote(self, scores: Tensor, seen: Tensor) -> Tensor:
        return scores.sum((1, 2))[:, None].expand(-1, scores.shape[1], -1, -1)
