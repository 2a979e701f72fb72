"""The confidence from which a token leaves early, with a bound on how many tokens are others: Learn then Test
(arXiv:2110.01052), as CALM calibrates it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, fx

from accel.ir.program import Program
from accel.passes.stream import Stream
from accel.passes.weights._calibrated import calibration_of

TOKENS = 4096  # of text that are read
APART = 8  # of these every so many-th is counted: neighbours in a text are alike
AT_ONCE = 512  # tokens whose logits are in memory
STEPS = 200  # thresholds that are tried

Confidence = Callable[
    [Tensor, Tensor, Tensor, int], Tensor
]  # of logits, the stream after and before the layer of an exit, and the layer


def gap(logits: Tensor) -> Tensor:
    """How far the probabilities of the two likeliest tokens [...,V] are apart, [...]."""
    best = logits.float().softmax(-1).topk(2).values
    return best[..., 0] - best[..., 1]


def most(logits: Tensor) -> Tensor:
    """The probability of the likeliest token [...,V], [...]."""
    return logits.float().softmax(-1).amax(-1)


def likeness(after: Tensor, before: Tensor) -> Tensor:
    """The cosine of the stream after a layer with that before it [...,E], [...]."""
    a, b = after.float(), before.float()
    return (a * b).sum(-1) / ((a * a).sum(-1) * (b * b).sum(-1)).sqrt()


def near_one() -> list[float]:
    """Cosines to try, from the surest on, in equal steps of the logarithm of what they lack of 1."""
    return [1 - 10 ** (-5 + 5 * i / STEPS) for i in range(STEPS + 1)]


def even() -> list[float]:
    """Probabilities, or differences of them, to try, from the surest on, in equal steps."""
    return [1 - i / STEPS for i in range(1, STEPS)]


def sample(program: Program) -> Iterator[Tensor]:
    """Rows [n,T] of the calibration text, from all of it, a few at once."""
    text = calibration_of(program).tokens[:, : program.facts.max_context]
    count = max(1, TOKENS // text.shape[1])
    rows = text[:: max(1, len(text) // count)][:count]
    yield from rows.split(max(1, AT_ONCE // rows.shape[1]))


def observed(
    program: Program, calls: Sequence[fx.Node], exits: Sequence[int], confidence: Confidence
) -> tuple[Tensor, Tensor]:
    """Of each exit and of some tokens [E,N] of the calibration text the confidence, and whether the likeliest token is
    that of the whole model. Tokens before have gone through all layers.
    """
    sure, same = [], []
    with torch.no_grad():
        for rows in sample(program):
            stream = Stream(program, calls, rows)
            x, found, likeliest = stream.start, [], []
            for index in range(len(calls)):
                before, x = x, stream.layer(index, x)
                if index in exits or index == len(calls) - 1:
                    logits = stream.logits(x)
                    likeliest.append(logits.argmax(-1))
                if index in exits:
                    found.append(confidence(logits, x, before, index))
            picked = slice(min(APART, rows.shape[1]) - 1, None, APART)
            last = likeliest.pop()
            sure.append(torch.stack([s[:, picked].flatten() for s in found]))
            same.append(torch.stack([(token == last)[:, picked].flatten() for token in likeliest]))
    return torch.cat(sure, 1), torch.cat(same, 1)


def leaving(sure: Tensor, same: Tensor, limit: float) -> Tensor:
    """Of the tokens that leave early by `sure` [E,N] whether each is the `same` [E,N] as the whole model's, [n]."""
    out = sure >= limit
    found: Tensor = same.gather(0, out.int().argmax(0)[None])[0][out.any(0)]
    return found


def least_threshold(
    sure: Tensor, same: Tensor, limits: Iterable[float], share: float, doubt: float
) -> float | None:
    """The least of `limits`, tried from the surest on until one fails, at which more than the `share` of tokens that
    are others than the whole model's is refuted: were it so, as few as these would be seen with a probability of at
    most `doubt`. None where the first one fails.

    So with 1 - doubt no more than `share` are others, of tokens drawn alike: only the last test can err.
    """
    least = None
    for limit in limits:
        wrong = int((~leaving(sure, same, limit)).sum())
        if at_most(wrong, sure.shape[1], share) > doubt:
            break
        least = limit
    return least


def at_most(wrong: int, count: int, share: float) -> float:
    """The probability of `wrong` or fewer of `count`, each with probability `share`."""
    if share >= 1:
        return float(wrong >= count)
    if share <= 0:
        return 1.0
    k = torch.arange(wrong + 1, dtype=torch.float64)
    total = math.lgamma(count + 1)
    ways = total - torch.lgamma(k + 1) - torch.lgamma(count - k + 1)
    return float((ways + k * math.log(share) + (count - k) * math.log1p(-share)).exp().sum())
