"""A call of a session as a value, and what a graph call gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.runtime.inputs.ints import Ints

Arrays = dict[str, npt.NDArray[Any]]
Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Call:
    """Tokens [B,T] that rows of `before` [B] tokens take, `counts` [B] of them real (None: all).

    prompt: a prompt ends with these tokens. controls: what the caller says beside them, by the names that observers
    declare (`CallWatcher.controls`).
    """

    tokens: Ints
    counts: Ints | None
    before: Ints
    prompt: bool = False
    controls: Mapping[str, Any] = field(default_factory=dict)

    @property
    def after(self) -> Ints:
        """Tokens that rows then have [B]."""
        found: Ints = self.before + (self.tokens.shape[1] if self.counts is None else self.counts)
        return found


@dataclass(frozen=True, eq=False)
class Embeds:
    """Embeddings in place of tokens: rows [B,T,E] float32, and for which tokens of a call they stand, mask [B,T]."""

    rows: npt.NDArray[np.float32]
    mask: npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Outputs:
    """logits [B,N,V]. extra: the outputs that were asked for, by name, [B,T,…] for the tokens of the call."""

    logits: Logits
    extra: Arrays
