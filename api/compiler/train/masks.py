"""What tunings share whose models learn to fill masks behind a text, as loops with `blocks` ask them to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor
from torch.nn import functional as F

from accel.compiler.train.kind import Tuning
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.source import Source
from accel.compiler.train.windows import Windowed, WindowedRun
from accel.ir.axis import option
from accel.ir.errors import InputError
from accel.ir.facts import Facts


@dataclass(frozen=True)
class Masking(Tuning):
    """block: tokens that a call may give. mask: the token that stands for one that is not known, which no text has; -1:
    the model's own, or the one that it pads with.
    """

    block: int = option(16, least=2, most=256)
    mask: int = option(-1, least=-1)


def mask_of(facts: Facts, mask: int) -> int:
    """The id of a model's mask. Raises InputError where it has none, or not that one."""
    found = mask if mask >= 0 else facts.config.get("mask_token_id")
    if found is None:
        found = facts.config.get("pad_token_id")
    if not isinstance(found, int) or not 0 <= found < facts.vocab_size or found in facts.eos:
        raise InputError(
            f"mask: the model has {'no token' if found is None else f'the token {found}'} to stand for one that is not "
            f"known; give mask=…, a token of 0..{facts.vocab_size - 1} that no text has, and that ends none"
        )
    return found


class MaskedRun(WindowedRun):
    """A step is of rows of a text, and of windows of masks on them."""

    usual: ClassVar[Mapping[str, Any]] = {"rate": 1e-4, "length": 256, "rows": 4}

    @classmethod
    def opened(
        cls, method: Any, source: Source, options: TrainOptions
    ) -> tuple[Windowed, TrainOptions]:
        """See WindowedRun. Raises InputError where the model has no mask, or rows no room for a block."""
        mask = mask_of(source.program.facts, method.mask)
        soft, options = super().opened(replace(method, mask=mask), source, options)
        if options.length <= method.block:
            raise InputError(
                f"rows of {options.length} tokens have no room for what a block of {method.block} says; give length=… "
                "of more, or block=… of less"
            )
        return soft, options

    @property
    def config(self) -> Mapping[str, Any]:
        """See WindowedRun."""
        method = self.soft.method
        return {"mask_token_id": method.mask, "logit_shift": True, "block_size": method.block}

    def check_text(self, ids: Tensor) -> None:
        """Raise InputError where a text has the mask."""
        mask = self.soft.method.mask
        if bool((ids == mask).any()):
            raise InputError(
                f"the text has the token {mask}, which stands for tokens that are not known; give mask=… of another"
            )


def cross_entropy(logits: Tensor, tokens: Tensor, weight: Tensor) -> Tensor:
    """The mean of tokens [B,N] by logits [B,N,V], each as its weight [B,N] says; 0 where no token has any."""
    each = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none")
    return (each.view_as(weight) * weight).sum() / weight.sum().clamp(min=1)


def share_right(logits: Tensor, tokens: Tensor, weight: Tensor) -> float:
    """The share of tokens that are the likeliest ones."""
    right = (logits.argmax(-1) == tokens) * weight
    return float(right.sum() / weight.sum().clamp(min=1))
