"""Early commit (Prophet, arXiv:2508.19982): when the model is confident in the answer, all remaining masks
are filled at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from accel.ir.axis import option
from accel.runtime.loop._canvas import Canvas
from accel.runtime.loop.dllm_lowconf import DllmLowconf


@dataclass(frozen=True)
class Prophet(DllmLowconf):
    """`dllm-lowconf`, until the best logits of a row's masks lead the second ones by `early` on average in the first
    third of its steps, by `middle` in the second, by `late` in the last. The row then takes what that call says
    of every mask: with `cache` = dual, which sees the block alone, of those in the block.
    """

    early: float = option(7.5)
    middle: float = option(5.0)
    late: float = option(2.5)

    @property
    def static(self) -> bool:
        return False

    def fill(self, canvas: Canvas) -> Iterator[tuple[int, int]]:
        step, total = 0, canvas.counts
        while canvas.waiting.any():
            for i, guess in canvas.look(rest=True).items():
                start, masks = canvas.rows[i].prompt.size, int(total[i])
                done = canvas.first[i] - start + masks * step / self.calls(masks)
                if guess.lead.mean() >= self.least(done / (canvas.ends[i] - start)):
                    canvas.commit(i, guess, slice(None))
                else:
                    block = guess.before(canvas.last[i])
                    canvas.commit(i, block, self.stays(block, step, masks))
            step += 1
            yield from canvas.take()

    def least(self, done: float) -> float:
        """The lead that commits, where this share of the steps is done."""
        return self.early if done < 0.33 else self.middle if done < 0.67 else self.late
