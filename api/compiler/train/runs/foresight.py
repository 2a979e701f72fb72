"""Training of the predictor of `specbranch` (H-RAD, arXiv:2506.01979): rounds of the two models on `samples` texts, in
which every draft is verified whole, and whether none, some or all of it stood. The model continues the first half of
each text, every second one sampling at temperature 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from accel.compiler.measure import watched
from accel.compiler.optimize import optimize
from accel.compiler.train.host import HostKind, Tokens, begun, learn, parted, questions, save_part
from accel.compiler.train.kind import Made
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.runs.head import lacks_draft
from accel.compiler.train.source import Source
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.decode.trained_part import sample
from accel.runtime.loop._foresight import Fate, Floats, Foresight, Heard, classes
from accel.runtime.loop.specbranch import Specbranch
from accel.runtime.sample.standard import Standard
from accel.runtime.session.session import Session

NEW = 64  # tokens that the model continues each text by
DROPPED = 0.2  # of what a layer gives, while it learns
SOME, STEPS = 512, 400  # examples of a step, and steps
Outcomes = list[tuple[Floats, Fate]]
Examples = tuple[Tensor, Tensor]  # what the predictor reads [N,F], and the classes [N]


@dataclass(frozen=True)
class Logging(Specbranch):
    """The loop, which verifies whole drafts and keeps what became of them; `outcomes`: of each text."""

    outcomes: list[Outcomes] = field(default_factory=list)

    @property
    def goes_on(self) -> bool:
        """See Specbranch."""
        return True

    def foresight(self, session: Session, rows: Sequence[Row], context: DecodeContext) -> Foresight:
        """See Parallel."""
        self.outcomes.append([])
        names = self.read_of(session, context)
        return _Log(session, rows, names, self.ahead, self.outcomes[-1])


class _Log(Heard):
    def __init__(
        self,
        session: Session,
        rows: Sequence[Row],
        names: Sequence[str],
        most: int,
        into: Outcomes,
    ):
        super().__init__(session, rows, names, most)
        self._into, self._last = into, dict[int, Floats | None]()

    def fate(self, row: int, token: int) -> Fate:
        self._last[row] = self.read(row, token)
        return Fate.ALL

    def observe(self, row: int, drafted: int, stood: int) -> None:
        if (x := self._last.pop(row, None)) is not None:
            self._into.append((x, Fate.of(drafted, stood)))


def logged(model: Any, method: Specbranch, prompts: Iterable[Tokens]) -> list[Outcomes]:
    """Rounds of a model that was built with the predictor's outputs, on these prompts [n]."""
    loop = Logging(method.branches, method.ahead, predictor=True)
    for number, prompt in enumerate(prompts):
        sampler = Standard(temperature=1.0) if number % 2 else Standard()
        rng, most = np.random.default_rng(number), model.facts.max_context
        row = Row(prompt, sampler, rng, limit=NEW, max_context=most)
        with model.session() as session:
            for _ in loop.tokens(session, [row], DecodeContext({}, None, model)):
                pass
    return loop.outcomes


def examples(outcomes: Sequence[Outcomes]) -> Examples:
    """Those of texts."""
    every = [one for of_text in outcomes for one in of_text]
    x = torch.from_numpy(np.stack([x for x, _ in every]))
    return x, torch.tensor([int(fate) for _, fate in every])


def dropped(part: dict[str, Tensor], x: Tensor) -> Tensor:
    """`classes` [N,3], with dropout behind each hidden layer."""
    for name in ("first", "second"):
        x = F.dropout(torch.relu(x @ part[name] + part[f"{name}.bias"]), DROPPED)
    return x @ part["last"] + part["last.bias"]


def taught(
    method: type[Specbranch], learnt: Examples, apart: Examples, options: TrainOptions
) -> dict[str, Tensor]:
    """A predictor that learnt from examples, as it is best on those that are `apart`. It learns from numbers that are
    as large as each other, which its first layer then scales itself.
    """
    (x, fates), generator = learnt, torch.Generator().manual_seed(options.seed)
    mean, size = x.mean(0), x.std(0).clamp(min=1e-6)
    x, checked = (x - mean) / size, (apart[0] - mean) / size
    part = begun(method.sizes(x.shape[1]), generator)

    def loss() -> Tensor:
        some = torch.randint(len(x), (min(SOME, len(x)),), generator=generator)
        return F.cross_entropy(dropped(part, x[some]), fates[some])

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        learn(
            part.values(), loss, options.rate, STEPS,
            lambda: F.cross_entropy(classes(part, checked), apart[1]),
        )  # fmt: skip
    part["first"] /= size[:, None]
    part["first.bias"] -= mean @ part["first"]
    return {name: tensor.half() for name, tensor in part.items()}


class ForesightRun(HostKind):
    """Rounds are logged first; then the predictor learns from all of them."""

    of = Specbranch

    @classmethod
    def lacks(cls, options: TrainOptions) -> str | None:
        """See Kind."""
        return lacks_draft(options)

    @classmethod
    def make(cls, method: Any, source: Source, options: TrainOptions) -> Made:
        """See Kind."""
        one, read = watched(replace(method, predictor=True))
        tables = {
            "loop": {"use": "specbranch", "predictor": True},
            "draft": {"use": "model", "path": str(options.draft)},
        }
        threads = options.threads or None
        with optimize(
            source.path, tables, verify=False, threads=threads, progress=source.progress
        ) as model:
            assert model.draft_model is not None
            options = replace(options, length=min(options.length, model.facts.max_context))
            found = logged(model, one, (prompt for prompt, _ in questions(source, options)))
            names = {"model": sample(model.session), "draft": sample(model.draft_model.session)}
        learnt, held = (examples(texts) for texts in parted(found))
        part = taught(Specbranch, learnt, held, options)
        told = judged(part, *held) | {"examples": float(len(learnt[1]))}
        return save_part(one, read, part, names, told, options)


def judged(part: dict[str, Tensor], x: Tensor, fates: Tensor) -> dict[str, float]:
    """On texts that it did not learn from: its loss, that of the best constant, how often it is right, and how often
    the commonest class is.
    """
    counts = torch.bincount(fates, minlength=3)
    part = {name: tensor.float() for name, tensor in part.items()}
    with torch.no_grad():
        found = classes(part, x)
        constant = F.cross_entropy((counts / len(fates)).log().expand(len(fates), 3), fates)
        return {
            "loss": F.cross_entropy(found, fates).item(),
            "constant": constant.item(),
            "right": (found.argmax(-1) == fates).float().mean().item(),
            "commonest": (counts.max() / len(fates)).item(),
        }
