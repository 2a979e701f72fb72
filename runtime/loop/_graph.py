"""Graphs of tokens: the transitions that a model gives, and the paths through them (arXiv:2205.07459, 2210.05193)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from accel.ir.paths import Paths

Floats = npt.NDArray[np.floating[Any]]


def transitions(outputs: Floats, paths: Paths) -> Floats:
    """The log-probability [P,P] that vertex j follows vertex i, of what a step gives of each behind its logits [P,n];
    -inf where j is not after i.
    """
    count, heads, size = len(outputs), paths.heads, paths.size
    wide = outputs.astype(np.float64)
    q, k = (
        wide[:, at : at + heads * size].reshape(count, heads, size).swapaxes(0, 1)
        for at in (0, heads * size)
    )
    scores = q @ k.swapaxes(1, 2) / np.sqrt(size)
    scores[:, np.tri(count, dtype=bool)] = -np.inf
    gates = log_softmax(wide[:, 2 * heads * size :]).T[:, :, None]
    found: Floats = np.logaddexp.reduce(log_softmax(scores) + gates, axis=0)
    return found


def log_softmax(x: Floats) -> Floats:
    """Over the last axis; -inf where all of it is."""
    most = x.max(axis=-1, keepdims=True)
    below = x - np.where(np.isfinite(most), most, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        mass = np.log(np.exp(below).sum(axis=-1, keepdims=True))
        return np.where(np.isfinite(x), below - mass, -np.inf)


def walked(scores: Floats) -> list[int]:
    """The path from the first vertex to the last that takes the best of scores [P,P] at each."""
    path = [0]
    while path[-1] < len(scores) - 1:
        here = path[-1]
        path.append(here + 1 + int(scores[here, here + 1 :].argmax()))
    return path


def viterbi(links: Floats, sure: Floats, penalty: float, longest: int) -> list[int]:
    """The path through `links` [P,P] of the best score: the sum of its transitions and of `sure` [P] at each vertex but
    the last, over its inner vertices ** `penalty`; it has 1 to `longest` of these. A graph of two vertices has none.
    """
    end = len(links) - 1
    if end < 2:
        return list(range(end + 1))
    score, back, ends = links[0] + sure[0] + sure, [], []
    for length in range(1, min(longest, end - 1) + 1):
        if length > 1:
            ways = score[:, None] + links
            back.append(ways.argmax(axis=0))
            score = ways.max(axis=0) + sure
        ends.append((score + links[:, end]) / length**penalty)
    best = int(np.argmax([one.max() for one in ends]))
    path = [end, int(ends[best].argmax())]
    for step in reversed(back[:best]):
        path.append(int(step[path[-1]]))
    return [0, *reversed(path)]
