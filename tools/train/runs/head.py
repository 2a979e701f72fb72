"""Training of heads that foretell whether a token stands (`OfTokens`): a draft model's odds, and whether the model
takes what it drew (SpecDec++, arXiv:2405.19715). Half the tokens are drawn and count as they would stand; half are the
draft's likeliest, as greedy decoding drafts them, and count where the model has the same.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from reference_data import REFERENCE
from run import Run
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from accel.ir.errors import InputError
from accel.passes.trained import Parts
from accel.runtime.length._head import Head, OfTokens, sample

FELL = 6.0  # what a token that fell weighs, where one that stood weighs 1


@dataclass
class Pair:
    """A model and its draft model, which stay as they are."""

    model: Any
    draft: Any
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
            p, q = (m(tokens).logits[known > 0].float() for m in (self.model, self.draft))
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
                "model": sample(lambda: _Whole(self.model)),
                "draft": sample(lambda: _Whole(self.draft)),
            }
        )


class _Whole:
    """A model as `sample` asks for it."""

    def __init__(self, model: Any):
        self.model, self.vocab_size = model, model.config.vocab_size

    def __enter__(self) -> _Whole:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, tokens: Any) -> Any:
        with torch.no_grad():
            return self.model(torch.from_numpy(tokens)).logits.float().numpy()


def untaught(
    method: Head | type[Head], inner: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """A head's tensors before it has learnt anything."""
    parts = {name: torch.zeros(size) for name, size in method.sizes(inner).items()}
    for tensor in parts.values():
        if tensor.ndim == 2:
            tensor.normal_(0, tensor.shape[0] ** -0.5, generator=generator)
    return parts


def loss(odds: Tensor, stands: Tensor) -> Tensor:
    """Cross-entropy [] of log-odds [N] with soft labels [N], in which tokens that fall weigh more."""
    fell, stood = FELL * (1 - stands), stands
    lost = fell * F.softplus(odds) + stood * F.softplus(-odds)
    return lost.sum() / (fell + stood).sum()


def open_pair(method: type[OfTokens], options: argparse.Namespace, reference: Path) -> Pair:
    """Raises InputError where the two do not share their tokens."""
    folders = options.model, options.draft or reference / "draft"
    model, draft = map(_read, folders)
    one, other = model.config.vocab_size, draft.config.vocab_size
    if one != other:
        raise InputError(
            f"{folders[1]} has {other} tokens and {folders[0]} {one}; give a draft of the same tokens"
        )
    options.length = min(
        options.length, model.config.max_position_embeddings, draft.config.max_position_embeddings
    )
    return Pair(model, draft, method())


def _read(folder: Path) -> Any:
    """A model in float32."""
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read a model in {folder}: {error}") from error


def lacks_draft(options: argparse.Namespace) -> str | None:
    """What to tell where the draft model's folder must be given, and is not."""
    needed = options.draft is None and options.model != REFERENCE
    return "give the draft model's folder, as --draft DRAFT" if needed else None


class HeadRun(Run):
    """Beside a `Pair`."""

    @classmethod
    def takes(cls, method: type[Any]) -> bool:
        """See Kind."""
        return issubclass(method, OfTokens)

    @classmethod
    def lacks(cls, options: argparse.Namespace) -> str | None:
        """See Kind."""
        return lacks_draft(options)

    @classmethod
    def opened(cls, method: type[Any], options: argparse.Namespace) -> Pair:
        """See Run."""
        return open_pair(method, options, REFERENCE)

    def learn(self, ids: Tensor, known: Tensor) -> dict[str, float]:
        """One step on rows [B,T+1], at the tokens that can be predicted."""
        generator = torch.Generator().manual_seed(self.options.seed + self.step)
        x, stands = self.soft.examples(ids[:, :-1], known, generator)
        found = self.soft.method.odds(self.parts[0], x)
        lost = loss(found, stands)
        self.descend(lost)
        right = ((found > 0) == (stands > 0.5)).float().mean()
        return {"loss": lost.item(), "stand": stands.mean().item(), "right": right.item()}
