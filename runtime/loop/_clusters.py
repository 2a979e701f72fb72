"""Texts that say about the same, found by their words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from accel.runtime.inputs.ints import Ints

WORD = re.compile(r"\w\w+")
TURNS = 100
Points = npt.NDArray[np.float64]


def clusters(texts: Sequence[str], count: int) -> Ints | None:
    """The cluster 0 .. `count` - 1 of each text [n], by k-means over TF-IDF of words; None where there are fewer texts
    than clusters, or none has a word. The first centre is the first text, each next one the text farthest from those
    before; ties go to the earlier one.
    """
    points = tf_idf(texts)
    if len(texts) < count or not points.size:
        return None
    centres, far = [points[0]], _distances(points, points[:1])[:, 0]
    while len(centres) < count:
        centres.append(points[int(far.argmax())])
        far = np.minimum(far, _distances(points, centres[-1][None])[:, 0])
    middle, labels = np.array(centres), np.full(len(texts), -1)
    for _ in range(TURNS):
        new = _distances(points, middle).argmin(1)
        if np.array_equal(new, labels):
            break
        labels = new
        for k in set(labels.tolist()):
            middle[k] = points[labels == k].mean(0)
    return labels


def tf_idf(texts: Sequence[str]) -> Points:
    """Of each text how often each word of two or more letters comes, times ln((1 + n) / (1 + texts with it)) + 1, of
    length 1 [n,words].
    """
    counts = [Counter(WORD.findall(text.lower())) for text in texts]
    words = sorted(set().union(*counts))
    found: Points = np.array([[one[word] for word in words] for one in counts], np.float64)
    rare = np.log((1 + len(texts)) / (1 + (found > 0).sum(0))) + 1
    found = (found * rare).reshape(len(texts), len(words))
    norms = np.sqrt((found**2).sum(1, keepdims=True))
    np.divide(found, norms, out=found, where=norms > 0)
    return found


def _distances(points: Points, centres: Points) -> Points:
    """Squared, [n,k]."""
    found: Points = ((points[:, None] - centres[None]) ** 2).sum(2)
    return found
