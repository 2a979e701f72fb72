"""length = draft-verify: where drafts end, and how the threshold moves, against the paper's rule written plainly."""

import numpy as np
import pytest

from accel.ir.axis import find_axes
from accel.ir.errors import RecipeError
from accel.runtime.length.draft_verify import DraftVerify
from accel.runtime.speculation.round_cost import unmeasured_cost
from accel.runtime.tree import Level

from ...length_case import one


def said(chance):
    """Logits of two tokens, of which the first has a chance."""
    return np.log(np.array([chance, 1 - chance])).astype(np.float32) + 3


def draft(pace, chances):
    """How many tokens a draft has whose tokens have these chances, each in its turn."""
    drafted = 0
    for chance in chances[: pace.limit()]:
        drafted += 1
        if not pace.more(one(0, drafted), [said(chance)]):
            break
    return drafted


def plain_rule(th, stood, matched, drafted, most):
    """The paper's next threshold and share, of a round."""
    stood = 0.5 * stood + 0.5 * matched / drafted
    if stood < 0.9:
        new = th + 0.01
    else:
        new = th if drafted == most else th - 0.01
    return min(1.0, max(0.0, 0.9 * th + 0.1 * new)), stood


@pytest.mark.parametrize("most", [4, 12])
def test_the_threshold_moves_by_the_papers_rule(most):
    """Drafts that go on to the end, or stop before the last token, where both readings of the rule are one."""
    rng, pace = np.random.default_rng(most), DraftVerify(most=most).begin(unmeasured_cost)
    th, stood, moves = 0.8, 0.0, set()
    for number in range(300):
        chances = np.full(most, 0.999)
        if rng.random() < 0.5:
            chances[rng.integers(0, most - 1)] = 0.01
        drafted = draft(pace, chances)
        matched = drafted if number % 90 > 30 else int(rng.integers(0, drafted + 1))
        pace.observe(drafted, matched)
        before = th
        th, stood = plain_rule(th, stood, matched, drafted, most)
        assert pace.threshold == pytest.approx(th, abs=1e-12)
        moves.add(round(th - before, 4))
    assert moves == {-0.001, 0.0, 0.001}


def test_it_stops_behind_the_first_unlikely_token():
    pace = DraftVerify(most=5).begin(unmeasured_cost)
    assert draft(pace, [0.9, 0.85, 0.7, 0.9, 0.9]) == 3, "which stays"
    assert draft(pace, [0.81] * 9) == 5
    both = Level(np.array([0, 1]), np.array([0, 0]))
    assert pace.more(both, [said(0.9), said(0.9)]), "a level goes by its likeliest"
    assert not pace.more(one(1), [np.float32([1e30, 0])])


def test_at_the_ends_of_its_range():
    """1: a token a round; 0: whole drafts; it stays there, and does not move where steps are 0."""
    for threshold, drafted in ((1.0, 1), (0.0, 6)):
        pace = DraftVerify(most=6, threshold=threshold, step=0.0).begin(unmeasured_cost)
        for _ in range(5):
            assert draft(pace, [0.6] * 6) == drafted
            pace.observe(drafted, 0)
            assert pace.threshold == threshold
    high = DraftVerify(threshold=1.0).begin(unmeasured_cost)
    low = DraftVerify(threshold=0.0005, step=1.0).begin(unmeasured_cost)
    for _ in range(20):
        high.observe(draft(high, [0.5]), 0)
        low._stopped = True
        low.observe(1, 1)
    assert high.threshold == 1.0 and low.threshold == 0.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"most": 0}, "most is 0; give 1 to 256"),
        ({"threshold": 1.5}, "threshold is 1.5; give 0 to 1"),
        ({"step": -0.1}, "step is -0.1; give 0 to 1"),
    ],
)
def test_options_that_cannot_be(options, words):
    with pytest.raises(RecipeError, match=words):
        find_axes()["length"].build("draft-verify", **options)
