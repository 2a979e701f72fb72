"""BLEU of a batch is what counting n-grams one by one gives, by the formula of NLTK's `sentence_bleu`."""

from collections import Counter
from fractions import Fraction
from math import exp, fsum, log

import numpy as np
import pytest

from accel.compiler.quality import bleu as module
from accel.compiler.quality.bleu import bleu


def grams(row, n):
    return Counter(tuple(row[i : i + n]) for i in range(len(row) - n + 1))


def plain(text, references, epsilon):
    """`sentence_bleu(references, text, auto_reweigh=True)`, smoothed by method 1; without smoothing 0 where an order
    has no match.
    """
    orders = range(1, min(4, max(1, len(text))) + 1)
    logs = []
    for n in orders:
        have = grams(text, n)
        most = Counter()
        for row in references:
            most |= grams(row, n)
        matched = sum((have & most).values())
        if not matched and (n == 1 or not epsilon):
            return 0.0
        share = Fraction(matched, max(1, have.total())) if matched else epsilon / have.total()
        logs.append(log(share) / len(orders))
    near = min((len(row) for row in references), key=lambda n: (abs(n - len(text)), n))
    return exp(fsum(logs)) * (1 if len(text) > near else exp(1 - near / len(text)))


def batch(seed):
    """Texts of 0 to 30 tokens of few words, and 1 to 3 references of each, some of them pieces of the text."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, 9, n).tolist() for n in rng.integers(0, 30, 24)]
    references = []
    for text in texts:
        rows = [rng.integers(0, 9, n).tolist() for n in rng.integers(0, 30, rng.integers(1, 4))]
        rows[0] = [*text[rng.integers(0, 3) :], *rows[0][:3]]
        references.append(rows)
    return texts, references


def law_plain(epsilon=0.1, seed=0):
    texts, references = batch(seed)
    wanted = [plain(*pair, epsilon) for pair in zip(texts, references, strict=True)]
    assert 2 < sum(0 < w < 1 for w in wanted)
    assert bleu(texts, references, epsilon) == pytest.approx(wanted, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("epsilon", [0.1, 0.0])
def test_a_batch_is_each_text_counted_alone(epsilon):
    for seed in range(4):
        law_plain(epsilon, seed)


@pytest.mark.parametrize("broken", ["unclipped", "not brief"])
def test_what_is_left_out_is_seen(monkeypatch, broken):
    """The control: no clipping over references, and no loss for a short text."""
    if broken == "unclipped":
        monkeypatch.setattr(module.np, "minimum", lambda a, b: a)
    else:
        monkeypatch.setattr(module, "_short", lambda given: np.zeros(len(given)))
    with pytest.raises(AssertionError):
        law_plain()


def test_a_known_sentence():
    """Papineni et al. (2002): "the" seven times has two of seven against "the cat is on the mat"."""
    the, cat, on, mat = range(4)
    assert plain([the] * 7, [[the, cat, 5, on, the, mat]], 0.0) == 0
    text, reference = [the, cat, on, mat, 9], [the, cat, on, mat, 8]
    assert bleu([text], [[reference]])[0] == pytest.approx((4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)


def test_ends():
    assert bleu([], []).shape == (0,)
    assert bleu([[1, 2]], [[[1, 2]]])[0] == 1, "a short text has the orders that fit"
    assert bleu([[], [3], [2**40]], [[[1]], [[1]], [[2**40]]]).tolist() == [0, 0, 1]
    with pytest.raises(ValueError, match="zip"):
        bleu([[1]], [])
