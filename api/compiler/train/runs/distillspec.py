"""A draft model that is tuned to its target (DistillSpec, arXiv:2310.08461): it learns to say what the target says, of
a text or of what it draws itself. The target stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.compiler.load.hub import model_folder
from accel.compiler.load.source import open_source
from accel.compiler.train.divergences import DIVERGENCES, stands
from accel.compiler.train.kind import Tuning
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.run import Run
from accel.compiler.train.source import Source
from accel.compiler.train.tuned import Tuned
from accel.compiler.train.whole import Whole
from accel.ir.axis import option
from accel.ir.errors import InputError
from accel.passes.trained import Parts
from accel.runtime.inputs.text import same_tokens


@dataclass(frozen=True)
class DistillSpec(Tuning):
    """divergence: from the target's distributions; `beta` is of "jsd". on_policy: the share of steps whose rows the
    draft model draws itself, behind first halves of the text's.
    """

    divergence: str = option("forward-kl", one_of=DIVERGENCES)
    beta: float = option(0.5, above=0, below=1)
    on_policy: float = option(0.0, least=0, most=1)

    key: ClassVar[str] = "distillspec"
    drafts: ClassVar[bool] = True

    def losses(self, p: Tensor, q: Tensor) -> Tensor:
        """Of each place [N], of the target's and the draft model's logits [N,V]."""
        return DIVERGENCES[self.divergence](p, q, self.beta)


@dataclass
class TunedDraft:
    """A draft model that learns, and its target, which does not. size: how many tokens both have."""

    draft: Tuned
    target: Whole
    method: DistillSpec
    size: int

    def start(self, inner: int, seed: int) -> Parts:
        return {0: self.draft.start()}


class DistillRun(Run):
    """A step is of rows of a text, or of rows that the draft model draws."""

    folder = True
    tunes = DistillSpec
    usual: ClassVar[Mapping[str, Any]] = {"rate": 3e-4, "length": 256, "rows": 4}

    @classmethod
    def takes(cls, method: type[Any]) -> bool:
        """See Kind."""
        return method is cls.tunes

    @classmethod
    def lacks(cls, options: TrainOptions) -> str | None:
        """See Kind."""
        if options.target is None:
            return "a draft model is tuned to its target; give the target's folder, target=…"
        return None if options.out else "a tuned draft model is a folder of its own; give out=DIR"

    @classmethod
    def opened(
        cls, method: Any, source: Source, options: TrainOptions
    ) -> tuple[TunedDraft, TrainOptions]:
        """See Run. Raises InputError where the two do not share their tokens."""
        assert options.target is not None
        if open_source(source.path).quantised:
            raise InputError(
                f"{source.path} has weights in few bits, which do not learn; give the draft model that it was made from"
            )
        path = model_folder(options.target)
        size = _shared_tokens(source, path)
        target, draft = source.captured(path), source.program
        pair = TunedDraft(Tuned(draft, source.path), Whole(target), method, size)
        most = min(target.facts.max_context, draft.facts.max_context)
        return pair, replace(options, length=min(options.length, most))

    def learn(self, ids: Tensor, known: Tensor) -> dict[str, float]:
        """One step on rows [B,T+1], or on as many tokens that begin as these."""
        method, pair = self.soft.method, self.soft
        tokens, where = ids[:, :-1], known > 0
        generator = torch.Generator().manual_seed(self.options.seed + self.step)
        if torch.rand((), generator=generator) < method.on_policy:
            half = max(1, tokens.shape[1] // 2)
            count = tokens.shape[1] - half
            tokens = pair.draft.draw(tokens[:, :half], count, self.parts[0], generator)
            where = torch.zeros_like(where)
            where[:, half - 1 : -1] = True
        p = pair.target.logits(tokens)[where][:, : pair.size]
        q = pair.draft.logits(tokens, self.parts[0])[where][:, : pair.size]
        losses = method.losses(p, q)
        self.descend(self.chosen(losses, p, tokens, where).mean())
        return {"loss": losses.mean().item(), "stands": stands(p, q).mean().item()}

    def chosen(self, losses: Tensor, p: Tensor, tokens: Tensor, where: Tensor) -> Tensor:
        """The losses that count, of those [N] of the places `where` [B,T] of tokens [B,T]. p: what the target says
        there [N,V].
        """
        return losses

    def write(self, out: Path, about: Mapping[str, str], by: Mapping[str, Any]) -> None:
        """A Hugging Face directory."""
        told = {name: str(value) for name, value in by.items()}
        self.soft.draft.save(out, self.parts[0], {**about, **told})


def _shared_tokens(source: Source, path: Path) -> int:
    """How many tokens a draft model and the target at a path both have; a draft model without a tokenizer gets its
    target's. Raises InputError where their tokens are others.
    """
    draft, target = open_source(source.path), open_source(path)
    sizes = [size for size in (draft.vocab_size, target.vocab_size) if size is not None]
    if source.tokenizer is None or target.tokenizer is None:
        if len(set(sizes)) > 1:
            raise InputError(
                f"{source.path} has {sizes[0]} tokens and {path} {sizes[1]}; give a target with the draft model's "
                "tokens"
            )
        source.tokenizer = source.tokenizer or target.tokenizer
    elif not same_tokens(source.tokenizer, target.tokenizer):
        raise InputError(
            f"{path} has another tokenizer than {source.path}; give a target with the draft model's tokens"
        )
    return min(sizes)
