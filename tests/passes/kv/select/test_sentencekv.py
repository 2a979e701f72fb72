"""SentenceKV: its sentences and mean queries by number, where it reads everything, marks, builds, bad input."""

import models
import numpy as np
import pytest
import torch

import accel
from accel.ir.errors import InputError, PassError, RecipeError
from accel.ir.ops.attention import Form
from accel.passes.kv.score.snapkv import SnapKV
from accel.passes.kv.select import Select
from accel.passes.kv.select._units import marked
from accel.passes.kv.select.sentencekv import Sentencekv
from accel.runtime.session.state.units import UnitGroups

from ....kv_slots import SCALE, named, slots
from ....laws.test_kv_select import lists
from ....prefill_case import built as prefilled
from ....runtime.test_rows import growing
from ....select_case import Selecting, built
from ....session_ways import law_every_target, singles

B, T, H, G, C, D = 2, 14, 4, 2, 64, 6
ENDS = (4, 9)


def call(seed=0):
    """Queries [B,T,H,D], tokens that end a sentence [B,T], the memory of the token before, whether it is known."""
    r = torch.Generator().manual_seed(seed)
    ends = torch.rand(B, T, generator=r) < 0.25
    memory = {"sum": torch.randn(B, H, D, generator=r), "count": torch.tensor([3.0, 5.0])}
    return torch.randn(B, T, H, D, generator=r), ends, memory, torch.tensor([True, False])


def by_hand(queries, ends, memory, known):
    """Token after token: hold the query, and drop all where the token ends a sentence."""
    found = []
    for row in range(B):
        held = [memory["sum"][row]] if known[row] else []
        more = int(memory["count"][row]) - 1 if known[row] else 0
        for query, end in zip(queries[row], ends[row], strict=True):
            held, more = ([], 0) if end else ([*held, query], more)
            found.append((sum(held, torch.zeros(H, D)), len(held) + more))
    return found


def law_held(method):
    for seed in range(4):
        total, count = method.query_sums(*call(seed))
        want = by_hand(*call(seed))
        torch.testing.assert_close(total.flatten(0, 1), torch.stack([w for w, _ in want]))
        assert count.flatten().tolist() == [n for _, n in want]


def test_queries_are_held_up_to_the_end_of_their_sentence():
    law_held(built("sentencekv"))


def test_a_sentence_that_begins_with_the_last_one_s_end_is_caught():
    class Broken(Sentencekv):
        def query_sums(self, queries, ends, before, known):
            late = torch.nn.functional.pad(ends, (1, 0))[:, :-1]  # dropped by the next token
            return super().query_sums(queries, late, before, known)

    with pytest.raises(AssertionError):
        law_held(Broken(**Sentencekv.small))


def test_a_query_that_is_no_number_is_of_its_own_sentence_alone():
    queries, ends, memory, known = call()
    queries[0, 5] = float("nan")
    total, _ = built("sentencekv").query_sums(queries, ends, memory, known)
    assert total.isfinite().all()


def test_two_tokens_of_a_sentence_read_everything():
    """The one that ends the sentence before, and the first; and the first one after a prompt."""
    method = built("sentencekv")
    queries, ends, memory, known = call()
    ends[:] = False
    ends[:, 6] = True
    before = {"sum": memory["sum"], "count": memory["count"]}
    x = {"queries": queries, "ends": ends, "slots": torch.zeros(B).long()}
    _, _, new = method.search(x, before, known)
    assert new["whole"].tolist() == [
        [i in (6, 7) for i in range(T)],
        [i in (0, 6, 7) for i in range(T)],
    ]


def law_list(method, seed=0):
    """A token lists the tokens of the sentences in the order of mean query . mean key, by number."""
    r = torch.Generator().manual_seed(seed)
    queries, ends, memory, known = call(seed)
    at = torch.tensor([C - T, 50 - T])
    x = {
        "queries": queries, "ends": ends, "slots": at, "positions": at[:, None] + torch.arange(T),
        "k_pos": torch.arange(C).expand(B, -1), "origin": torch.tensor([20, 14]),
        "label": torch.randint(0, 9, (B, G, C), generator=r), "mean": torch.randn(B, G, 9, D, generator=r),
    }  # fmt: skip
    listed, new = method.choose(x, Form("causal"), memory, known)
    sums = by_hand(queries, ends, memory, known)
    few = 0
    for row, i in np.ndindex(B, T):
        total, count = sums[row * T + i]
        if new["whole"][row, i]:
            continue
        few += 1
        end = int(method.grouped(x["slots"][:, None] + i, x["origin"])[row])
        for head in range(G):
            mean = (total / count).view(G, H // G, D)[head].mean(0)
            worth = x["mean"][row, head] @ mean
            want = [
                s for u in worth.argsort(descending=True).tolist()
                for s in range(method.sinks, end) if x["label"][row, head, s] == u
            ]  # fmt: skip
            assert listed[row, head, i, -8:].tolist() == (want + [-1] * 8)[:8]
    assert few > T


@pytest.mark.parametrize("seed", range(2))
def test_sentences_are_listed_by_the_mean_query(seed):
    law_list(built("sentencekv"), seed)


def test_sentences_listed_by_the_last_query_are_caught():
    class Broken(Sentencekv):
        def search(self, x, before, known):
            _, at, new = super().search(x, before, known)
            return x["queries"], at, new

    with pytest.raises(AssertionError):
        law_list(Broken(**Sentencekv.small))


def test_more_marks_than_units_share_them_evenly():
    marks = torch.tensor([[0, 0, 1, 2, 2, 3, 4, 0], [0, 1, 1, 2, 0, 0, 0, 9]])
    real = torch.arange(8) < torch.tensor([7, 4])[:, None]
    units = torch.arange(4) < torch.tensor([2, 4])[:, None]
    found = marked(marks, real, units)
    assert found[0, :7].tolist() == [0, 0, 0, 0, 0, 1, 1] and found[1, :4].tolist() == [0, 1, 1, 2]
    assert (found[0, :7].diff() >= 0).all(), "numbers of sentences do not fall"


def numbers(*values):
    return np.array(values, np.int64)


def test_a_session_says_what_lies_together():
    """By the tokens that end a sentence, or as the caller says."""
    observer = UnitGroups(built("sentencekv", end_ids=list(ENDS)).plan, 2)
    tokens = np.array([[1, 1, 4, 2, 2, 9, 9, 3], [4, 1, 1, 1, 1, 1, 0, 0]])
    places = np.where(np.arange(8) < np.array([8, 6])[:, None], np.arange(8), -1)
    observer.begin(None, growing(numbers(0, 0), numbers(8, 6)))
    observer.after(tokens, places, {})
    told = observer._together(numbers(2, 0), numbers(6, 5))
    assert told.tolist() == [[0, 1, 1, 1, 2, 3], [0, 1, 1, 1, 1, 0]]
    observer.rewind(None, numbers(3, 2), numbers(8, 6))
    assert observer.mark([[7, 7, 8], [-1, 8, 8]], None, None)
    observer.begin(None, growing(numbers(3, 2), numbers(6, 5)))
    observer.after(np.full((2, 3), 1), np.array([[3, 4, 5], [2, 3, 4]]), {})
    told = observer._together(numbers(2, 0), numbers(4, 5))
    assert told.tolist() == [[0, 1, 1, 2, 0], [0, 1, 1, 2, 2]]
    assert not UnitGroups(built("clusterkv").plan, 2).mark([[0], [0]], None, None)
    runs = UnitGroups(built("sentencekv", end_ids=[]).plan, 1)
    assert runs._together(numbers(2), numbers(9)).tolist() == [[0] * 4 + [1] * 4 + [2]]


@pytest.fixture(scope="module")
def case(stateful):
    return Selecting(stateful("llama"), built("sentencekv"))


def read(case, session):
    """The slots that a token would read, of each layer [B,G,K]."""
    return [found[:, :, 0] for found in lists(case, session)]


def test_units_are_what_the_caller_marks(case):
    """A sentence of a prompt that is marked as a whole is read as one."""
    tokens = case.tokens(1, 52)
    units = np.repeat([[5, 0, 7, 2, 3]], 8, axis=1)
    with case.session() as session, case.session() as plain:
        session.mark(units)
        for one in (session, plain):
            one.prompt(tokens[:, :40])
        label = session._core.backend._state["units.0.label"][0, 0, 2:40].tolist()
        assert label == [0] * 6 + [1] * 8 + [2] * 8 + [3] * 8 + [4] * 8
        assert label != plain._core.backend._state["units.0.label"][0, 0, 2:40].tolist()
        with pytest.raises(InputError, match="2 tokens of row 0 are marked, but the call has 1"):
            session.mark([[1, 1]])
            session.run(tokens[:, 40:41])
        assert session.lengths.tolist() == [40]


def test_a_failed_call_takes_its_marks_back(case):
    tokens = case.tokens(1, 41)
    with case.session() as session:
        session.prompt(tokens[:, :30])
        (observer,) = (o for o in session._core.observers if isinstance(o, UnitGroups))
        observer.mark([[0] * 4], None, None)
        observer.begin(None, growing(numbers(30), numbers(34)))
        observer.undo(None, numbers(30))
        assert (observer._marks.units == -1).all()


def test_tokens_that_read_everything_give_what_the_model_does(case, stateful):
    """And the others do not, or this would say nothing."""
    whole = Selecting(stateful("llama"))
    tokens = case.tokens(1, 60)
    tokens[:, 44:] = 11  # all of them ends
    with case.session() as a, whole.session() as b:
        for one in (a, b):
            one.prompt(tokens[:, :44])
        np.testing.assert_allclose(
            singles(a, tokens[:, 44:]), singles(b, tokens[:, 44:]), atol=2e-4
        )
        tokens[:, 44:] = 12
        for one in (a, b):
            one.rewind(44)
        assert np.abs(singles(a, tokens[:, 44:]) - singles(b, tokens[:, 44:])).max() > 1e-2


def test_the_first_choice_of_the_paper_is_snapkv_s():
    """For one query head per KV head: the last queries' attention, its sum over them without their own columns, the
    largest of seven neighbours.
    """
    window, x = 4, named(slots(0, (0, 0, 0), (16, 9, 14)))
    score = SnapKV(window=window, kernel=7, pooling="max")
    queries = x["queries"][:, :: x["queries"].shape[1] // 2]
    found = score(queries, x["query_positions"], x["positions"], x["seen"], x["attends"])
    for row, head in np.ndindex(*found.shape[:2]):
        seen = int(x["seen"][row])
        where = (x["positions"][row, head] >= 0).nonzero()[:, 0]
        keys, logits = x["keys"][row, head, where], torch.full((window, seen), -torch.inf)
        for i, at in enumerate(x["query_positions"][row].tolist()):
            logits[i, : at + 1] = queries[row, head, i] @ keys[: at + 1].T * SCALE
        sums = logits.softmax(1).sum(0)[: seen - window]
        best = [float(sums[max(0, i - 3) : i + 4].max()) for i in range(seen - window)]
        mine = found[row, head, where][: seen - window] * window
        torch.testing.assert_close(mine, torch.tensor(best))


def law_dropped(prune):
    """Behind a prompt a session holds three times what tokens read; steps go on from there."""
    method = {"use": "sentencekv", **Sentencekv.small}
    most = 3 * Sentencekv.small["tokens_read"]
    whole, model = (prefilled("llama", tables={"kv.select": method}, **x) for x in ({}, prune))
    tokens = np.random.default_rng(0).integers(3, 90, (1, 50))
    with whole.session() as a, model.session() as b:
        a.prompt(tokens), b.prompt(tokens)
        assert a.length == 50 and b.length == most
        assert np.isfinite(singles(b, tokens[:, :12])).all() and b.length == most + 12


def test_a_prompt_is_dropped_to_three_times_what_is_read():
    """By a choice for all heads at once, which stands before it; the control: without it."""
    law_dropped({"use": "gemfilter", "tokens": 30, "layer": 1})
    with pytest.raises(AssertionError):
        law_dropped({})


@pytest.mark.long
def test_every_target_is_that_of_the_oracle():
    model = models.make("llama", 1)
    small = {**Sentencekv.small, "end_ids": list(range(3, 50, 7))}
    recipe = {"kv": {"select": {"use": "sentencekv", **small}}}
    with accel.optimize(model, recipe, max_context=128, max_batch=2) as made:
        law_every_target(
            made, units=np.repeat([[0, 1, 2, 3, 4], [0, 0, 1, 1, 2]], 8, axis=1), lengths=[40, 13]
        )


@pytest.mark.long
def test_ends_are_the_tokens_that_read_so(stateful):
    """Spaces around a text do not count; other text does."""
    program = stateful("llama")
    program.spelling = ["a", ".", " .", "..", "\n\n", ".a", "", "!"]
    texts = {**Sentencekv.small, "end_ids": None, "ends": ". \n\n"}
    assert Select(Sentencekv(**texts)).run(program).changed
    assert program.facts.units.ends == (1, 2, 4)
    program = stateful("llama")
    assert Select(Sentencekv(**texts)).run(program).changed, (
        "without a tokenizer units are marked, or runs"
    )
    assert program.facts.units.ends == () and program.facts.units.marks
    program = stateful("llama")
    program.spelling = ["a", "b"]
    with pytest.raises(PassError, match="no token of .* reads as one of ends = '. "):
        Select(Sentencekv(**texts)).run(program)


def test_an_id_beyond_the_vocabulary_is_refused(stateful):
    with pytest.raises(PassError, match="end_ids has 9999"):
        Select(built("sentencekv", end_ids=[9999])).run(stateful("llama"))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"ends": " "}, "ends names no token"),
        ({"end_ids": 3}, "end_ids is 3; give a list of token ids, 0 or more"),
        ({"end_ids": [3, -1]}, r"end_ids is \[3, -1\]; give a list of token ids, 0 or more"),
        ({"end_ids": [True]}, "end_ids"),
        ({"every": 24}, "every is 24; give a multiple of size = 16"),
        ({"sinks": 1024}, "sinks is 1024; give fewer than tokens_read = 1024"),
    ],
    ids=str,
)
def test_options_that_make_no_sense(options, why):
    with pytest.raises(RecipeError, match=why):
        built("sentencekv", **{"size": 16, "every": 64, "tokens_read": 1024, **options})
