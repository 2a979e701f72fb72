"""KVzap (arXiv:2601.07891): a small trained module says of each token, from its hidden state, how much attention it
would draw if the text were repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from accel.ir.axis import option
from accel.passes.kv.score import Base
from accel.passes.trained import Lesson, Trained


@dataclass(frozen=True)
class ThresholdEvict(Trained, Base):
    """The score of a token is made once, when it is cached, and holds for ever. With the budget `threshold` a token
    goes where its score is below it, once it is not among the last `recent` any more (the delay
    of Dynamic Memory Sparsification). So a session keeps the same tokens however often it evicts.

    A layer has linear, GELU, linear. They learn the logarithm of KVzip's score with norms (KVzip+): the largest
    attention that the token draws of the text's repeat, times the norm of its value behind the output projection, by
    the norm of the hidden state of the query's token. The paper's linear form is left out.
    """

    recent: int = option(128, least=0)

    lacks = "the linear form of the scorer"
    key: ClassVar[str] = "threshold-evict"
    when: ClassVar[str] = "generated"
    small: ClassVar[Mapping[str, Any]] = {"recent": 3}

    def sizes(self, width: int, heads: int) -> dict[str, tuple[int, ...]]:
        return {"w1": (-1, width), "b1": (-1,), "w2": (heads, -1), "b2": (heads,)}

    def note(self, hidden: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:  # type: ignore[override]
        """The score, [B,T,E] -> [B,T,G]."""
        return F.linear(F.gelu(F.linear(hidden, w1, b1)), w2, b2)

    def __call__(self, notes: Tensor) -> Tensor:
        return notes

    # Training (api/compiler/train)

    def start(
        self, width: int, heads: int, inner: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Every token has about the score of a text's token."""
        w1 = torch.randn(inner, width, generator=generator) * width**-0.5
        w2 = torch.randn(heads, inner, generator=generator) * 0.1 * inner**-0.5
        return {"w1": w1, "b1": torch.zeros(inner), "w2": w2, "b2": torch.full((heads,), -5.0)}

    def aim(self, lesson: Lesson) -> Tensor:
        """What notes of the text's tokens shall be, [B,T,G]."""
        groups, repeat = lesson.keys.shape[1], lesson.queries.shape[1] // lesson.keys.shape[1]
        half = lesson.keys.shape[2] // 2
        at = torch.arange(2 * half, device=lesson.keys.device).expand(len(lesson.keys), -1)
        own = lesson.queries[:, :, half:], at[:, half:]
        drawn = lesson.form.weights(*own, lesson.keys, at[:, None]).flatten(1, 2)  # [B,H,T,2T]
        drawn = drawn[..., :half]
        drawn = drawn / lesson.hidden[:, half:].norm(dim=-1)[:, None, :, None].clamp(min=1e-6)
        values = lesson.values[:, :, :half].repeat_interleave(repeat, 1)
        norms = torch.einsum("bhtd,hde->bhte", values, lesson.output).norm(dim=-1)  # [B,H,T]
        found: Tensor = (drawn.amax(2) * norms).unflatten(1, (groups, repeat)).amax(2)
        return found.clamp(min=1e-6).log().transpose(1, 2)
