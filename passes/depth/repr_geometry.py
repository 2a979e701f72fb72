"""Layers by the geometry of their hidden states (arXiv:2509.23024): delete those that change RankMe least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from accel.ir.axis import option
from accel.ir.program import Program
from accel.passes.depth._delete import Ranks, tell
from accel.passes.stream import Stream

AT_ONCE = 16  # samples that run through the layers together
SMALLEST = 1e-7  # what a share of the singular values has at least


@dataclass(frozen=True)
class ReprGeometry(Ranks):
    """Deletes the fraction `share` of the layers, with weights and caches; the first and the last layer stay.

    `tokens` tokens of the calibration text, in samples of `length` tokens, give a matrix of the last token's hidden
    state in each sample, before and behind each layer. Its RankMe is a smooth rank: exp of the entropy of the singular
    values. A note tells RankMe and alpha-ReQ, the exponent by which the eigenvalues of the covariance fall, of all of
    them. The score of a layer is how much it changes RankMe.
    """

    length: int = option(64, least=2)
    by = "change of RankMe"

    def text(self, program: Program) -> Tensor:
        """See Deletes."""
        return self.samples(program, self.length)

    def scores(
        self, program: Program, calls: Sequence[fx.Node], text: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See Ranks."""
        states = last_states(program, calls, text)
        ranks = [rank_me(z) for z in states]
        program.facts.notes.append(
            f"repr-geometry: RankMe before each layer and behind the last {_listed(ranks)}; "
            f"alpha-ReQ {_listed([alpha_req(z) for z in states])}"
        )
        halves = [
            _changes([rank_me(z[n::2]) for z in states]) for n in (0, 1 if len(text) > 1 else 0)
        ]
        return _changes(ranks), (halves[0] - halves[1]).abs() / 2


def last_states(program: Program, calls: Sequence[fx.Node], text: Tensor) -> list[Tensor]:
    """The stream at the last token of rows [n,T], before each layer and behind the last: L+1 matrices [n,E]."""
    found: list[list[Tensor]] = []
    with torch.no_grad(), program.params.read_once():
        parts = text.split(AT_ONCE)
        for n, rows in enumerate(parts):
            tell(program, n, len(parts))
            stream = Stream(program, calls, rows)
            states = [stream.start]
            for i in range(len(calls)):
                states.append(stream.layer(i, states[-1]))
            found.append([x[:, -1].double() for x in states])
    return [torch.cat(states) for states in zip(*found, strict=True)]


def rank_me(states: Tensor) -> float:
    """exp of the entropy of the singular values of a matrix [n,E], each as a share of their sum."""
    values = torch.linalg.svdvals(states)
    shares = values / values.sum().clamp(min=SMALLEST) + SMALLEST
    return float((-shares * shares.log()).sum().exp())


def alpha_req(states: Tensor) -> float:
    """The exponent a of eigenvalues ~ rank^-a of the covariance of a matrix [n,E], by least squares of logarithms."""
    values = torch.linalg.svdvals(states - states.mean(0)).square()
    values = values[values > values.max() * torch.finfo(values.dtype).eps]
    if len(values) < 2:
        return 0.0
    ranks = torch.arange(1, len(values) + 1, dtype=values.dtype).log()
    ranks, logs = ranks - ranks.mean(), values.log() - values.log().mean()
    return float(-(ranks * logs).sum() / ranks.square().sum())


def _changes(ranks: Sequence[float]) -> Tensor:
    """How much each layer changes a number that is known before each and behind the last."""
    return torch.tensor(ranks, dtype=torch.float64).diff().abs()


def _listed(numbers: Sequence[float]) -> str:
    return ", ".join(f"{x:.3g}" for x in numbers)
