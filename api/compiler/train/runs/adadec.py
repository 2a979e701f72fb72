"""The entropy from which `adadec` pauses (arXiv:2506.08980): a logistic regression, over a text that the model reads,
of whether the text's token is its likeliest one by the entropy there, classes weighing alike; and of the probabilities
to cut at, 0.01 to 0.99, the one that tells most tokens rightly.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from accel.compiler.measure import watched
from accel.compiler.train.host import HELD, HostKind, batches, learn, save_part
from accel.compiler.train.kind import Made
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.source import Source
from accel.compiler.train.whole import Whole
from accel.ir.errors import InputError
from accel.runtime.decode.trained_part import sample
from accel.runtime.loop.adadec import Adadec

CUTS = np.linspace(0.01, 0.99, 99)


class Unsure(HostKind):
    """The text is read once."""

    of = Adadec

    @classmethod
    def make(cls, method: Any, source: Source, options: TrainOptions) -> Made:
        """See Kind."""
        one, read = watched(method)
        model = Whole(source.program)
        options = replace(options, length=min(options.length, source.program.facts.max_context))
        found = [said(model, *batch) for batch in batches(source, options)]
        entropy, right = (torch.cat(part) for part in zip(*found, strict=True))
        held = torch.arange(len(right)) % HELD == 0
        threshold = pauses_at(entropy[~held], right[~held], options.rate)
        told = {
            "threshold": threshold,
            "likeliest": float(right.double().mean()),
            "rightly": float(((entropy < threshold) == right)[held].double().mean()),
            "tokens": float(len(right)),
        }
        part = {"threshold": torch.tensor([threshold])}
        return save_part(one, read, part, {"model": sample(lambda: model)}, told, options)


def said(model: Whole, ids: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Of the tokens of rows [B,T+1] with a weight `known` [B,T]: the entropy in nats where each is predicted, and
    whether it is the likeliest one there, [N] each.
    """
    there, logits = known > 0, model.logits(ids[:, :-1])
    logs = logits[there].log_softmax(-1)
    entropy = -(logs.exp() * logs).sum(-1)
    return entropy, logs.argmax(-1) == ids[:, 1:][there]


def pauses_at(entropy: Tensor, right: Tensor, rate: float) -> float:
    """The threshold that entropies [N] and whether the likeliest token was `right` [N] tell. Raises InputError where
    they tell none.
    """
    share = right.double().mean()
    if not 0 < share < 1:
        raise InputError(
            f"adadec: the likeliest token is {'always' if share else 'never'} that of the text, which tells no "
            "threshold; give a longer text, text=…"
        )
    # A logistic regression of the entropy less its mean, over its deviation
    middle, spread = entropy.double().mean(), entropy.double().std().clamp(min=1e-6)
    x, y = (entropy.double() - middle) / spread, right.double()
    weight = torch.where(right, 0.5 / share, 0.5 / (1 - share))
    line = [torch.zeros((), dtype=torch.float64) for _ in range(2)]
    learn(
        line,
        lambda: F.binary_cross_entropy_with_logits(line[0] * x + line[1], y, weight),
        rate,
    )
    slope = float(line[0] / spread)
    offset = float(line[1]) - slope * float(middle)
    if slope >= 0:
        raise InputError(
            "adadec: of this text the model is not surer of tokens that it has right, which tells no threshold; give "
            "another text, text=…"
        )
    chances = (slope * entropy.double() + offset).sigmoid().numpy()
    rightly = [float(((chances >= cut) == right.numpy()).mean()) for cut in CUTS]
    best = float(CUTS[int(np.argmax(rightly))])
    return max(0.0, (math.log(best / (1 - best)) - offset) / slope)
