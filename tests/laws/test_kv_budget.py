"""Laws of budgets: what layers and heads keep adds up, never falls to nothing, and grows with what is given."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.ir.errors import RecipeError
from accel.passes.kv.score import Base as Score
from accel.runtime.kv.budget import EMPTY, Base
from accel.runtime.kv.budget._share import Share

from ..kv_slots import AXES, G, build, choose, constants, real, sets, slots

EVERY = AXES["budget"].names()
NAMES = [n for n in EVERY if not AXES["budget"].method(n).adaptive]  # a number of tokens is given
many = settings(max_examples=60, deadline=None, derandomize=True)


# Tokens of a layer


def law_layers(budget, seen, layers):
    """Layers keep the mean times their number, a rounding apart; lower ones at least as many."""
    tokens = [budget.tokens(seen, i, layers) for i in range(layers)]
    assert all(isinstance(n, int) and n >= 1 for n in tokens)
    assert tokens == sorted(tokens, reverse=True)
    mean = budget.mean(seen)
    if mean < seen:
        assert max(tokens) <= seen
        assert abs(sum(tokens) - max(1, mean) * layers) <= layers
    else:
        assert min(tokens) >= seen, "nothing goes where everything has room"


@pytest.mark.parametrize("name", NAMES)
@many
@given(
    seen=st.integers(1, 5000),
    layers=st.integers(1, 40),
    share=st.one_of(
        st.fixed_dictionaries({"tokens_kept": st.integers(1, 6000)}),
        st.fixed_dictionaries({"compression_ratio": st.floats(0.01, 0.99)}),
    ),
)
def test_layers(name, seen, layers, share):
    law_layers(build("budget", name, **share), seen, layers)


@pytest.mark.parametrize("name", NAMES)
def test_more_is_never_less(name):
    for seen, layers in itertools.product((1, 9, 100, 2000), (1, 2, 7)):
        for kept in itertools.pairwise((1, 2, 5, 30, 60, 500, 3000)):
            a, b = (build("budget", name, tokens_kept=k) for k in kept)
            totals = [sum(x.tokens(seen, i, layers) for i in range(layers)) for x in (a, b)]
            assert min(totals[0], seen * layers) <= totals[1] + layers // 2


def test_the_first_layers_may_keep_everything():
    budget = build("budget", "uniform", tokens_kept=5, dense_layers=2)
    assert [budget.tokens(30, i, 4) for i in range(4)] == [30, 30, 5, 5]
    assert [budget.tokens(3, i, 4) for i in range(4)] == [3, 3, 5, 5]
    with pytest.raises(RecipeError, match="dense_layers is -1"):
        build("budget", "uniform", dense_layers=-1)


def test_a_budget_that_does_not_add_up_is_caught():
    class Twice(Share, Base):
        def tokens(self, seen, layer, layers):
            return 2 * self.average(seen)

    class None_(Share, Base):
        def tokens(self, seen, layer, layers):
            return self.average(seen) - 1

    for broken in (Twice, None_):
        with pytest.raises(AssertionError):
            for kept in (1, 10, 50):
                law_layers(broken(kept), 60, 4)


# Heads of a layer


class Given(Score):
    """Values say what tokens are worth."""

    def __call__(self, values):
        return values[..., 0]


def law_heads(budget, seed, kept, recent=(11, 3, 14)):
    """All heads of a layer together keep the mean times their number, of those that are there; no head
    more than `most`, which a table says of each layer.
    """
    x, score = slots(seed, recent=recent), Given()
    table = {n: t.numpy() for n, t in constants(budget).items()}
    most = budget.most(kept, G, **table)
    found = sets(choose(x, kept, score, budget, most=most))
    counts = [[len(h) for h in row] for row in found]
    for row, there in zip(counts, real(x), strict=True):
        can = sum(min(len(head), most if table else len(head)) for head in there)
        assert sum(row) == min(kept * G, can) or name_is_per_head(budget)
        assert max(row) <= most
        if name_is_per_head(budget):
            assert row == [min(kept, len(t)) for t in there]
    every = sets(choose(x, 99, score))
    assert all(a <= b for a, b in zip(sum(found, []), sum(every, []), strict=True))


def name_is_per_head(budget):
    return type(budget).heads is Base.heads or budget.even


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 20), kept=st.integers(1, 30))
def test_heads(name, seed, kept):
    law_heads(build("budget", name), seed, kept)
    law_heads(build("budget", name), seed, kept, recent=(1, 0, 2))


def test_heads_that_do_not_add_up_are_caught():
    class Halves(Share, Base):
        def tokens(self, seen, layer, layers):
            return self.average(seen)

        even = False

        def heads(self, scores, keep):
            return super().heads(scores, keep) // 2

    class CountsNothing(type(build("budget", "ada-kv"))):
        """Slots that hold nothing are made safe too."""

        def heads(self, scores, keep, positions):
            return super().heads(scores.masked_fill(scores <= EMPTY, -1e30), keep, positions)

    class Proportional(type(build("budget", "headkv-r2"))):
        """What a head has no slots for goes nowhere."""

        def heads(self, scores, keep, positions, ranks, share):
            weights = self._weights(share)
            return (keep[:, None] * weights / weights.mean()).round().long()

    for broken in (Halves(), CountsNothing(safeguard=1.0), Proportional(window=0)):
        with pytest.raises(AssertionError):
            for seed, kept in itertools.product(range(4), (5, 9, 14)):
                law_heads(broken, seed, kept, recent=(1, 3, 14))


def scores(seed, groups=3, length=20):
    return torch.randn(2, groups, length, generator=torch.Generator().manual_seed(seed))


def positions(x):
    return torch.arange(x.shape[2]).expand(x.shape)


@pytest.mark.parametrize("safeguard", [0.0, 0.2, 0.5, 1.0])
def test_ada_kv_guards_each_head(safeguard):
    """Against the rule written out; one head's tokens are worth far more than the others'."""
    x = scores(1)
    x[:, 1] += 5
    for kept in (1, 4, 7, 20):
        budget = build("budget", "ada-kv", safeguard=safeguard)
        found = budget.heads(x, torch.tensor([kept, kept]), positions(x))
        assert (found.sum(1) == kept * 3).all()
        least = max(1, int(kept * safeguard)) if safeguard else 0
        assert (found >= least).all()
        for row in range(2):
            ranked = [x[row, g].sort(descending=True).values for g in range(3)]
            rest = torch.cat([r[least:] for r in ranked]).sort(descending=True).values
            last = rest[: kept * 3 - 3 * least]
            want = [
                least + int((r[least:] >= last[-1]).sum()) if last.numel() else least
                for r in ranked
            ]
            assert found[row].tolist() == want
    if safeguard == 1.0:
        assert (found == kept).all()


def test_equal_heads_share_equally():
    x = scores(2)[:, :1].expand(2, 3, 20)
    keep = torch.tensor([6, 9])
    found = build("budget", "ada-kv").heads(x.contiguous(), keep, positions(x))
    assert found.tolist() == [[6] * 3, [9] * 3]


def test_a_pyramid_of_no_slope_is_flat_and_a_steep_one_falls():
    flat = build("budget", "pyramidkv", beta=1.0, tokens_kept=200)
    assert {flat.tokens(2000, i, 8) for i in range(8)} == {200}
    steep = build("budget", "pyramidkv", beta=20.0, window=4, tokens_kept=200)
    found = [steep.tokens(2000, i, 8) for i in range(8)]
    assert (found[0], found[-1], sum(found)) == (390, 10, 1600)


@pytest.mark.parametrize(
    ("seen", "options", "want"),
    [
        (1000, {}, [390, 295, 200, 105, 10]),
        (395, {}, [390, 295, 200, 105, 10]),
        (392, {}, [388, 294, 200, 106, 12]),  # the first keeps all but the window
        (300, {}, [296, 248, 200, 152, 104]),
        (202, {}, [200] * 5),  # the last would keep more
        (1000, {"window": 11}, [200] * 5),  # the last would keep less than the window
        (1000, {"window": 10}, [390, 295, 200, 105, 10]),
        (1000, {"tokens_kept": 1, "window": 0}, [2, 1, 1, 1, 1]),
        (1, {"tokens_kept": 1}, [1] * 5),
    ],
)
def test_a_pyramid_is_that_of_the_formula(seen, options, want):
    """By hand: from 2 m - m / beta down to m / beta, evenly, of a mean of m."""
    budget = build("budget", "pyramidkv", **{"tokens_kept": 200, "window": 4, **options}, beta=20.0)
    assert [budget.tokens(seen, i, 5) for i in range(5)] == want
    assert budget.tokens(seen, 0, 1) == budget.tokens_kept, "one layer has no slope"


# Options


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "option, value, says",
    [
        ("tokens_kept", 0, "tokens_kept is 0; give at least 1"),
        ("tokens_kept", -3, "tokens_kept is -3; give at least 1"),
        ("compression_ratio", 1.0, "compression_ratio is 1.0; give at least 0 and less than 1"),
        ("compression_ratio", -0.1, "compression_ratio is -0.1; give at least 0 and less than 1"),
        (
            "compression_ratio",
            float("nan"),
            "compression_ratio is nan; give at least 0 and less than 1",
        ),
        ("tokens_kept", 1.5, "is float, not int"),
        ("token_kept", 5, "did you mean 'tokens_kept'"),
    ],
)
def test_what_cannot_be_is_refused(name, option, value, says):
    with pytest.raises(RecipeError, match=says):
        AXES["budget"].build(name, **{option: value})


@pytest.mark.parametrize(
    "name, options",
    [
        ("ada-kv", {"safeguard": 1.1}),
        ("ada-kv", {"safeguard": float("nan")}),
        ("pyramidkv", {"beta": 0.5}),
        ("pyramidkv", {"beta": float("nan")}),
        ("pyramidkv", {"window": -1}),
    ],
)
def test_options_of_one_budget_are_checked(name, options):
    (option,) = options
    with pytest.raises(
        RecipeError, match=f"kv.budget.{name}: .*{option} (is )?{next(iter(options.values()))}"
    ):
        AXES["budget"].build(name, **options)
