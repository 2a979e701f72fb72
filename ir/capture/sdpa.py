"""scaled_dot_product_attention as modules call it that branch on the number of tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional


@contextlib.contextmanager
def causal_at_any_length() -> Iterator[None]:
    """Inside, `is_causal=(T > 1)` may be asked of a symbolic T: at T = 1 causal hides nothing.

    The attention of a capture is over the tokens of the call, so that queries and keys are as many.
    """
    theirs = functional.scaled_dot_product_attention

    def ours(*args: Any, **kwargs: Any) -> Tensor:
        if isinstance(kwargs.get("is_causal"), torch.SymBool):
            kwargs["is_causal"] = True
        return theirs(*args, **kwargs)

    with patch.object(functional, "scaled_dot_product_attention", ours):
        yield
