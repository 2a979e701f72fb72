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
    """Rows are to grow from `before` to `after` tokens [B].

    prompt: a prompt ends with these tokens. controls: what the caller says beside them, by the names that observers
    declare (`SessionObserver.controls`).
    """

    before: Ints
    after: Ints
    prompt: bool = False
    controls: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Outputs:
    """logits [B,N,V]. extra: the outputs that were asked for, by name, [B,T,…] for the tokens of the call."""

    logits: Logits
    extra: Arrays
