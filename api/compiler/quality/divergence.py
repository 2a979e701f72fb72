"""How far one build's next-token distribution is from another's, along the same text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.runtime.inputs.encoder_inputs import padded
from accel.runtime.model.compiled import CompiledModel

Ids = npt.NDArray[Any]
Odds = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Divergence:
    """kl: sum of KL(base || other) in nats. same: tokens at which both put the same token first."""

    kl: float
    same: int
    tokens: int


def along(model: CompiledModel, prompt: Ids, text: Ids, source: Ids | None = None) -> Odds:
    """Log-probabilities [1+N,V] after a prompt [P] and after each token of a text [N], one token per call.

    Prompt methods (eviction, pruning) act at the end of the prompt. `source`: an encoder's input, token ids [X].
    """
    with model.session() as session:
        if source is not None and model.facts.encoder is not None:
            session.encode(*padded([source], model.facts.encoder))
        rows = [session.prompt(prompt[None])[0, 0]]
        rows += [session.run(token[None, None])[0, 0] for token in text]
    return log_odds(np.stack(rows))


def log_odds(logits: npt.NDArray[Any]) -> Odds:
    """Logits [..., V] as log-probabilities, in float64."""
    x: Odds = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    x -= np.log(np.exp(x).sum(-1, keepdims=True))
    return x


def divergence(base: Odds, other: Odds) -> Divergence:
    """Of log-probabilities [N,V] along one text."""
    kl = float((np.exp(base) * (base - other)).sum())
    same = int((base.argmax(-1) == other.argmax(-1)).sum())
    return Divergence(max(0.0, kl), same, len(base))
