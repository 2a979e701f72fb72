"""Training of heads that say after each level of a draft whether to go on (`OfRounds`): rounds of the two models on
`--samples` texts, whose drafts all go on to the end, and what stood of them. The model continues the first half of each
text, every second one sampling at temperature 1.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from rich.progress import track
from run import Kind
from texts import rows_of
from torch import Tensor
from torch.nn import functional as F

import accel
from accel.ir.axis import host_method
from accel.passes.trained import write
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.length import Base, Pace
from accel.runtime.length._head import Array, sample
from accel.runtime.length._of_rounds import OfRounds
from accel.runtime.loop.speculative import Speculative
from accel.runtime.sample.standard import Standard
from accel.runtime.speculation.round_cost import RoundCost

from .head import lacks_draft, untaught

NEW = 64  # tokens that the model continues each text by
STEPS = 1500  # of learning, each on all examples
HELD = 8  # every so manieth text is not learnt from


@dataclass
class Rounds:
    """What a head reads [F] after each level of drafts, and whether going on was right; by text."""

    method: OfRounds
    found: list[list[tuple[Array, bool]]] = field(default_factory=list)

    def examples(self, texts: Iterable[int]) -> tuple[Tensor, Tensor]:
        """[N,F] and [N], of these texts."""
        every = [one for text in texts for one in self.found[text]]
        x = np.stack([x for x, _ in every])
        return torch.from_numpy(x), torch.tensor([float(y) for _, y in every])


@dataclass(frozen=True)
class Recorded(Base):
    """A length that goes on to the end, and keeps what the head reads."""

    rounds: Rounds

    def begin(self, cost: RoundCost) -> Pace:
        return _Pace(self.rounds)


class _Pace(Pace):
    def __init__(self, rounds: Rounds):
        self._method, self._into = rounds.method, rounds.found[-1]
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


def recorded(model: Any, method: OfRounds, prompts: Iterable[Array]) -> Rounds:
    """Rounds of a model that was built with the method's `drafts`, on these prompts [n]."""
    rounds = Rounds(method)
    tables = {"tree": {"use": "chain"}, "verify": {"use": "rrs-wor"}, **method.drafts}
    methods = {axis: host_method(tables, axis, "") for axis in tables}
    methods["length"] = Recorded(rounds)
    for number, prompt in enumerate(prompts):
        rounds.found.append([])
        sampler = Standard(temperature=1.0) if number % 2 else Standard()
        rng, most = np.random.default_rng(number), model.facts.max_context
        row = Row(prompt, sampler, rng, limit=NEW, max_context=most)
        with model.session() as session:
            for _ in Speculative().tokens(session, [row], DecodeContext(methods, None, model)):
                pass
    return rounds


class Logged(Kind):
    """Rounds are logged first; then the head learns from all of them."""

    @classmethod
    def takes(cls, method: type[Any]) -> bool:
        """See Kind."""
        return issubclass(method, OfRounds)

    @classmethod
    def lacks(cls, options: argparse.Namespace) -> str | None:
        """See Kind."""
        return lacks_draft(options)

    @classmethod
    def make(cls, method: type[Any], ids: Tensor | None, options: argparse.Namespace) -> str:
        """See Kind."""
        one, draft = method(), {"path": str(options.draft)} if options.draft else {}
        tables = {**method.drafts, "draft": {**method.drafts["draft"], **draft}}
        with accel.optimize(
            str(options.model), tables, verify=False, threads=options.threads
        ) as model:
            texts = rows_of(ids, options)
            prompts = (
                row[: options.length // 2].numpy()
                for _ in track(range(options.samples), "rounds")
                for row in next(texts)[0]
            )
            rounds = recorded(model, one, prompts)
            names = {"model": sample(model.session), "draft": sample(model.draft_model.session)}
        held = set(range(0, len(rounds.found), HELD))
        learnt = rounds.examples(sorted(set(range(len(rounds.found))) - held))
        part = untaught(method, options.inner, torch.Generator().manual_seed(options.seed))
        taught(method, part, *learnt, options.rate)
        told = judged(method, part, *rounds.examples(sorted(held)))
        told |= {"examples": float(len(learnt[1]))}
        notes = {
            n: str(getattr(options, n))
            for n in ("samples", "length", "rows", "inner", "rate", "seed")
        }
        write(
            one,
            options.out,
            {0: part},
            json.dumps(names),
            notes | {n: f"{v:.4f}" for n, v in told.items()},
        )
        return ", ".join(f"{n} {v:.4g}" for n, v in told.items())


def taught(
    method: type[OfRounds], part: dict[str, Tensor], x: Tensor, right: Tensor, rate: float
) -> None:
    """Let a head learn what it reads [N,F] tells of what was right [N]."""
    tensors = [tensor.requires_grad_(True) for tensor in part.values()]
    optimiser = torch.optim.AdamW(tensors, lr=rate, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS)
    for _ in range(STEPS):
        optimiser.zero_grad()
        loss = F.binary_cross_entropy_with_logits(method.odds(part, x), right)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()


def judged(
    method: type[OfRounds], part: dict[str, Tensor], x: Tensor, right: Tensor
) -> dict[str, float]:
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
