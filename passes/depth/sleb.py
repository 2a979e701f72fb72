"""SLEB (arXiv:2402.09025): delete layers one by one, each time the one without which the loss is least."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from accel.ir.axis import option
from accel.ir.program import Program
from accel.passes.depth._delete import Deletes
from accel.passes.stream import Stream
from accel.passes.weights._calibrated import calibration_of

AT_ONCE = 512  # tokens that run through a layer together; a trial may end behind each so many


@dataclass(frozen=True)
class Sleb(Deletes):
    """Deletes the fraction `share` of the layers, with weights and caches; the first and the last layer stay.

    Before each deletion every layer that is left is switched off in turn, and the loss of `tokens` tokens of the
    calibration text is measured. A trial ends where its loss is above the least so far, and begins with the stream
    before its layer, which the trials share.
    """

    tokens: int = option(2048, least=1)
    by = "loss without it and those before it"

    def goes(
        self, program: Program, calls: Sequence[fx.Node], count: int, text: Tensor
    ) -> dict[int, float]:
        """See Deletes."""
        found: dict[int, float] = {}
        with torch.no_grad(), program.params.read_once():
            rows = max(1, AT_ONCE // text.shape[1])
            streams = [Stream(program, calls, part) for part in text.split(rows)]
            for number in range(count):
                alive = [i for i in range(len(calls)) if i not in found]

                def tell(trial: float, number: int = number) -> None:
                    what = f"deleting layers: {number + 1} of {count}"
                    calibration_of(program).progress(what, (number + trial) / count)

                trials = measured(streams, alive, tell)
                best = min(trials, key=lambda i: float(trials[i].sum()))
                if number == 0 and count < len(trials):
                    self._check(trials, best, text)
                found[best] = float(trials[best].sum()) / (text.numel() - len(text))
        return found

    def _check(self, trials: dict[int, Tensor], best: int, text: Tensor) -> None:
        """Raise PassError where no layer is worse than the best by more than their difference varies."""
        apart = []
        for index, losses in trials.items():
            off = losses - trials[best][: len(losses)]
            if len(losses) < len(text) or len(losses) < 2:
                return  # it ended early, or nothing varies
            if index != best:
                apart.append((float(off.mean()), float(off.std()) / len(off) ** 0.5))
        more, noise = max(apart, key=lambda x: x[0] - x[1])
        if more < noise:
            raise self.too_short(
                text,
                f"the loss of a row without one of them differs by {more:.2g} from that without another, and by "
                f"{noise:.2g} from text to text",
            )


def measured(
    streams: Sequence[Stream], alive: Sequence[int], tell: Callable[[float], None] = lambda _: None
) -> dict[int, Tensor]:
    """The losses of the text's rows [n] without each layer of `alive` but the first and the last; of fewer rows where
    their sum is above the least so far.
    """
    found: dict[int, Tensor] = {}
    least = float("inf")
    states = [stream.start for stream in streams]
    for place, index in enumerate(alive[1:-1], 1):
        tell((place - 1) / (len(alive) - 2))
        states = [s.layer(alive[place - 1], x) for s, x in zip(streams, states, strict=True)]
        losses = torch.zeros(0, dtype=torch.float64)
        for stream, state in zip(streams, states, strict=True):
            x = state
            for later in alive[place + 1 :]:
                x = stream.layer(later, x)
            losses = torch.cat([losses, stream.losses(x)])
            if float(losses.sum()) > least:
                break
        found[index] = losses
        least = min(least, float(losses.sum()))
    return found
