"""What the calls of a loop that fills masks computed, beside the slots that each call filled."""

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from accel.runtime.canvas.whole import Whole
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.loop._canvas import Canvas
from accel.runtime.sample.standard import Standard

from ..diffusion_case import LONGEST, NEW, eager, with_loop


@dataclass
class Followed:
    """By call: `logits` [B,N,V]; of the first row `fed`, slot -> its token; `ids` [W] of its canvas; `masks` of the
    block that the call says something of; `filled`, the slots that were filled after it.
    """

    logits: list[Any] = field(default_factory=list)
    fed: list[dict[int, int]] = field(default_factory=list)
    ids: list[Any] = field(default_factory=list)
    masks: list[list[int]] = field(default_factory=list)
    filled: list[list[int]] = field(default_factory=list)


def followed(loop: Any, canvas: Any, shift: bool, given: Any) -> Followed:
    """A loop over prompts, its canvas method (None: all slots)."""
    _, compiled = eager(shift)
    table: Any = "whole"
    if canvas is not None and canvas.steps():
        table = {"use": canvas.use, **asdict(canvas)}
    seen = Followed()
    rows = [
        Row(np.array(p), Standard(), np.random.default_rng(0), limit=NEW, max_context=LONGEST)
        for p in given
    ]
    own = Canvas.look, Canvas.commit

    with with_loop(compiled, "dllm-lowconf", table) as made, made.session(len(rows)) as session:
        write = session.write

        def written(tokens, at, lengths, columns, picks=None):
            logits = write(tokens, at, lengths, columns, picks)
            seen.logits.append(logits.copy())
            places = at[0, : lengths[0]].tolist()
            seen.fed.append(dict(zip(places, tokens[0, : lengths[0]].tolist(), strict=True)))
            seen.filled.append([])
            return logits

        def look(self, rest=False):
            seen.ids.append(self.ids[0, 0].copy())
            found = own[0](self, rest)
            seen.masks.append(found[0].slots.tolist() if 0 in found else [])
            return found

        def commit(self, i, guess, places):
            if i == 0:
                seen.filled[-1] += guess.slots[places].tolist()
            own[1](self, i, guess, places)

        session.write = written
        Canvas.look, Canvas.commit = look, commit
        try:
            context = DecodeContext(methods={"canvas": canvas or Whole()})
            list(loop.tokens(session, rows, context))
        finally:
            Canvas.look, Canvas.commit = own
    return seen
