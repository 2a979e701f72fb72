"""Training of heads that foretell whether a token stands (`OfTokens`): a draft model's odds, and whether the model
takes what it drew (SpecDec++, arXiv:2405.19715). Half the tokens are drawn and count as they would stand; half are the
draft's likeliest, as greedy decoding drafts them, and count where the model has the same.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from accel.compiler.load.hub import model_folder
from accel.compiler.train.host import begun
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.run import Run
from accel.compiler.train.source import Source
from accel.compiler.train.whole import Whole
from accel.ir.errors import InputError
from accel.passes.trained import Parts
from accel.runtime.decode.trained_part import sample
from accel.runtime.length._head import Head, OfTokens

FELL = 6.0  # what a token that fell weighs, where one that stood weighs 1


@dataclass
class Pair:
    """A model and its draft model, which stay as they are."""

    model: Whole
    draft: Whole
    method: OfTokens

    def start(self, inner: int, seed: int) -> Parts:
        generator = torch.Generator().manual_seed(seed)
        return {0: untaught(self.method, inner, generator)}

    def examples(
        self, tokens: Tensor, known: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """What the head reads [N,F] and the chance that it stands [N], of a token drafted after each of tokens [B,T]
        that is `known` [B,T].
        """
        with torch.no_grad():
            p, q = (m.logits(tokens)[known > 0] for m in (self.model, self.draft))
        drawn = torch.multinomial(q.softmax(-1), 1, generator=generator)[:, 0]
        greedy = torch.rand(len(q), generator=generator) < 0.5
        y = torch.where(greedy, q.argmax(-1), drawn)
        at = torch.arange(len(y))
        sampled = (p.log_softmax(-1)[at, y] - q.log_softmax(-1)[at, y]).exp().clamp(max=1)
        stands = torch.where(greedy, (p.argmax(-1) == y).float(), sampled)
        return torch.from_numpy(self.method.features(q.numpy(), y.numpy())), stands

    @property
    def names(self) -> str:
        """By what the two are known again, as JSON."""
        return json.dumps(
            {
                "model": sample(lambda: self.model),
                "draft": sample(lambda: self.draft),
            }
        )


def untaught(
    method: Head | type[Head], inner: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """A head's tensors before it has learnt anything."""
    return begun(method.sizes(inner), generator)


def loss(odds: Tensor, stands: Tensor) -> Tensor:
    """Cross-entropy [] of log-odds [N] with soft labels [N], in which tokens that fall weigh more."""
    fell, stood = FELL * (1 - stands), stands
    lost = fell * F.softplus(odds) + stood * F.softplus(-odds)
    return lost.sum() / (fell + stood).sum()


def open_pair(method: OfTokens, source: Source, options: TrainOptions) -> tuple[Pair, TrainOptions]:
    """And the options with rows as long as both take. Raises InputError where the two do not share their tokens."""
    assert options.draft is not None
    draft, model = source.captured(model_folder(options.draft)), source.program
    one, other = model.facts.vocab_size, draft.facts.vocab_size
    if one != other:
        raise InputError(
            f"{options.draft} has {other} tokens and {source.path} {one}; give a draft of the same tokens"
        )
    length = min(options.length, model.facts.max_context, draft.facts.max_context)
    return Pair(Whole(model), Whole(draft), method), replace(options, length=length)


def lacks_draft(options: TrainOptions) -> str | None:
    """What to tell where the draft model must be given, and is not."""
    return "give the draft model's folder, draft=…" if options.draft is None else None


class HeadRun(Run):
    """Beside a `Pair`."""

    @classmethod
    def takes(cls, method: type[Any]) -> bool:
        """See Kind."""
        return issubclass(method, OfTokens)

    @classmethod
    def lacks(cls, options: TrainOptions) -> str | None:
        """See Kind."""
        return lacks_draft(options)

    @classmethod
    def opened(
        cls, method: Any, source: Source, options: TrainOptions
    ) -> tuple[Pair, TrainOptions]:
        """See Run."""
        return open_pair(method, source, options)

    def learn(self, ids: Tensor, known: Tensor) -> dict[str, float]:
        """One step on rows [B,T+1], at the tokens that can be predicted."""
        generator = torch.Generator().manual_seed(self.options.seed + self.step)
        x, stands = self.soft.examples(ids[:, :-1], known, generator)
        found = self.soft.method.odds(self.parts[0], x)
        lost = loss(found, stands)
        self.descend(lost)
        right = ((found > 0) == (stands > 0.5)).float().mean()
        return {"loss": lost.item(), "stand": stands.mean().item(), "right": right.item()}
