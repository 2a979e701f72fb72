"""threshold-evict: the rule, incremental and at once, what its part learns, training, targets, bad input."""

import matrix
import numpy as np
import pytest
import torch
from reference_data import REFERENCE

import accel
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.runs.aimed import AimedRun
from accel.compiler.train.runs.soft import Soft
from accel.ir.errors import PassError, RecipeError
from accel.ir.ops.attention import Form
from accel.passes.kv.score.threshold_evict import ThresholdEvict
from accel.passes.trained import Lesson, sample, write
from accel.runtime.kv.budget.threshold import Threshold

from ....kv_case import evicting, kept, recipe, state
from ....kv_slots import choose, real, sets, slots
from ....session_ways import close, singles

OPTIONS = TrainOptions(rate=1e-2, minutes=1.0, budget=4, pressure=1.0, inner=8, seed=0, length=24)
LAST = 4  # newest tokens that stay
ALL = -3e38  # a threshold that every score reaches, one that is no number, too


# The rule


def law_threshold(budget, score, seed=0):
    """The real tokens with a score of `threshold` or more, and the newest, stay, and no others."""
    x = slots(seed)
    found = sets(choose(x, 1, score, budget, most=1 << 40))
    notes = torch.cat((x["kept_notes"], x["kept_notes.recent"]), 2)
    where = torch.cat((x["kept_pos"], x["recent_pos"][:, None].expand(-1, 2, -1)), 2)
    unequal = set()
    for row, head in np.ndindex(*where.shape[:2]):
        seen = int(x["seen"][row])
        want = {
            int(p) for p, note in zip(where[row, head], notes[row, head], strict=True)
            if 0 <= p < seen and (note >= budget.threshold or p >= seen - score.recent)
        }  # fmt: skip
        assert found[row][head] == want
        unequal.add(len(want))
    assert len(unequal) > 2, "how many stay is an outcome"


@pytest.mark.parametrize("seed", range(3))
def test_what_scores_high_enough_stays(seed):
    law_threshold(Threshold(-0.6), ThresholdEvict(recent=LAST), seed)


def test_an_average_over_heads_is_caught():
    class Broken(Threshold):
        def heads(self, scores, positions):
            counts = super().heads(scores, positions)
            return counts.float().mean(1, keepdim=True).round().long().expand_as(counts)

    with pytest.raises(AssertionError):
        law_threshold(Broken(-0.6), ThresholdEvict(recent=LAST))


def test_a_larger_threshold_keeps_some_of_the_same():
    x, score, before = slots(1), ThresholdEvict(recent=LAST), None
    for threshold in (ALL, -2.0, -1.0, -0.3, 0.0, 1e30):
        found = sets(choose(x, 1, score, Threshold(threshold), most=1 << 40))
        if before is None:
            assert found == real(x), "everything"
        else:
            assert all(a <= b for a, b in zip(sum(found, []), sum(before, []), strict=True))
        before = found
    for row, seen in enumerate(x["seen"].tolist()):
        newest = set(range(max(0, seen - LAST), seen))
        assert all(head == newest for head in before[row])


def test_a_score_that_is_no_number_stays_where_everything_does():
    x = slots(0)
    x["kept_notes.recent"][0, 0, 2] = float("nan")
    place = int(x["recent_pos"][0, 2])
    for threshold, stays in ((-1.0, False), (ALL, True)):
        found = sets(choose(x, 1, ThresholdEvict(recent=LAST), Threshold(threshold), most=1 << 40))
        assert (place in found[0][0]) is stays


# Sessions


@pytest.fixture
def part(stateful, tmp_path):
    """The file of a random module for conftest's llama."""
    program, file = stateful("llama"), tmp_path / "part.safetensors"
    soft = Soft(program, ThresholdEvict())
    parts, r = soft.start(8, 0), torch.Generator().manual_seed(1)
    for one in parts.values():
        one["w2"].copy_(torch.randn(one["w2"].shape, generator=r))
        one["b2"].zero_()
    write(soft.method, file, parts, sample(program, soft.keys), {})
    return str(file)


def tables(file, threshold=0.0, when=None, recent=LAST):
    return {
        "kv.score": {"use": "threshold-evict", "trained": file, "recent": recent},
        "kv.budget": {"use": "threshold", "threshold": threshold},
        "kv.when": when or {"use": "generated", "tokens": 1},
    }


def below(session, layer):
    """Positions [B,G,S] of the tokens whose note is below 0, as a session that keeps all has noted them."""
    notes = state(session)[f"note.{layer}.recent"]
    return notes < 0


@pytest.mark.long
def test_a_session_evicts_what_leaves_the_newest(stateful, part):
    """Token after token; the first layer's hidden states are those of a session that drops nothing."""
    case = evicting(stateful("llama"), tables(part))
    whole = evicting(stateful("llama"), tables(part, threshold=ALL)).session(2)
    tokens = case.tokens(2, 36)
    whole.run(tokens)
    low = below(whole, 0)
    with case.session(2) as session:
        session.prompt(tokens[:, :24], np.array([24, 17]))
        for i in range(24, 36):
            session.run(tokens[:, [i]])
            for row, seen in enumerate(session.lengths.tolist()):
                for head in range(2):
                    mine = {int(p) for p in kept(session)[0][row, head] if p >= 0}
                    assert set(range(seen - LAST, seen)) <= mine
                    if row == 0:
                        want = {p for p in range(seen) if p >= seen - LAST or not low[0, head, p]}
                        assert mine == want
        sizes = {len({int(p) for p in h if p >= 0}) for h in kept(session)[0].reshape(4, -1)}
    assert len(sizes) > 1, "heads keep unequal numbers"


def test_incremental_is_at_once(stateful, part):
    """However often it evicts, the first layer keeps the same."""
    found = []
    for when in (
        {"use": "generated", "tokens": 1},
        {"use": "generated", "tokens": 5},
        {"use": "every", "tokens": 7},
    ):
        case = evicting(stateful("llama"), tables(part, when=when))
        tokens = case.tokens(1, 31)
        with case.session(1) as session:
            session.prompt(tokens[:, :21])
            singles(session, tokens[:, 21:31])
            session.end_prompt()
            where = kept(session)[0][0]
            lasting = [{int(p) for p in h if 0 <= p < 20} for h in where]
            found.append(lasting)
    assert found[0] == found[1] == found[2]
    assert any(len(h) < 20 for h in found[0])


@pytest.mark.long
def test_without_a_threshold_nothing_is_lost(stateful, part):
    tokens = np.random.default_rng(0).integers(3, 60, (1, 30))
    whole = evicting(stateful("llama"), recipe("knorm", 1 << 20)).session(1)
    mine = evicting(stateful("llama"), tables(part, threshold=ALL)).session(1)
    for session in (whole, mine):
        session.prompt(tokens[:, :20])
    close(singles(mine, tokens[:, 20:]), singles(whole, tokens[:, 20:]))
    few = evicting(stateful("llama"), tables(part, threshold=1e30)).session(1)
    few.prompt(tokens[:, :20])
    with pytest.raises(AssertionError):
        close(singles(few, tokens[:, 20:]), singles(whole, tokens[:, 20:]))


def test_a_prompt_of_one_token_and_an_empty_row(stateful, part):
    case = evicting(stateful("llama"), tables(part, threshold=1e30))
    tokens = case.tokens(2, 9)
    with case.session(2) as session:
        session.prompt(tokens[:, :1], np.array([1, 0]))
        assert np.isfinite(singles(session, tokens[:, 1:])).all()
        assert session.lengths.tolist() == [9, 8]


# What it learns


def lesson(seed=0, batch=2, heads=4, groups=2, tokens=7, width=6, wide=9):
    r = torch.Generator().manual_seed(seed)
    return Lesson(
        torch.randn(batch, 2 * tokens, wide, generator=r),
        torch.randn(batch, heads, 2 * tokens, width, generator=r),
        *(torch.randn(batch, groups, 2 * tokens, width, generator=r) for _ in range(2)),
        torch.randn(heads, width, wide, generator=r),
        Form("causal", scale=0.4),
    )


def law_aim(method):
    """KVzip+ by number: max over the repeat's queries and the group's heads of attention · norm of W v / norm of h."""
    x = lesson()
    found = method.aim(x)
    tokens = x.keys.shape[2] // 2
    for row, head, j in np.ndindex(2, 2, tokens):
        best = 0.0
        for h in (2 * head, 2 * head + 1):
            moved = float((x.values[row, head, j] @ x.output[h]).norm())
            for i in range(tokens, 2 * tokens):
                logits = x.keys[row, head, : i + 1] @ x.queries[row, h, i] * x.form.scale
                drawn = float(logits.softmax(0)[j]) / float(x.hidden[row, i].norm())
                best = max(best, drawn * moved)
        assert abs(float(found[row, j, head]) - np.log(best)) < 1e-4


def test_the_aim_is_the_log_of_kvzip_plus():
    law_aim(ThresholdEvict())


def test_an_aim_without_norms_is_caught():
    class Broken(ThresholdEvict):
        def aim(self, lesson):
            return super().aim(Lesson(lesson.hidden.sign(), *list(vars(lesson).values())[1:]))

    with pytest.raises(AssertionError):
        law_aim(Broken())


def test_training_comes_nearer_to_the_aim(stateful, tmp_path):
    soft = Soft(stateful("llama"), ThresholdEvict())
    run = AimedRun(soft, soft.start(8, 0), OPTIONS, tmp_path / "run")
    ids = torch.randint(3, 60, (2, 25), generator=torch.Generator().manual_seed(0))
    before = [t.detach().clone() for t in run.tensors]
    found = [run.learn(ids, torch.ones(2, 24)) for _ in range(25)]
    assert found[-1]["loss"] < 0.5 * found[0]["loss"]
    assert found[-1]["explained"] > found[0]["explained"]
    assert all((a != b).any() for a, b in zip(run.tensors, before, strict=True))


def test_a_lesson_is_what_the_model_computes(stateful):
    """The attention of a lesson gives what the step's attention does."""
    soft = Soft(stateful("llama"), ThresholdEvict())
    tokens = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    found = soft.lessons(tokens)
    assert set(found) == {0, 1}
    one = found[1]
    assert one.queries.shape[2] == one.keys.shape[2] == one.values.shape[2] == 18
    assert one.output.shape == (one.queries.shape[1], one.keys.shape[3], one.hidden.shape[2])
    torch.testing.assert_close(found[0].hidden[:, :9], found[0].hidden[:, 9:])
    assert not torch.allclose(one.hidden[:, :9], one.hidden[:, 9:])


# Builds


@pytest.mark.long
def test_onnx_equals_the_oracle():
    case = matrix.Case("llama", (("kv.budget", "threshold"), ("kv.score", "threshold-evict")))
    outcome = matrix.Matrix().run(case)
    assert outcome.kind == "equal", outcome.why


@pytest.mark.long
def test_what_comes_with_accel_is_for_the_bundled_model():
    with accel.optimize(REFERENCE, "threshold-evict", target="eager") as model:
        with model.session(1) as session:
            session.run(np.arange(3, 203)[None])
            notes = state(session)["note.3.recent"][0, :, :200]
        assert -14 < notes.mean() < 0 and notes.std() > 0.2, "logarithms, and tokens differ"
        assert len(model.generate(["def"], max_new_tokens=4).tokens[0]) == 4


def test_another_model_is_refused(stateful):
    with pytest.raises(
        PassError, match="threshold-evict: .*train it: accel-compile train threshold-evict"
    ):
        evicting(stateful("llama"), tables(""))


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        (ThresholdEvict, {"recent": -1}, "recent is -1; give at least 0"),
        (
            Threshold,
            {"threshold": float("nan")},
            r"kv.budget.threshold: threshold is nan; give at most 1e\+30",
        ),
        (
            Threshold,
            {"threshold": float("inf")},
            r"kv.budget.threshold: threshold is inf; give at most 1e\+30",
        ),
    ],
    ids=str,
)
def test_options_that_make_no_sense(kind, options, why):
    with pytest.raises(RecipeError, match=why):
        kind(**options)
