"""Training of heads that say after each level of a draft whether to go on (`OfRounds`): rounds of the two models on
`--samples` texts, whose drafts all go on to the end, and what stood of them. The model continues the first half of each
text, every second one sampling at temperature 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from accel.compiler.measure import watched
from accel.compiler.optimize import optimize
from accel.compiler.train.host import HostKind, Tokens, learn, parted, questions, save_part
from accel.compiler.train.kind import Made
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.runs.head import lacks_draft, untaught
from accel.compiler.train.source import Source
from accel.ir.axis import host_method
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.decode.trained_part import sample
from accel.runtime.length import Base, Pace
from accel.runtime.length._head import Array
from accel.runtime.length._of_rounds import OfRounds
from accel.runtime.loop.speculative import Speculative
from accel.runtime.sample.standard import Standard
from accel.runtime.speculation.round_cost import RoundCost

NEW = 64  # tokens that the model continues each text by
Outcomes = list[
    tuple[Array, bool]
]  # what a head reads [F] after a level, and whether going on was right


@dataclass
class Rounds:
    """What became of drafts, by text."""

    method: OfRounds
    outcomes: list[Outcomes] = field(default_factory=list)


@dataclass(frozen=True)
class Recorded(Base):
    """A length that goes on to the end, and keeps what the head reads."""

    rounds: Rounds

    def begin(self, cost: RoundCost) -> Pace:
        return _Pace(self.rounds)


class _Pace(Pace):
    def __init__(self, rounds: Rounds):
        self._method, self._into = rounds.method, rounds.outcomes[-1]
        self._begin()

    def limit(self) -> int:
        return self._method.most

    def more(self, level: Any, logits: Any) -> bool:
        self._read.append(self._reader.read(level, logits))
        return True

    def observe(self, drafted: int, accepted: int) -> None:
        self._into += [(x, self._method.label(n, accepted)) for n, x in enumerate(self._read, 1)]
        self._begin()

    def _begin(self) -> None:
        self._reader, self._read = self._method.reader(), list[Array]()


def recorded(model: Any, method: OfRounds, prompts: Iterable[Tokens]) -> Rounds:
    """Rounds of a model that was built with the method's `drafts`, on these prompts [n]."""
    rounds = Rounds(method)
    tables = {"tree": {"use": "chain"}, "verify": {"use": "rrs-wor"}, **method.drafts}
    methods = {axis: host_method(tables, axis, "") for axis in tables}
    methods["length"] = Recorded(rounds)
    for number, prompt in enumerate(prompts):
        rounds.outcomes.append([])
        sampler = Standard(temperature=1.0) if number % 2 else Standard()
        rng, most = np.random.default_rng(number), model.facts.max_context
        row = Row(prompt, sampler, rng, limit=NEW, max_context=most)
        with model.session() as session:
            for _ in Speculative().tokens(session, [row], DecodeContext(methods, None, model)):
                pass
    return rounds


def examples(outcomes: Iterable[Outcomes]) -> tuple[Tensor, Tensor]:
    """What a head reads [N,F], and whether going on was right [N], of texts."""
    every = [one for of_text in outcomes for one in of_text]
    x = np.stack([x for x, _ in every])
    return torch.from_numpy(x), torch.tensor([float(y) for _, y in every])


class Logged(HostKind):
    """Rounds are logged first; then the head learns from all of them."""

    of = OfRounds

    @classmethod
    def lacks(cls, options: TrainOptions) -> str | None:
        """See Kind."""
        return lacks_draft(options)

    @classmethod
    def make(cls, method: Any, source: Source, options: TrainOptions) -> Made:
        """See Kind."""
        one, read = watched(method)
        tables = {**one.drafts, "draft": {**one.drafts["draft"], "path": str(options.draft)}}
        threads = options.threads or None
        with optimize(
            source.path, tables, verify=False, threads=threads, progress=source.progress
        ) as model:
            assert model.draft_model is not None
            options = replace(options, length=min(options.length, model.facts.max_context))
            rounds = recorded(model, one, (prompt for prompt, _ in questions(source, options)))
            names = {"model": sample(model.session), "draft": sample(model.draft_model.session)}
        learnt, held = (examples(texts) for texts in parted(rounds.outcomes))
        part = untaught(one, options.inner, torch.Generator().manual_seed(options.seed))
        taught(one, part, *learnt, options.rate)
        told = judged(one, part, *held)
        return save_part(
            one, read, part, names, told | {"examples": float(len(learnt[1]))}, options
        )


def taught(
    method: OfRounds, part: dict[str, Tensor], x: Tensor, right: Tensor, rate: float
) -> None:
    """Let a head learn what it reads [N,F] tells of what was right [N]."""
    learn(
        part.values(),
        lambda: F.binary_cross_entropy_with_logits(method.odds(part, x), right),
        rate,
    )


def judged(method: OfRounds, part: dict[str, Tensor], x: Tensor, right: Tensor) -> dict[str, float]:
    """On texts that it did not learn from: its loss, that of the best constant, and how often it is right."""
    with torch.no_grad():
        odds = method.odds(part, x)
        same = right.mean().logit().expand_as(right)
        found = {
            n: F.binary_cross_entropy_with_logits(o, right)
            for n, o in (("loss", odds), ("constant", same))
        }
        found["right"] = ((odds > 0) == (right > 0.5)).float().mean()
    return {n: v.item() for n, v in found.items()}
