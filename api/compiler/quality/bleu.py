"""BLEU on token ids, of a batch of texts at once (TensorBLEU)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Scores = npt.NDArray[np.float64]

ORDERS = 4  # n-grams of 1 to so many tokens


def bleu(
    texts: Sequence[npt.ArrayLike],
    references: Sequence[Sequence[npt.ArrayLike]],
    epsilon: float = 0.1,
) -> Scores:
    """Of each text [n] of token ids its BLEU [n] against its references, one or more: 0 to 1.

    The geometric mean of the shares of its n-grams that a reference has, each counted as often as in one of them, times
    exp(1 - r / c) where the text (c tokens) is shorter than the reference of the nearest length (r, the shorter of
    equals). `epsilon` stands for the matches of an order that has none (method 1 of Chen and Cherry, 2014); 0: no
    smoothing. A text of fewer than 4 tokens has only the orders that fit. 0 where no token is in a reference.
    """
    if not len(texts):
        return np.zeros(0)
    groups = [
        [np.asarray(row, np.int64).reshape(-1) for row in (text, *others)]
        for text, others in zip(texts, references, strict=True)
    ]
    rows = [row for each in groups for row in each]
    owners = np.repeat(np.arange(len(groups)), [len(each) for each in groups])
    places = np.concatenate([np.arange(len(each)) for each in groups])  # 0: the text itself
    lengths = np.array([len(row) for row in rows])
    owner, place = np.repeat(owners, lengths), np.repeat(places, lengths)
    left = np.concatenate([np.arange(n, 0, -1) for n in lengths])
    words, tokens = np.unique(np.concatenate(rows), return_inverse=True)
    tokens = tokens.reshape(-1)

    size = lengths[places == 0]
    none = np.zeros(len(groups), np.bool_)
    logs = np.zeros((len(groups), ORDERS))
    gram = owner  # texts share no n-gram, so that one count serves all
    for order in range(1, ORDERS + 1):
        here = np.flatnonzero(left >= order)
        kinds, ids = np.unique(
            gram[here] * len(words) + tokens[here + order - 1], return_inverse=True
        )
        ids = ids.reshape(-1)
        gram = np.zeros_like(owner)
        gram[here] = ids
        of = np.zeros(len(kinds), np.int64)
        of[ids] = owner[here]
        shape = (int(places.max()) + 1, len(kinds))
        times = np.bincount(place[here] * len(kinds) + ids, minlength=shape[0] * shape[1]).reshape(
            shape
        )
        matched = np.bincount(of, np.minimum(times[0], times[1:].max(0, initial=0)), len(groups))
        if order == 1:
            none = matched == 0
        shares = np.where(matched > 0, matched, epsilon) / np.maximum(1, size - order + 1)
        with np.errstate(divide="ignore"):
            logs[:, order - 1] = np.where(size >= order, np.log(shares), 0)
    mean = logs.sum(1) / np.clip(size, 1, ORDERS)
    found: Scores = np.where(none, 0, np.exp(mean + _short(groups)))
    return found


def _short(groups: Sequence[Sequence[npt.NDArray[np.int64]]]) -> Scores:
    """The logarithm of what a text loses [n] that is shorter than its references."""
    found = np.zeros(len(groups))
    for i, (text, *others) in enumerate(groups):
        near = min((abs(len(row) - len(text)), len(row)) for row in others)[1] if others else 0
        found[i] = min(0.0, 1 - near / len(text)) if len(text) else 0.0
    return found
