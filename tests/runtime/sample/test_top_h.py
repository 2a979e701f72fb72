"""Top-H: transformers' distribution, over the hundred best tokens."""

import numpy as np
from transformers.generation.logits_process import TopHLogitsWarper

from accel.runtime.sample import Distribution, surprise
from accel.runtime.sample.top_h import BEST, TopH

from .warped import warped

OPTIONS = [{"share": share} for share in (0.05, 0.4, 0.7, 0.95)]


def probabilities(p, o):
    scores = np.where(p > 0, p, 1e-300)  # 0 · ln 0 is NaN there
    out = warped(scores / scores.sum(), TopHLogitsWarper(o.share))
    return out / out.sum()


def kept(p, share):
    law = Distribution(np.arange(len(p)), np.array(p))
    return TopH(share=share).reshape(law, np.zeros(0, np.int64)).tokens.tolist()


def test_the_sum_stays_within_its_share_and_the_next_token_would_not():
    p = np.sort(np.random.default_rng(0).dirichlet(np.full(60, 0.5)))[::-1]
    terms = surprise(p)
    for share in (0.2, 0.5, 0.8):
        count = len(kept(p, share))
        assert terms[:count].sum() <= share * terms.sum() < terms[: count + 1].sum()


def test_one_token_stays_and_at_most_a_hundred():
    assert kept([0.2, 0.5, 0.3], 0.01) == [1]
    assert kept(np.ones(500), 1.0) == list(range(BEST)), "the lower ids of equals"
