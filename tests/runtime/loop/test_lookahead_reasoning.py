"""Steps of text over the toy: against a reference without sessions, judges, orders, ends, failures, bad input."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from accel.compiler.assemble import assemble
from accel.ir.errors import InputError, RecipeError
from accel.ir.recipe import Recipe
from accel.runtime.artifact.artifact import open_artifact
from accel.runtime.backends.onnx.backend import OrtBackend
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.judge import Judge
from accel.runtime.decode.logits_processors import Processed
from accel.runtime.decode.logprobs import TopLogprobs
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.loop import lookahead_reasoning
from accel.runtime.loop.lookahead_reasoning import LookaheadReasoning
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.sample.standard import Standard
from accel.runtime.session.session import Session
from accel.runtime.speculation.follow import Follower

from ...draft_case import plain, rows_of
from .test_pearl import context

PROMPTS = [[5, 17, 200, 3, 88], [9], list(range(40, 61))]
WARM = Standard(temperature=0.6, top_k=20)
JUDGES = {
    "no": lambda one, other: False,
    "yes": lambda one, other: True,
    "some": lambda one, other: len(one) % 2 == 0,
}


@pytest.fixture(scope="module")
def tokenizer(toy):
    return Tokenizer(toy.path / "tokenizer.json")


@pytest.fixture(autouse=True)
def by_size(monkeypatch):
    """Steps end by their size, but where a test says otherwise: the toy's text has no blank lines."""
    monkeypatch.setattr(lookahead_reasoning, "BLANK_LINE", "\0")


def told(toy, tokenizer, judge, every=5):
    found = context(toy, every)
    found.model.tokenizer = tokenizer
    return replace(found, judge=None if judge is None else Judge(judge))


def run(toy, tokenizer, rows, judge, steps=3, size=4, every=5):
    with toy.session(batch=len(rows)) as session:
        method = LookaheadReasoning(steps, size)
        list(method.tokens(session, rows, told(toy, tokenizer, judge, every)))
        assert session.batch == len(rows), "what was not taken is free again"
        assert session.lengths.tolist() == [row.seen.size - 1 for row in rows]
        return [row.tokens for row in rows], session.stats["calls"]


def reference(toy, tokenizer, prompt, judge, steps=3, size=4, every=5, limit=20):
    """The greedy text, one step after the other, each from the whole text before it."""

    def step(ids, draft):
        new = []
        while len(new) < size and len(ids) + len(new) < len(prompt) + limit:
            logits = toy.oracle(np.array([*ids, *new]))[-1]
            wrong = draft and (len(ids) + len(new) - 1) % every == 0
            new.append(int(np.roll(logits, 1).argmax() if wrong else logits.argmax()))
        return new

    ids = [*prompt, int(toy.oracle(np.array(prompt))[-1].argmax())]
    while len(ids) < len(prompt) + limit:
        for _ in range(steps):
            drafted, own = step(ids, True), step(ids, False)
            if drafted != own and not judge(*map(tokenizer.decode, (drafted, own))):
                ids += own
                break
            ids += drafted
        else:
            ids += step(ids, False)
    return ids[len(prompt) :]


def law_of_steps(toy, tokenizer):
    """Drafted steps stand up to the first that is refused; then the model's own comes."""
    found = {}
    for name, judge in JUDGES.items():
        got, _ = run(toy, tokenizer, rows_of(PROMPTS, limit=20), judge)
        assert got == [reference(toy, tokenizer, prompt, judge) for prompt in PROMPTS]
        found[name] = got
    assert found["no"] == plain(toy.session(batch=3), rows_of(PROMPTS, limit=20))
    assert found["no"] != found["some"] != found["yes"] != found["no"]


def test_steps_are_those_of_the_reference(toy, tokenizer):
    law_of_steps(toy, tokenizer)


def test_where_a_session_cannot_go_back_each_way_runs_its_steps(toy, tokenizer, monkeypatch):
    capabilities = Session.capabilities.fget
    monkeypatch.setattr(
        Session, "capabilities", property(lambda self: replace(capabilities(self), back=3))
    )

    def refused(self, length):
        asked = self.lengths if self.batch > 3 else length  # the draft's rows may
        assert (asked == length).all()
        rewind(self, length)

    rewind = Session.rewind
    monkeypatch.setattr(Session, "rewind", refused)
    monkeypatch.setattr(Follower, "most", lambda self, size, limit: limit)
    law_of_steps(toy, tokenizer)
    rows = rows_of(PROMPTS, limit=12, score=TopLogprobs(0))
    run(toy, tokenizer, rows, JUDGES["yes"])
    for row in rows:
        for n, told in enumerate(row.logprobs):
            logits = toy.oracle(np.concatenate([row.prompt, row.tokens[:n]]).astype(np.int64))[-1]
            due = logits[row.tokens[n]] - logits.max() - np.log(np.exp(logits - logits.max()).sum())
            assert abs(told[row.tokens[n]].logprob - due) < 2e-3


@pytest.mark.few(1)
@pytest.mark.parametrize("broken", ["blind", "own", "further"])
def test_other_steps_are_caught(toy, tokenizer, monkeypatch, broken):
    rounds = lookahead_reasoning._Rounds
    if broken == "blind":  # the judge is not asked
        monkeypatch.setattr(rounds, "_same", lambda self, drafted, own: True)
    elif broken == "own":  # the judge is asked about other steps
        same = rounds._same
        monkeypatch.setattr(rounds, "_same", lambda self, one, other: same(self, other, one))
    else:  # the model goes on behind the step that was refused
        choose = rounds._choose

        def further(self, group):
            choose(self, group)
            if group.chosen is not None and group.chosen < len(group.ways) - 1:
                group.chosen += not group.ways[group.chosen + 1].row.finish

        monkeypatch.setattr(rounds, "_choose", further)
    with pytest.raises(AssertionError):
        law_of_steps(toy, tokenizer)


def tree_reference(toy, tokenizer, prompt, judge, steps, size, width, every=5, limit=20):
    """As `reference`, of a tree: the first of the drafted steps at a place that may stand does. Each begins with a less
    likely token than the one before; one that is there already is left out.
    """

    def draft(ids, rank):
        new = []
        while len(new) < size and len(ids) + len(new) < len(prompt) + limit:
            logits = toy.oracle(np.array([*ids, *new]))[-1]
            wrong = (len(ids) + len(new) - 1) % every == 0
            order = np.argsort(-(np.roll(logits, 1) if wrong else logits), kind="stable")
            new.append(int(order[0 if new else rank]))
        return new

    def own(ids):
        new = []
        while len(new) < size and len(ids) + len(new) < len(prompt) + limit:
            new.append(int(toy.oracle(np.array([*ids, *new]))[-1].argmax()))
        return new

    ids = [*prompt, int(toy.oracle(np.array(prompt))[-1].argmax())]
    others = 0
    while len(ids) < len(prompt) + limit:
        for level in range(steps + 1):
            mine = own(ids)
            drafts = [draft(ids, rank) for rank in range(width)] if level < steps else []
            fit = [
                n
                for n, d in enumerate(drafts)
                if d == mine or judge(*map(tokenizer.decode, (d, mine)))
            ]
            ids += drafts[fit[0]] if fit else mine
            others += bool(fit and fit[0])
            if not fit or len(ids) == len(prompt) + limit:
                break
    return ids[len(prompt) :], others


def law_of_trees(toy, tokenizer):
    """Two drafted steps at each place: the first one that may stand does, wherever it is."""
    others = 0
    for name, judge in JUDGES.items():
        rows = rows_of(PROMPTS, limit=20)
        with toy.session(batch=len(rows)) as session:
            method = LookaheadReasoning(2, 4, 2)
            list(method.tokens(session, rows, told(toy, tokenizer, judge)))
            assert session.batch == len(rows)
            assert session.lengths.tolist() == [row.seen.size - 1 for row in rows]
        want = [tree_reference(toy, tokenizer, prompt, judge, 2, 4, 2) for prompt in PROMPTS]
        assert [row.tokens for row in rows] == [tokens for tokens, _ in want], name
        others += sum(n for _, n in want)
    assert others, "never the second of two"


def test_any_of_several_drafted_steps_may_stand(toy, tokenizer):
    law_of_trees(toy, tokenizer)
    rows = rows_of(PROMPTS, WARM, limit=20)
    with toy.session(batch=3) as session:
        context = told(toy, tokenizer, JUDGES["no"])
        list(LookaheadReasoning(2, 4, 2).tokens(session, rows, context))
    assert [row.tokens for row in rows] == plain(
        toy.session(batch=3), rows_of(PROMPTS, WARM, limit=20)
    )


@pytest.mark.parametrize("sampler", [Standard(), WARM])
def test_a_step_that_nothing_may_begin_or_go_on_is_left_out(toy, tokenizer, sampler):
    """Where one token alone may come, and where the draft model goes and the text does not."""
    want = plain(toy.session(batch=3), rows_of(PROMPTS, sampler, limit=20))
    texts = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, want, strict=True)]

    def held(ids, logits):
        after = [text[ids.size] for text in texts if text[: ids.size] == ids.tolist()]
        only = np.full_like(logits, -np.inf)
        if ids.size % 5:
            return logits if after else only
        only[after] = logits[after]
        return only

    rows = rows_of(PROMPTS, sampler, limit=20)
    for row in rows:
        row.sampler = Processed(sampler, toy.vocab, processors=[held])
    with toy.session(batch=3) as session:
        method = LookaheadReasoning(2, 4, 2)
        list(method.tokens(session, rows, told(toy, tokenizer, JUDGES["no"])))
    assert [row.tokens for row in rows] == want
    assert sum(row.drafting["accepted"] for row in rows) > 8


def test_a_row_that_fails_fails_alone(toy, tokenizer):
    want = plain(toy.session(batch=3), rows_of(PROMPTS, limit=20))
    rows = rows_of(PROMPTS, limit=20)
    bad = [lambda ids, logits: logits if ids.size < 20 else 1 / 0]
    rows[1].sampler = Processed(Standard(), toy.vocab, processors=bad)
    with toy.session(batch=3) as session:
        loop = LookaheadReasoning(2, 4)
        rounds = loop.rounds(session, rows, told(toy, tokenizer, JUDGES["no"]))
        list(rounds.start())
        while rounds.live:
            rounds.run()
        rounds.close()
    assert "ZeroDivisionError" in str(rows[1].error) and rows[1].finish == "failed"
    assert rows[1].tokens == want[1][:19]
    assert [rows[0].tokens, rows[2].tokens] == [want[0], want[2]]


@pytest.mark.few(1)
@pytest.mark.parametrize("broken", ["first", "sibling"])
def test_other_steps_of_a_tree_are_caught(toy, tokenizer, monkeypatch, broken):
    draft = lookahead_reasoning._Draft
    children = draft.children
    if broken == "first":  # only the first of several is judged
        monkeypatch.setattr(draft, "children", lambda self, step: children(self, step)[:1])
    else:  # what follows a step is taken for what follows the one beside it
        path = draft.path

        def beside(self, step):
            return path(self, children(self, 0)[0] if self.parents[step] == 0 else step)

        monkeypatch.setattr(draft, "path", beside)
    with pytest.raises((AssertionError, InputError, IndexError)):
        law_of_trees(toy, tokenizer)


def law_of_samples(toy, tokenizer):
    """For each seed: steps that stand, because they have the same tokens, change nothing."""
    stood = 0
    for seed in range(2):
        want = plain(toy.session(batch=3), rows_of(PROMPTS, WARM, seed, limit=30))
        rows = rows_of(PROMPTS, WARM, seed, limit=30)
        assert run(toy, tokenizer, rows, JUDGES["no"], size=2)[0] == want
        stood += sum(row.drafting["accepted"] for row in rows)
    assert stood, "no step of the same tokens ever came"


def test_a_judge_that_says_no_gives_the_targets_text_alone(toy, tokenizer):
    law_of_samples(toy, tokenizer)


def test_random_numbers_that_do_not_go_by_place_are_caught(toy, tokenizer, monkeypatch):
    copied = lookahead_reasoning.deepcopy

    class Same:
        def __init__(self, rng):
            self.rng = copied(rng)

        def random(self, size=None):
            return self.rng.random() if size is None else None  # skips none

        def __deepcopy__(self, memo):
            return Same(self.rng)

    monkeypatch.setattr(lookahead_reasoning, "deepcopy", lambda rng: Same(rng))
    with pytest.raises(AssertionError):
        law_of_samples(toy, tokenizer)


def law_of_orders(toy, tokenizer, sampler):
    """Whichever ways a call goes on with, the tokens are the same, and the judge is asked the same."""
    due, found = lookahead_reasoning._Rounds._due, []
    for seed in (None, 0, 1):
        draw, asked = np.random.default_rng(seed), []

        def some(self, groups, seed=seed, draw=draw):
            every = due(self, groups)
            picked = [one for one in every if seed is None or draw.random() < 0.4]
            return picked or every[-1:]

        def judge(one, other, asked=asked):
            asked.append((one, other))
            return JUDGES["some"](one, other)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(lookahead_reasoning._Rounds, "_due", some)
            rows = rows_of(PROMPTS, sampler, limit=30)
            tokens, calls = run(toy, tokenizer, rows, judge)
        found.append((tokens, sorted(asked), calls))
    assert len({str(each[:2]) for each in found}) == 1
    assert found[0][2] < found[1][2], "the order did not change"


@pytest.mark.few(1)
@pytest.mark.parametrize("sampler", [Standard(), WARM])
def test_any_order_of_completion_gives_the_same(toy, tokenizer, sampler):
    law_of_orders(toy, tokenizer, sampler)


def test_what_is_judged_as_it_is_completed_is_caught(toy, tokenizer, monkeypatch):
    def first(self, group):
        for k, way in enumerate(group.ways):
            if group.chosen is None and way.whole:
                last = k == len(group.draft) - 1
                if last or not self._same(group.draft.tokens[k + 1], way.tokens):
                    group.chosen = k

    monkeypatch.setattr(lookahead_reasoning._Rounds, "_choose", first)
    with pytest.raises(AssertionError):
        law_of_orders(toy, tokenizer, Standard())


def test_each_row_gets_what_it_gets_alone(toy, tokenizer):
    together, calls = run(toy, tokenizer, rows_of(PROMPTS, WARM), JUDGES["some"])
    for prompt, want in zip(PROMPTS, together, strict=True):
        assert run(toy, tokenizer, rows_of([prompt], WARM), JUDGES["some"])[0] == [want]
    rows = rows_of(PROMPTS, WARM, limit=60)
    _, calls = run(toy, tokenizer, rows, JUDGES["yes"], steps=4, size=5)
    assert calls < 30, "five tokens of each of five steps come in five calls"


def test_a_step_is_text_up_to_a_blank_line(toy, tokenizer, monkeypatch):
    """Here, up to an e: blanks before text, or a size, end others."""
    monkeypatch.setattr(lookahead_reasoning, "BLANK_LINE", "e")
    asked = []

    def judge(one, other):
        asked.extend((one, other))
        return True

    run(toy, tokenizer, rows_of(PROMPTS, WARM, limit=80), judge, size=30, every=2)
    ends = [text for text in asked if "e" in text]
    assert len(ends) > 5 and all(
        "e" not in tokenizer.decode(tokenizer.encode(text)[:-1]) for text in ends
    )
    step = lookahead_reasoning._Step(rows_of([[1]])[0], tokenizer, 30)
    monkeypatch.setattr(lookahead_reasoning, "BLANK_LINE", "\n\n")
    wholes = []
    for token in tokenizer.encode("\n\n\nab\n\n", special=False):
        step.accept(token, None)
        wholes.append(step.whole)
    assert wholes[-1] and not any(wholes[:-1])


@pytest.mark.few(2)
@pytest.mark.parametrize("ends", [{"limit": 1}, {"limit": 3}, {"max_context": 24}, {"eos": 6}])
def test_rows_end_where_they_would(toy, tokenizer, ends):
    if "eos" in ends:
        ends = {"eos": [plain(toy.session(batch=3), rows_of(PROMPTS))[0][ends["eos"]]]}
    for name in ("no", "yes"):
        want, got = rows_of(PROMPTS, **ends), rows_of(PROMPTS, **ends)
        plain(toy.session(batch=3), want)
        run(toy, tokenizer, got, JUDGES[name], every=1000 if name == "yes" else 5)
        assert [(r.tokens, r.finish) for r in got] == [(r.tokens, r.finish) for r in want]


@pytest.mark.few(1)
@pytest.mark.parametrize("ask", [1, 8])
def test_after_a_judge_that_raises_the_session_goes_on(toy, tokenizer, ask):
    asked = itertools.count(1)

    def judge(one, other):
        return next(asked) < ask or 1 / 0

    with toy.session(batch=3) as session:
        rows = rows_of(PROMPTS, limit=80)
        with pytest.raises(InputError, match="judge .* raised ZeroDivisionError"):
            list(LookaheadReasoning(3, 4).tokens(session, rows, told(toy, tokenizer, judge)))
        assert session.batch == 3 and not any(row.finish for row in rows)
        assert session.lengths.tolist() == [row.seen.size - 1 for row in rows]
        assert ask == 1 or any(len(row.tokens) > 1 for row in rows)
        logits = session.run([[row.tokens[-1]] for row in rows])
        for row, each in zip(rows, logits, strict=True):
            np.testing.assert_allclose(each[0], toy.oracle(row.seen)[-1], atol=2e-3)


def test_generate_takes_a_judge_and_its_own_rule_without(toy):
    """The rule: blanks and case do not matter. Log-probabilities are the model's, of drafted tokens, too."""
    artifact = open_artifact(toy.path)
    tables = {"loop": {"use": "lookahead-reasoning", "step_tokens": 3}, "draft": {"use": "model"}}

    def made(**more):
        return CompiledModel(
            OrtBackend(artifact), artifact.facts, artifact=artifact,
            tokenizer=Tokenizer(toy.path / "tokenizer.json"), **more,
        )  # fmt: skip

    with made(recipe={"tables": tables}, draft_model=made()) as model, made() as plainly:
        want = plainly.generate(PROMPTS, 20, eos=[], logprobs=0)
        for options in ({}, {"judge": JUDGES["no"]}):
            got = model.generate(PROMPTS, 20, eos=[], logprobs=0, **options)
            assert got.tokens == want.tokens and got.stats["speculation"]["accepted"] > 20
            for one, other in zip(got.logprobs, want.logprobs, strict=True):
                for mine, theirs in zip(one, other, strict=True):
                    assert all(abs(mine[t].logprob - theirs[t].logprob) < 2e-3 for t in theirs)
        assert list(model.stream("for i in", 9, eos=[], judge=JUDGES["yes"]))
    rounds = object.__new__(lookahead_reasoning._Rounds)
    rounds._judge, rounds._tokenizer = None, Tokenizer(toy.path / "tokenizer.json")
    ids = [rounds._tokenizer.encode(text) for text in ("a Quick fox", "a quick\n fox", "a fox")]
    assert rounds._same(ids[0], ids[1]) and not rounds._same(ids[0], ids[2])


def test_bad_input(toy, tokenizer):
    assert assemble(Recipe.load("lookahead-reasoning")).grade == "approximate"
    for options, why in (
        ((0,), "steps is 0; give 1 to 32"),
        ((1, 0), "step_tokens is 0"),
        ((1, 9, 0), "width is 0"),
        ((4, 9, 3), "width = 3 and steps = 4 are 120 steps of a round"),
    ):
        with pytest.raises(RecipeError, match=f"loop.lookahead-reasoning: {why}"):
            LookaheadReasoning(*options)
    with pytest.raises(RecipeError, match="loop = lookahead-reasoning needs .draft."):
        assemble(Recipe(tables={"loop": {"use": "lookahead-reasoning"}}))
    with pytest.raises(InputError, match="steps are text, but this model has no tokenizer"):
        LookaheadReasoning().check(None)
    with toy.session() as session, pytest.raises(InputError, match="built without its draft model"):
        next(LookaheadReasoning().tokens(session, rows_of(PROMPTS[:1]), DecodeContext()))
