"""Training of the embedding of `pause` (arXiv:2310.02226), beside a model that stays as it is: pauses are put between
the halves of a row, and the loss is that of its second half.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from accel.compiler.over_state import shared
from accel.compiler.pipeline import pipeline
from accel.compiler.train.run import Run
from accel.ir.entries.step import LOGITS
from accel.ir.program import Program, evaluate
from accel.ir.region import sizes
from accel.passes import run
from accel.passes.gradients import References
from accel.passes.state.embedded import STREAM, embedded, embedding_of
from accel.passes.state.extra_ids import ROWS, check
from accel.passes.trained import ALL, Parts, first_product
from accel.runtime.prompt.pause import Pause


class Paused:
    """A program as the method finds it, and its step over embeddings."""

    def __init__(self, program: Program, method: Pause):
        """`program`: over state."""
        self.program, self.method = program.copy(), method
        check(self.program, method.full_name)
        steps = pipeline()
        run(self.program, steps[shared(steps) :], done=steps[: shared(steps)])
        self.fixed = {name: self.program.params[name] for name in self.program.params}
        self.read = embedding_of(self.program.step, method.full_name)
        self.embedded = embedded(self.program, method.full_name)

    @property
    def names(self) -> str:
        """By what the model is known again."""
        return first_product(self.program, self.program.step)

    def start(self, inner: int, seed: int) -> Parts:
        """Numbers by chance, as large as those of an embedding."""
        generator, size = torch.Generator().manual_seed(seed), self.program.facts.vocab_size
        tokens = torch.randint(0, size, (1, 256), generator=generator)
        scale = self.embeddings(tokens).square().mean().sqrt()
        width = int(sizes(self.read)[2])
        return {ALL: {ROWS: scale * torch.randn(1, width, generator=generator)}}

    def embeddings(self, tokens: Tensor) -> Tensor:
        """What the model reads of tokens [B,T]: [B,T,E]."""
        found: Tensor = evaluate([self.read], self.fixed, {"tokens": tokens})[0]
        return found

    def losses(self, pause: Tensor, ids: Tensor, pauses: int) -> Tensor:
        """Of each token of the second halves of rows [B,T], behind so many pauses, of embedding [1,E], after the
        first: [B,T-T//2].
        """
        half = ids.shape[1] // 2
        read = self.embeddings(ids[:, :-1])
        between = pause.expand(len(ids), pauses, -1)
        stream = torch.cat((read[:, :half], between, read[:, half:]), 1)
        batch, length = stream.shape[:2]
        places = torch.arange(length).repeat(batch, 1)
        state = {s.name: s.allocate(B=batch, C=length) for s in self.program.state}
        inputs = {
            STREAM: stream,
            "positions": places,
            "slots": torch.zeros(batch, dtype=torch.int64),
            "rows": places[:, half + pauses - 1 :],
            **state,
        }
        given = {name: inputs[name] for name in self.embedded.inputs if name in inputs}
        given |= {n: v for n, v in self.embedded.defaults.items() if n not in given}
        found = References().graph(self.embedded.graph, self.fixed, given)
        logits = dict(zip(self.embedded.outputs, found, strict=True))[LOGITS]
        target = ids[:, half:]
        lost = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
        return lost.view_as(target)


class PauseRun(Run):
    """Beside a `Paused`."""

    @classmethod
    def takes(cls, method: type[Any]) -> bool:
        """See Kind."""
        return issubclass(method, Pause)

    @classmethod
    def over(cls, program: Program, method: Any) -> Paused:
        """See Run."""
        return Paused(program, method)

    def write(self, out: Path, about: Mapping[str, str], by: Mapping[str, Any]) -> None:
        """See Run. The embedding is for any number of pauses."""
        super().write(out, about, {})

    def learn(self, ids: Tensor, known: Tensor) -> dict[str, float]:
        """One step on rows [B,T+1]."""
        lost = self.soft.losses(self.parts[ALL][ROWS], ids, self.soft.method.pauses)
        weight = known[:, ids.shape[1] // 2 - 1 :]
        loss = (lost * weight).sum() / weight.sum().clamp(min=1)
        self.descend(loss)
        return {"loss": loss.item()}
