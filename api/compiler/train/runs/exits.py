"""The classifiers by which tokens of `calm` leave (`passes/depth/_classifier.py`): of a text that the model reads as it
is, each tells from the stream behind its layer whether the head has the last layer's token there already.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel.compiler.train.kind import Made
from accel.compiler.train.layered import Layered
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.run import Run
from accel.compiler.train.source import Source
from accel.ir.errors import InputError
from accel.ir.program import Program
from accel.passes.depth._classifier import ExitClassifier, judged, lost
from accel.passes.depth.calm import META, Calm
from accel.passes.trained import Parts

POOL = 48  # steps for which the model reads text: reading costs more than learning
HELD = 8  # every so many-th of them is kept apart
APART = 4  # every so many-th token of a row is learnt from: each costs a head for every layer


class Exits(Layered):
    """What the classifiers are taught."""

    def start(self, inner: int, seed: int) -> Parts:
        """They have learnt nothing."""
        return {layer: self.method.start(self.width) for layer in range(len(self.calls) - 1)}

    def taught(self, tokens: Tensor, picked: Tensor) -> tuple[Tensor, Tensor]:
        """Of the tokens at columns [N] of rows [B,T] the stream behind each layer but the last [L-1,B*N,E], and whether
        its likeliest token is the last layer's [L-1,B*N].
        """
        with torch.no_grad():
            stream = self.stream(tokens)
            x, streams, likeliest = stream.start, [], []
            for layer in range(len(self.calls)):
                x = stream.layer(layer, x)
                streams.append(x[:, picked].flatten(0, 1).float())
                likeliest.append(stream.logits(x, picked).argmax(-1).flatten())
        found = torch.stack(likeliest)
        return torch.stack(streams[:-1]), found[:-1] == found[-1]


@dataclass
class ExitsRun(Run):
    """Both kinds of tokens weigh alike, and so do layers. Of what the model gave every so many-th step is kept apart,
    and what is told of the run is of those.
    """

    pool: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @classmethod
    def takes(cls, method: type[Any]) -> bool:
        """See Kind."""
        return issubclass(method, Calm)

    @classmethod
    def over(cls, program: Program, method: Any) -> Exits:
        """See Run."""
        return Exits(program, ExitClassifier())

    @classmethod
    def make(cls, method: Any, source: Source, options: TrainOptions) -> Made:
        """See Kind. Raises InputError where the text is that on which builds measure thresholds: of what the
        classifiers have learnt by heart no bound holds elsewhere.
        """
        if source.text is None and source.own_rows is None:
            raise InputError(
                "calm: builds measure its threshold on accel's own text, so its classifiers must learn from another; "
                "give text=…"
            )
        return super().make(method, source, options)

    def write(self, out: Path, notes: Mapping[str, str], by: Mapping[str, Any]) -> None:
        """See Run."""
        super().write(out, {**notes, "by": META}, by)

    def learn(self, ids: Tensor, known: Tensor) -> dict[str, float]:
        """One step on rows [B,T+1], of which tokens with weight `known` [B,T] are text."""
        if len(self.pool) < POOL:
            self.pool.append(self._taught(ids, known))
        learnt = [one for i, one in enumerate(self.pool) if (i + 1) % HELD]
        held = self.pool[HELD - 1 :: HELD] or learnt
        streams, same = learnt[self.step % len(learnt)]
        pairs = enumerate(zip(streams.float(), same, strict=True))
        self.descend(torch.stack([lost(x, y, **self.parts[i]) for i, (x, y) in pairs]).mean())
        streams, same = held[self.step % len(held)]
        return {"rightly": rightly(streams.float(), same, self.parts)}

    def _taught(self, ids: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        picked = torch.arange(len(self.pool) % APART, known.shape[1], APART)
        streams, same = self.soft.taught(ids[:, :-1], picked)
        there = known[:, picked].flatten() > 0
        return streams[:, there].half(), same[:, there]


def rightly(streams: Tensor, same: Tensor, parts: Parts) -> float:
    """The share of tokens that the classifiers tell rightly, both kinds weighing alike: of streams [L,N,E], of which
    `same` [L,N] have the last layer's token.
    """
    with torch.no_grad():
        told = torch.stack([judged(x, **parts[i]).argmax(-1) == 1 for i, x in enumerate(streams)])
    shares = [
        (told == same)[same == kind].double().mean()
        for kind in (True, False)
        if (same == kind).any()
    ]
    return float(torch.stack(shares).mean())
