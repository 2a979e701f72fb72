"""Sinusoids of positions that the module counts from the tokens that are not padding; here by place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _by_place(
    self: Any, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, *_: Any
) -> Tensor:
    """[B,T,E], as the module gives them for tokens [B,T] without the padding id; its own table does
    not grow here, so its end is the longest sequence.
    """
    given = inputs_embeds if input_ids is None else input_ids
    assert given is not None
    places = torch.arange(given.shape[1], device=given.device) + self.padding_idx + 1
    table: Tensor = self.weights[places]
    return table.expand(given.shape[0], -1, -1)


FORMS = {
    "M2M100SinusoidalPositionalEmbedding": _by_place,
    "NllbMoeSinusoidalPositionalEmbedding": _by_place,
}
