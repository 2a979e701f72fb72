"""What every length holds to: a number of 0 or more that its row alone decides, and none only for a while."""

import sys
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import pytest
import torch
from transformers.generation import candidate_generator
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from accel.ir.axis import Axis
from accel.ir.errors import RecipeError
from accel.ir.parts import bundled
from accel.runtime.draft.model import Model
from accel.runtime.length import Base, Pace, Paces
from accel.runtime.length._head import Head
from accel.runtime.length._of_rounds import OfRounds
from accel.runtime.length.cost_optimal import CostOptimal
from accel.runtime.length.hf_assist import HfAssist
from accel.runtime.sample import Distribution
from accel.runtime.speculation.odds import PRIOR, WEIGHT
from accel.runtime.speculation.round_cost import unmeasured_cost
from accel.runtime.tree import Level
from accel.runtime.tree.dyspec import Dyspec
from accel.runtime.verify import Target

from ..draft_case import rows_of
from ..grow_case import AXIS as SHAPES
from ..length_case import by_the_first, one
from ..open_case import PROMPT, Opened
from ..verify_case import AXIS as RULES
from ..verify_case import World, alone, distance, generated, sampled

AXIS = Axis("length", "accel.runtime.length")
VOCABULARY, REACH = 6, 31


def price(each, draft=0.0):
    """Of a round whose call costs `each` more for every token, and the drafter `draft`."""
    return lambda drafted: 1 + (each + draft) * drafted


class Alone:
    """What a length says of a row alone, which samples."""

    def __init__(self, method, cost):
        self.paces = method.open(rows_of([[0]], sampled()), cost)

    def limit(self):
        return self.paces.limits([0])[0]

    def draws(self, logits):
        return 0 in self.paces.draws({0: [logits]})

    def more(self, level, logits):
        return self.paces.more(0, level, logits)

    def keeps(self, drafted):
        return self.paces.keeps({0: drafted})[0]

    def observe(self, drafted, accepted):
        self.paces.observe(0, drafted, accepted)


def drive(pace, rng, rounds, chance, most=REACH):
    """Rounds of a drafter that gives up to `most` tokens, which stand with a chance; the limits."""
    limits = []
    for _ in range(rounds):
        limits.append(limit := pace.limit())
        drafted = 0
        for _ in range(min(limit, most)):
            logits = rng.standard_normal(VOCABULARY).astype(np.float32)
            before = logits.copy()
            if not pace.draws(logits):
                break
            drafted += 1
            if not pace.more(one(int(rng.integers(VOCABULARY)), drafted - 1), [logits]):
                break
            assert np.array_equal(before, logits), "it changed what it saw"
        if drafted := pace.keeps(drafted):
            stood = min(drafted, int(rng.geometric(1 - chance)) - 1)
            pace.observe(drafted, stood)
    return limits


def law(method):
    """Rows that take turns get what each gets alone; a limit is never negative; none is not for ever."""
    for chance in (0.05, 0.97):
        for cost in (unmeasured_cost, price(0.1), price(0.5, 0.5)):
            alone = [
                drive(Alone(method, cost), np.random.default_rng(i), 20, chance) for i in (0, 1)
            ]
            paces = [(Alone(method, cost), np.random.default_rng(i), []) for i in (0, 1)]
            for _ in range(20):
                for pace, rng, limits in paces:
                    limits += drive(pace, rng, 1, chance)
            assert [limits for *_, limits in paces] == alone, "rows share something"
            assert min(map(min, alone)) >= 0
    for chance, cost in ((0.05, price(0.5, 0.5)), (0.5, price(3.0))):
        pace = Alone(method, cost)
        drive(pace, np.random.default_rng(2), 300, chance, 2)
        assert any(drive(pace, np.random.default_rng(3), 300, chance, 2)), "it never tries again"


@pytest.mark.parametrize("name", AXIS.names())
def test_every_length(name):
    law(AXIS.build(name))


@dataclass(frozen=True)
class Says(Base):
    """Paces of a class, for broken ones; `one`: rows share it."""

    kind: type
    one: bool = False

    def begin(self, cost):
        if not self.one:
            return self.kind()
        if self not in SHARED:
            SHARED[self] = self.kind()
        return SHARED[self]


SHARED = {}


class Negative(Pace):
    def limit(self):
        return -1


class GivesUp(Pace):
    left = 5

    def limit(self):
        return max(self.left, 0)

    def observe(self, drafted, accepted):
        self.left -= accepted < drafted


class Writes(Pace):
    def limit(self):
        return 3

    def more(self, level, logits):
        logits[0][level.tokens] = 0
        return True


@pytest.mark.parametrize(
    "broken", [Says(Negative), Says(GivesUp), Says(Writes), Says(GivesUp, one=True)]
)
def test_a_broken_one_is_caught(broken):
    with pytest.raises(AssertionError):
        law(broken)


STOPS = {
    "hf-assist": {"threshold": 0.5},
    "specdec-pp": {"least": 1},
    **{n: {"threshold": 0.5} for n in AXIS.names() if issubclass(AXIS.method(n), OfRounds)},
}


@pytest.fixture(autouse=True)
def heads_for_tables(request, monkeypatch):
    """Heads that learnt from rounds of a model are sure of tables of three tokens: there, others."""
    if "law" in request.node.name:
        monkeypatch.setattr(OfRounds, "part", property(by_the_first))


def stopping_gap(method, rule, draft, drops=False):
    """How far tokens are from the target's own where the length may end each draft; `drops`: a token at which it does
    is left out. And the lengths that came.
    """
    world, lengths = World(sampled(), draft), set()
    rule = Axis("verify", "accel.runtime.verify").build(rule)

    def step(seen, chance):
        pace, tokens, more = Alone(method, unmeasured_cost), (), True
        most = min(3, pace.limit())
        while more and len(tokens) < most:
            q = world.q((*seen, *tokens))
            with np.errstate(divide="ignore"):
                if not pace.draws(np.log(q)):
                    break
            token = chance.draw(Distribution(np.arange(world.size), q))
            with np.errstate(divide="ignore"):
                more = pace.more(one(token, len(tokens)), [np.log(q)])
            if more or not drops:
                tokens += (token,)
        tokens = tokens[: pace.keeps(len(tokens))]
        lengths.add(len(tokens))
        tree, logits = world.tree(tuple(range(-1, len(tokens) - 1)), tokens, seen)
        verdict = rule(Target(tree, logits, np.array(seen, np.int64), world.sampler), chance)
        return (*(tokens[node] for node in verdict.path), verdict.token)

    return distance(generated(step, 3), alone(world, 3)), lengths


@pytest.mark.few(3)
@pytest.mark.parametrize("rule", ["spec-chain", "block-verify"])
@pytest.mark.parametrize("name", AXIS.names())
def test_what_is_sampled_keeps_its_law_wherever_drafts_end(name, rule):
    seen = set()
    for draft in ("other", "holes", "sure"):
        gap, lengths = stopping_gap(AXIS.build(name, **STOPS.get(name, {})), rule, draft)
        assert gap < 1e-12
        seen |= lengths
    assert len(seen) > 1 or name not in STOPS


@pytest.mark.parametrize("rule", ["spec-chain", "block-verify"])
def test_a_token_that_is_left_out_is_missed(rule):
    assert stopping_gap(HfAssist(threshold=0.5), rule, "other", drops=True)[0] > 0.01


# Whole generations of a draft model, whose levels end where a length says


def opened(method, shape, rule, draft="other", batch=1, seed=0):
    """Of chains or trees of up to three nodes over two tokens; of rows that are compared, of up to two."""
    world, most = World(sampled(), draft, seed, size=2), 3 if batch == 1 else 2
    return Opened(
        Model(), shape, rule, world, limit=most, length=method, beyond=most - 1, batch=batch
    )


def compares(name):
    """Whether a length decides for all rows at once."""
    return AXIS.method(name).open is not Base.open


def ends_drafts(name):
    """Whether a length asks of a row for fewer tokens than it said before the draft."""
    method = AXIS.build(name)
    if isinstance(method, Head):
        return True
    return not compares(name) and type(method.begin(unmeasured_cost)).more is not Pace.more


@pytest.mark.long
@pytest.mark.parametrize("name", filter(ends_drafts, AXIS.names()))
def test_samples_keep_their_law_wherever_levels_end(name):
    """By every shape and a rule that reads q."""
    method, ends = AXIS.build(name, **STOPS.get(name, {})), set()
    for shape in map(SHAPES.build, SHAPES.names()):
        rules = [RULES.build(n) for n in RULES.names()]
        fit = [r for r in rules if r.grade != "approximate" and not r.relies & shape.breaks]
        case = opened(method, shape, next(r for r in fit if r.reads_q))
        assert case.gap(2) < 1e-12, shape
        if not shape.branches:
            ends |= case.depths
    assert len(ends) > 1, "all chains are whole"


class Unsure(World):
    """A drafter that is sure of a second token behind the less likely first one alone."""

    def _q(self, seen):
        said = {(): (0.8, 0.2), (1,): (0.9, 0.1)}
        return np.array(said.get(seen[len(PROMPT) :], (0.5, 0.5)), np.float32)


def law_of_dropped():
    """A third level would drop the nodes behind that first token; whether it comes must not depend on them."""
    shape, length = Dyspec(threshold=0.0, depth=3), HfAssist(threshold=0.7)
    world, rule = Unsure(sampled(), size=2), RULES.build("rrs-wor")
    case = Opened(Model(), shape, rule, world, limit=5, length=length, beyond=4)
    assert case.gap(2) < 1e-12


@pytest.mark.long
def test_samples_keep_their_law_where_a_tree_drops_nodes(monkeypatch):
    law_of_dropped()
    monkeypatch.setattr(Dyspec, "drops", False)
    with pytest.raises(AssertionError):
        law_of_dropped()


def law_of_rows(method):
    """Of two rows that are compared the tokens of both together, over tables by which one row's second token may be
    likelier than the other's first.
    """
    case = opened(method, SHAPES.build("chain"), RULES.build("spec-chain"), "same", 2, seed=6)
    assert case.gap(2) < 1e-12
    kind = type(method.open(rows_of([[0], [0]], sampled()), unmeasured_cost))
    by_row = kind.draws is not Paces.draws or kind.keeps is not Paces.keeps
    assert len(case.drafts) > 1 or not by_row, "all rounds are alike"


@pytest.mark.parametrize("name", filter(compares, AXIS.names()))
def test_samples_keep_their_law_where_rows_are_compared(name):
    law_of_rows(AXIS.build(name, **AXIS.small(name)))


@dataclass(frozen=True)
class Compares(Base, Paces):
    """Of two rows the one drafts first of whose next token its drafter is surer, and then the other.
    `unsure`: a last token that is unlikely is left out, after it was drawn.
    """

    unsure: bool

    def open(self, rows, cost):
        return self

    def limits(self, rows):
        ODDS.clear()
        return dict.fromkeys(rows, 2)

    def draws(self, said):
        sure = {i: float(lines[0].max()) for i, lines in said.items()}
        return [max(sure, key=sure.get)] if sure else []

    def more(self, row, level, logits):
        ODDS[row] = float(np.exp(logits[0][level.tokens[0]]) / np.exp(logits[0]).sum())
        return True

    def keeps(self, drafted):
        return {i: n - (self.unsure and ODDS[i] < 0.5) for i, n in drafted.items()}

    def observe(self, row, drafted, accepted):
        pass


ODDS = {}  # of each row's last token


def test_the_law_of_rows_catches_what_leaves_tokens_out():
    """Rows that wait draft in the end what they would have drafted at first."""
    shape, rule = SHAPES.build("chain"), RULES.build("spec-chain")
    for unsure in (False, True):
        case = opened(Compares(unsure), shape, rule, batch=2)
        gap = case.gap(1)
        assert (gap > 0.01) if unsure else (gap < 1e-12)
        assert unsure or (1, 1) in case.drafts, "a row that waits never drafts"


class Ahead:
    """A rule whose draws can be made before they are asked for."""

    def __init__(self, rule):
        self.rule, self.early = rule, []

    def drawing(self, sampler, chance):
        self.chance, self.early = chance, []
        return self.draw

    def draw(self, law):
        return self.early.pop() if self.early else self.chance.draw(law)

    def __call__(self, target, chance):
        return self.rule(target, chance)


@dataclass(frozen=True)
class Peeks(Base, Paces):
    """Ends the draft before a token by which token it is to be; `honest`: by how sure the drafter is."""

    ahead: Ahead
    honest: bool

    def open(self, rows, cost):
        return self

    def limits(self, rows):
        return dict.fromkeys(rows, 9)

    def draws(self, said):
        q = np.exp(said[0][0].astype(np.float64))
        token = (
            int(q.argmax())
            if self.honest
            else self.ahead.chance.draw(Distribution(np.arange(q.size), q))
        )
        on = q[token] > 0.6 * q.sum()
        if on and not self.honest:
            self.ahead.early.append(token)
        return said.keys() if on else ()

    def more(self, row, level, logits):
        return True

    def observe(self, row, drafted, accepted):
        pass


@pytest.mark.parametrize("shape", ["chain", "specinfer-tree"])
def test_a_length_that_knows_what_comes_is_caught(shape):
    """Before a level is drawn it may go by what the drafter says, and not by what is then drawn."""
    rule = RULES.build("specinfer-tree")
    shape = SHAPES.build(shape, **({} if shape == "chain" else {"widths": [1, 1, 1]}))
    for honest in (True, False):
        ahead = Ahead(rule)
        case = opened(Peeks(ahead, honest), shape, ahead)
        gap = case.gap(2)
        assert (gap < 1e-12) if honest else (gap > 0.01)
        assert len(case.depths) > 1


HEADS = [name for name in AXIS.names() if issubclass(AXIS.method(name), Head)]


@pytest.mark.parametrize("name", HEADS)
def test_a_head_computes_as_it_was_trained(name):
    """The file that comes along holds what it needs and is small; arrays and tensors give the same odds."""
    method = AXIS.build(name)
    head, rng = method.part, np.random.default_rng(0)
    assert {n: t.shape for n, t in head.items()} == method.sizes(head["first"].shape[1])
    assert bundled(name).stat().st_size < 50e3
    x = rng.standard_normal((7, head["first"].shape[0])).astype(np.float32) * 5
    tensors = {n: torch.from_numpy(t) for n, t in head.items()}
    odds = method.odds(head, x)
    assert odds.shape == (7,) and odds.std() > 0
    np.testing.assert_allclose(
        odds, method.odds(tensors, torch.from_numpy(x)), rtol=1e-4, atol=1e-4
    )
    assert np.isfinite(method.odds(head, x * 1e3)).all()


def brute(history, fade, cost, most):
    """Tokens of a round for their cost, by each length, from what every draft did, oldest first."""
    chances = []
    for place in range(most):
        weights = [fade**age for age in range(len(history))][::-1]
        tested = sum(w for w, (d, s) in zip(weights, history, strict=True) if min(d, s + 1) > place)
        stood = sum(w for w, (d, s) in zip(weights, history, strict=True) if s > place)
        lean = chances[-1] if chances else PRIOR
        chances.append((stood + WEIGHT * lean) / (tested + WEIGHT))
    return [
        (1 + sum(np.prod(chances[: j + 1]) for j in range(k))) / cost(k) for k in range(most + 1)
    ]


@pytest.mark.parametrize("fade", [1.0, 0.95])
def test_cost_optimal_is_the_best_of_all_lengths(fade):
    rng, chosen = np.random.default_rng(0), set()
    for case in range(60):
        cost, pace, history = price(*rng.uniform(0, 0.25, 2)), CostOptimal(most=12, fade=fade), []
        pace, chance = pace.begin(cost), rng.uniform(0.1, 0.98)
        for _ in range(case):
            limit = pace.limit()
            drafted = min(max(limit, 1), int(rng.integers(1, 13)))
            history.append((drafted, min(drafted, int(rng.geometric(1 - chance)) - 1)))
            pace.observe(*history[-1])
        values = brute(history, fade, cost, 12)
        chosen.add(best := int(np.argmax(values)))
        assert values[pace.limit() if best else 0] == pytest.approx(values[best], rel=1e-9)
    assert len(chosen) > 4, "costs and odds make no difference"


def test_cost_optimal_drafts_further_where_more_stands_and_tokens_cost_less():
    found = {}
    for chance in (0.3, 0.6, 0.9):
        for each in (0.02, 0.2):
            limits = drive(Alone(CostOptimal(), price(each)), np.random.default_rng(0), 400, chance)
            found[chance, each] = np.mean(limits)
    assert found[0.3, 0.02] < found[0.6, 0.02] < found[0.9, 0.02]
    assert all(found[chance, 0.2] < found[chance, 0.02] for chance in (0.3, 0.6, 0.9))


def test_cost_optimal_stops_where_no_draft_pays_and_goes_on_where_one_does_again():
    pace = Alone(CostOptimal(), price(0.2, 0.5))
    limits = drive(pace, np.random.default_rng(0), 400, 0.1)
    assert np.count_nonzero(limits) < 30 and max(limits[100:]) <= 1, (
        "a token at a time is tried, ever rarer"
    )
    assert np.mean(drive(pace, np.random.default_rng(1), 600, 0.97)[-50:]) > 2


def roc_curve(matches, chances):
    """sklearn's, by its definition: of each threshold, what share of either kind reaches it."""
    matches, chances = np.array(matches, bool), np.array(chances)
    thresholds = np.r_[np.inf, np.sort(np.unique(chances))[::-1]]
    wrong = np.array([(chances[~matches] >= t).mean() for t in thresholds])
    return wrong, np.array([(chances[matches] >= t).mean() for t in thresholds]), thresholds


@pytest.fixture
def theirs(monkeypatch):
    """theirs(method) -> transformers' generator at a generation's start, with nothing but what updates read."""
    monkeypatch.setattr(candidate_generator, "is_sklearn_available", lambda: True)
    metrics = ModuleType("sklearn.metrics")
    vars(metrics)["roc_curve"] = roc_curve
    monkeypatch.setattr(candidate_generator, "roc_curve", roc_curve, raising=False)
    for name, module in (("sklearn", ModuleType("sklearn")), (metrics.__name__, metrics)):
        monkeypatch.setitem(sys.modules, name, module)  # later versions import it where they use it

    def make(method):
        found = AssistedCandidateGenerator.__new__(AssistedCandidateGenerator)
        found.num_assistant_tokens, found.probs, found.matches = float(method.tokens), [], []
        found.assistant_generation_config = type(
            "Config",
            (),
            {
                "num_assistant_tokens_schedule": method.schedule,
                "assistant_confidence_threshold": method.threshold,
            },
        )()
        found.generation_config = found.assistant_generation_config
        return found

    return make


@pytest.mark.parametrize("schedule", ["constant", "heuristic"])
@pytest.mark.parametrize("tokens", [1, 5, 20])
def test_hf_assist_follows_transformers(theirs, schedule, tokens):
    """Tokens and threshold after each of many rounds, in which likelier tokens stand more often."""
    method, rng, moved = HfAssist(tokens, schedule), np.random.default_rng(tokens), set()
    pace, other = method.begin(unmeasured_cost), theirs(method)
    for _ in range(80):
        assert pace.limit() == int(other.num_assistant_tokens)
        drafted = accepted = 0
        for _ in range(pace.limit()):
            drafted += 1
            chance = float(rng.integers(1, 20) / 20)  # few values, so that some are equal
            logits = np.log([chance, 1 - chance]).astype(np.float32) + 3
            other.probs.append(float(1 / np.exp(logits - logits[0]).sum()))
            if accepted == drafted - 1 and rng.random() < chance:
                accepted += 1
            if not pace.more(one(0), [logits]):
                break
        pace.observe(drafted, accepted)
        other.update_candidate_strategy(None, np.zeros((1, drafted + 1, 2)), accepted)
        want = other.assistant_generation_config.assistant_confidence_threshold
        assert pace.threshold == pytest.approx(want, abs=1e-7)
        moved.add(round(pace.threshold, 3))
    assert len(moved) > 1, "the threshold never moved"


def test_hf_assist_counts_what_each_end_of_a_draft_costs(theirs, monkeypatch):
    """The control: with the costs the other way round thresholds are others."""
    monkeypatch.setattr("accel.runtime.length.hf_assist.MISSED", 1 / 3)
    with pytest.raises(AssertionError):
        test_hf_assist_follows_transformers(theirs, "constant", 5)


def test_hf_assist_stops_where_the_drafter_is_unsure():
    pace, (even, odd) = HfAssist(threshold=0.4).begin(unmeasured_cost), np.log([[5, 5], [7, 3]])
    assert pace.more(one(1), [even]) and not pace.more(one(1), [odd])
    assert not pace.more(one(1), [np.float32([1e30, 0])])
    assert HfAssist(threshold=0).begin(unmeasured_cost).more(one(1), [np.float32([9, 0])])
    both = Level(np.array([1, 0]), np.array([0, 0]))
    assert pace.more(both, [odd, odd]), "a level goes by its likeliest"


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("hf-assist", {"tokens": 0}, "tokens is 0; give 1 to 256"),
        ("hf-assist", {"schedule": "heuristics"}, "did you mean 'heuristic'"),
        ("hf-assist", {"threshold": 1.5}, "threshold is 1.5; give 0 to 1"),
        ("cost-optimal", {"most": 0}, "most is 0; give 1 to 256"),
        ("cost-optimal", {"fade": 0.0}, "fade is 0.0; give more than 0 and at most 1"),
    ],
)
def test_options_that_cannot_be(name, options, words):
    with pytest.raises(RecipeError, match=words):
        AXIS.build(name, **options)
