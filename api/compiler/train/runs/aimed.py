"""What learns to note of each token what it aims at (`aim`), by squared error."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accel.compiler.train.run import Run
from accel.compiler.train.runs.soft import Soft
from accel.ir.program import Program
from accel.passes.trained import Trained

AGAIN = 4  # times that a method learns from the same rows: the model takes most of the time


class AimedRun(Run):
    """See `Trained`."""

    @classmethod
    def takes(cls, method: type[Any]) -> bool:
        """See Kind."""
        return issubclass(method, Trained) and hasattr(method, "aim")

    @classmethod
    def over(cls, program: Program, method: Any) -> Soft:
        """See Run."""
        return Soft(program, method)

    def learn(self, ids: Tensor, known: Tensor) -> dict[str, float]:
        """One step on rows [B,T+1]; of longer ones than half the model's context, on their first tokens."""
        method, most = self.soft.method, self.soft.program.facts.max_context // 2
        with torch.no_grad():
            lessons = self.soft.lessons(ids[:, :-1][:, :most])
            aims = {layer: method.aim(lesson) for layer, lesson in lessons.items()}
        start = self.step
        for _ in range(AGAIN):
            off = torch.zeros(())
            for layer, aim in aims.items():
                hidden = lessons[layer].hidden[:, : aim.shape[1]]
                told = method.note(hidden, **self.parts[layer])
                off = off + (told - aim).square().mean() / len(aims)
            self.descend(off)
            self.step = start
        self.step = start + 1
        spread = sum(aim.var() for aim in aims.values()) / len(aims)
        return {"loss": off.item(), "explained": 1 - off.item() / max(float(spread), 1e-9)}
