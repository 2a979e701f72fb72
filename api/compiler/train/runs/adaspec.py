"""A draft model that learns the tokens that it can still learn (AdaSPEC, arXiv:2510.19779): those at which it is most
behind a reference, a draft model that was tuned to the target before and stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.compiler.load.hub import model_folder
from accel.compiler.load.source import open_source
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.runs.distillspec import DistillRun, DistillSpec, TunedDraft
from accel.compiler.train.source import Source
from accel.compiler.train.whole import Whole
from accel.ir.axis import option
from accel.ir.errors import InputError


@dataclass(frozen=True)
class AdaSpec(DistillSpec):
    """keep: the share of a step's tokens that are learnt from."""

    keep: float = option(0.4, above=0, most=1)

    key: ClassVar[str] = "adaspec"


@dataclass
class Selective(TunedDraft):
    """And the reference."""

    reference: Whole


def learnable(losses: Tensor, references: Tensor, keep: float) -> Tensor:
    """Which of the losses [N] exceed the reference's [N] most: a share `keep` of them."""
    gaps = losses.detach() - references
    return gaps >= gaps.quantile(1 - keep)


class SelectiveRun(DistillRun):
    """Beside a reference."""

    tunes = AdaSpec

    @classmethod
    def lacks(cls, options: TrainOptions) -> str | None:
        """See Kind."""
        if options.reference is None:
            return (
                "adaspec goes by a draft model that was tuned before; give its folder, reference=… (accel-compile "
                "train distillspec makes one)"
            )
        return super().lacks(options)

    @classmethod
    def opened(
        cls, method: Any, source: Source, options: TrainOptions
    ) -> tuple[Selective, TrainOptions]:
        """See DistillRun. Raises InputError where the reference has other tokens."""
        assert options.reference is not None
        path = model_folder(options.reference)
        sizes = [open_source(folder).vocab_size for folder in (path, source.path)]
        if sizes[0] != sizes[1]:
            raise InputError(
                f"{path} has {sizes[0]} tokens and {source.path} {sizes[1]}; give a reference that was tuned from it"
            )
        pair, options = super().opened(method, source, options)
        reference = source.captured(path)
        return Selective(**vars(pair), reference=Whole(reference)), options

    def chosen(self, losses: Tensor, p: Tensor, tokens: Tensor, where: Tensor) -> Tensor:
        """See DistillRun."""
        method = self.soft.method
        with torch.no_grad():
            q = self.soft.reference.logits(tokens)[where][:, : self.soft.size]
            references = method.losses(p, q)
        return losses[learnable(losses, references, method.keep)]
