"""What models that fill masks answer."""

from __future__ import annotations

from typing import Any

import numpy as np

from accel.compiler.train.host import Tokens
from accel.runtime.canvas.whole import Whole
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.loop import Base
from accel.runtime.sample.standard import Standard


def decoded(model: Any, loop: Base, prompt: Tokens, new: int) -> Tokens:
    """The tokens [N] behind a prompt, without an end."""
    row = Row(
        prompt, Standard(), np.random.default_rng(0), limit=new, max_context=model.facts.max_context
    )
    with model.session() as session:
        for _ in loop.tokens(session, [row], DecodeContext({"canvas": Whole()}, model=model)):
            pass
    return np.array(row.tokens, np.int64)
