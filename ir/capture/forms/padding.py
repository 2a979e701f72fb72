"""Masks of padding for recurrences: none is needed, since a program is captured without padding."""

from __future__ import annotations

from typing import Any


def _no_padding(self: Any, *_: Any, **__: Any) -> None:
    """transformers' own asks for values of `cache_position`, which cannot be exported."""


FORMS = {"._update_mamba_mask": _no_padding, "._update_linear_attn_mask": _no_padding}
