"""retro-attention: which pages tokens that run again read, what becomes of their keys, its loop, targets, bad input."""

import models
import numpy as np
import pytest
import torch

import accel
from accel.compiler.assemble import assemble
from accel.ir.errors import InputError, RecipeError
from accel.ir.ops.attention import attention, operands_of
from accel.ir.program import compute
from accel.ir.recipe import Recipe
from accel.ir.sizes import FEW
from accel.passes.kv.select.retro_attention import RetroAttention
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.logits_processors import Processed
from accel.runtime.loop.retro_attention import RetroAttention as Loop
from accel.runtime.sample.standard import Standard
from accel.runtime.session.session import Session

from ....draft_case import rows_of
from ....select_case import built
from ....session_ways import close, law_every_target, singles

OPTIONS = {"tokens_read": 12, "page": 4, "dense_layers": 0}


# Lists


def law_union(joined):
    """Each token reads what it and those behind it in the call chose, of pages before its own; each page once."""
    chosen = torch.tensor(
        [[[[5, 0, 2], [5, 2, 3], [6, 5, -1]], [[1, 0, -1], [2, 1, 0], [3, 1, 2]]]]
    )
    found = joined(chosen, 7)
    for head in range(2):
        for token in range(3):
            own = chosen[0, head, token].tolist()
            want = {p for p in own if p >= 0}
            for later in range(token + 1, 3):
                want |= {p for p in chosen[0, head, later].tolist() if 0 <= p < own[0]}
            listed = [p for p in found[0, head, token].tolist() if p >= 0]
            assert listed[0] == own[0] and sorted(listed) == sorted(want)


def test_a_token_reads_what_later_ones_chose():
    law_union(built("retro-attention").joined)


@pytest.mark.parametrize("broken", ["twice", "earlier", "none"])
def test_other_unions_are_caught(broken):
    def joined(chosen, pages):
        if broken == "none":
            return chosen
        other = chosen.flip(2) if broken == "earlier" else chosen
        rest = built("retro-attention").joined(other, pages)
        rest = rest.flip(2) if broken == "earlier" else rest
        return torch.cat((chosen, rest), 3) if broken == "twice" else rest

    with pytest.raises(AssertionError):
        law_union(joined)


def test_one_token_chooses_as_quest_in_the_same_order():
    chosen = torch.tensor([[[[5, 0, 2]]]])
    assert torch.equal(built("retro-attention").joined(chosen, 7), chosen)


def test_attention_over_the_union_is_the_merge_of_its_parts():
    """By the log-sum-exp of each, of pages that were seen and of those that are new."""
    r = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 2, n, 6, generator=r) for n in (1, 32, 32))
    where, form = torch.arange(32)[None], (None, 0.4, 0.0, "causal", 0)

    def over(pages):
        listed = torch.tensor(pages).expand(1, 2, 1, -1)
        out = attention(q, k, v, torch.tensor([[31]]), where, *form, pages=listed, page=4)
        slots = [4 * p + i for p in pages for i in range(4)]
        return out, (q @ k[:, :, slots].transpose(-1, -2) * 0.4).logsumexp(-1, keepdim=True)

    (a, of_a), (b, of_b), (both, _) = over([7, 2]), over([5, 0, 1]), over([7, 2, 5, 0, 1])
    share = torch.sigmoid(of_a - of_b)
    torch.testing.assert_close(share * a + (1 - share) * b, both)


# Sessions


@pytest.mark.long
def test_calls_of_one_token_are_quests(selecting):
    a, b = selecting("retro-attention"), selecting("quest")
    tokens = a.tokens(2, 60)
    with a.session(2) as x, b.session(2) as y:
        for session in (x, y):
            session.prompt(tokens[:, :40], np.array([40, 23]))
        assert np.array_equal(singles(x, tokens[:, 40:]), singles(y, tokens[:, 40:]))


def test_sessions_say_that_calls_of_several_tokens_differ(selecting):
    for name, width in (("retro-attention", 1), ("quest", FEW)):
        with selecting(name).session() as session:
            assert session.capabilities.width == width


def again(session, tokens, start, stop, window):
    """Tokens start..stop-1 [1,T], each with the `window` - 1 before it again; logits of the new ones."""
    found = []
    for i in range(start, stop):
        back = min(window - 1, i - start)
        session.rewind(session.lengths - back)
        found.append(session.run(tokens[:, i - back : i + 1], last_only=True))
    return np.concatenate(found, axis=1)


def keys(session, layer=1):
    return session._core.backend._state[f"kv.{layer}.k"][:, :, : session.lengths[0]].clone()


def law_dense(case, whole, tokens):
    """Where all pages are read, running tokens again changes nothing."""
    with case.session() as a, whole.session() as b:
        for session in (a, b):
            session.prompt(tokens[:, :40])
        close(again(a, tokens, 40, 52, 3), singles(b, tokens[:, 40:52]))
        close(keys(a), keys(b))


def test_with_all_pages_nothing_is_corrected(selecting):
    case = selecting("retro-attention", tokens_read=64)
    law_dense(case, selecting(), case.tokens(1, 60))


def test_with_few_pages_something_is(selecting):
    case = selecting("retro-attention")
    with pytest.raises(AssertionError):
        law_dense(case, selecting(), case.tokens(1, 60))


def far(case, whole, tokens, window):
    """How far the keys of the second layer are from those of whole attention, of tokens that ran again often enough.
    The first layer selects, too.
    """
    with case.session() as a, whole.session() as b:
        for session in (a, b):
            session.prompt(tokens[:, :60])
        again(a, tokens, 60, 120, window)
        singles(b, tokens[:, 60:120])
        ran = slice(60, 121 - window)
        return (keys(a) - keys(b))[:, :, ran].square().mean().item()


@pytest.mark.long
def test_keys_of_tokens_that_run_again_are_nearer_to_those_of_whole_attention(selecting):
    case, whole = selecting("retro-attention"), selecting()
    tokens = case.tokens(1, 124)
    found = [far(case, whole, tokens, window) for window in (1, 2, 8)]
    assert found[0] > found[1] > found[2], found
    quest = selecting("quest")
    same = far(quest, whole, tokens, 8)
    assert abs(same - found[0]) < (found[0] - found[1]) / 2, "by the union, not by running again"


def pages_of(case, session, tokens, layer=0):
    """What the tokens of a call read in a layer: a set of pages for each KV head, of the first of them."""
    graph, state = case.program.step.graph, session._core.backend._state
    sites = graph.find_nodes(op="call_function", target=attention.default)
    wanted = operands_of(list(sites)[layer]).pages
    width = tokens.shape[1]
    given = {
        "tokens": tokens, "positions": session.lengths[:, None] + np.arange(width),
        "slots": session.lengths, "rows": np.zeros((1, 1), np.int64),
    }  # fmt: skip
    inputs, values = {n: torch.from_numpy(np.array(a)) for n, a in given.items()} | state, {}
    with torch.no_grad():
        for node in graph.nodes:
            if node.op == "output":
                break
            values[node] = compute(node, case.program.params, inputs, values)
    return [{p for p in head if p >= 0} for head in values[wanted][0, :, 0].tolist()]


def test_pages_that_a_token_reads_only_grow(selecting):
    """In the first layer, whose queries are those of the first time; those behind may turn elsewhere."""
    case = selecting("retro-attention")
    tokens = case.tokens(1, 60)
    with case.session() as session:
        session.prompt(tokens[:, :50])
        seen = [pages_of(case, session, tokens[:, 50 : 51 + n]) for n in range(6)]
    for before, after in zip(seen, seen[1:], strict=False):
        assert all(a <= b for a, b in zip(before, after, strict=True))
    assert any(len(a) < len(b) for a, b in zip(seen[0], seen[-1], strict=True))


# The loop


def model(window=2, loop="retro-attention", **options):
    tables = {"kv": {"select": {"use": "retro-attention", **OPTIONS, **options}}}
    tables["loop"] = {"use": loop} | ({"window": window} if loop == "retro-attention" else {})
    module = models.make("llama", 2)
    return accel.optimize(
        module, tables, target="eager", max_context=128, max_batch=3, verify=False
    )


PROMPTS = [list(range(5, 45)), list(range(40, 4, -1)), list(range(3, 84, 2))]


@pytest.fixture(scope="module")
def looped():
    with model(3) as compiled:
        yield compiled


def by_hand(compiled, prompt, count, window):
    """Greedy tokens, each call with the generated tokens before it again."""
    with compiled.session(1) as session:
        logits = session.prompt(np.array([prompt]))
        out = [int(logits[0, -1].argmax())]
        while len(out) < count:
            back = min(window - 1, len(out) - 1)
            session.rewind(session.lengths - back)
            logits = session.run(np.array([out[len(out) - 1 - back :]]), last_only=True)
            out.append(int(logits[0, -1].argmax()))
        return out


@pytest.mark.long
def test_rows_get_what_they_would_alone(looped):
    """As by hand, where one ends before the others, too."""
    want = [by_hand(looped, prompt, 20, 3) for prompt in PROMPTS]
    assert looped.generate(PROMPTS, max_new_tokens=20).tokens == want
    end = next(t for t in want[1][3:9] if t not in want[1][:3] + want[0] + want[2])
    found = looped.generate(PROMPTS, max_new_tokens=20, eos=end).tokens
    assert [found[0], found[2]] == [want[0], want[2]]
    assert found[1] == want[1][: len(found[1])] and len(found[1]) < 10


@pytest.mark.long
def test_a_window_of_one_is_plain_decoding():
    with model(1) as one, model(loop="autoregressive") as plain, model(4) as four:
        want = plain.generate(PROMPTS, max_new_tokens=30).tokens
        assert one.generate(PROMPTS, max_new_tokens=30).tokens == want
        assert four.generate(PROMPTS, max_new_tokens=30).tokens != want


def test_calls_hold_the_new_token_and_those_before_it(looped, monkeypatch):
    """Not of the prompt."""
    widths, run = [], Session.run
    monkeypatch.setattr(
        Session, "run", lambda self, tokens, *a, **k: widths.append(tokens.shape[1]) or run(self, tokens, *a, **k)
    )  # fmt: skip
    looped.generate(PROMPTS[0], max_new_tokens=6)
    assert widths[-5:] == [1, 2, 3, 3, 3]


def test_what_was_evicted_is_not_run_again():
    """Behind each eviction the window begins anew."""

    class Held:
        lengths, held_from = np.array([40, 37, 9]), np.array([40, 36, 0])

    live = np.array([True, True, True])
    loop = Loop(window=4)
    assert loop._again(Held, live, 9) == 0
    assert loop._again(Held, np.array([False, True, True]), 9) == 1
    assert loop._again(Held, np.array([False, False, True]), 9) == 3
    assert loop._again(Held, np.array([False, False, True]), 2) == 2


def late(ids, logits):
    return logits if ids.size < 44 else 1 / 0


def test_a_round_that_is_left_is_whole(looped):
    """One row's error and an iteration that is closed let the others take their tokens of it."""
    for fails in (False, True):
        rows = rows_of(PROMPTS, limit=20)
        if fails:
            rows[0].sampler = Processed(Standard(), looped.facts.vocab_size, processors=[late])
        with looped.session(3) as session:
            came = Loop(window=3).tokens(session, rows, DecodeContext())
            if fails:
                with pytest.raises(InputError, match="ZeroDivisionError"):
                    list(came)
            else:
                for _ in range(7):
                    next(came)
                came.close()
            taken = [len(row.tokens) for row in rows]
            assert taken == ([4, 5, 5] if fails else [3, 3, 3])
            held = [row.seen.size - (not row.error) for row in rows]
            assert session.lengths.tolist() == held


def test_every_way_through_a_session_is_that_of_the_oracle():
    module = models.make("llama", 2)
    tables = {
        "kv": {"select": {"use": "retro-attention", **OPTIONS}},
        "loop": {"use": "retro-attention"},
    }
    with accel.optimize(module, tables, max_context=128, max_batch=2, verify=False) as compiled:
        law_every_target(compiled)


# Bad input


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"window": 0}, "loop.retro-attention: window is 0; give 1 to 32"),
        ({"window": 33}, "loop.retro-attention: window is 33; give 1 to 32"),
        ({"window": 2.5}, "not int"),
    ],
    ids=str,
)
def test_options_that_make_no_sense(options, why):
    tables = {
        "kv.select": {"use": "retro-attention"},
        "loop": {"use": "retro-attention", **options},
    }
    with pytest.raises(RecipeError, match=why):
        assemble(Recipe(tables=tables))


def test_drafts_are_refused():
    tables = {"kv.select": {"use": "retro-attention"}, "draft": {"use": "prompt-lookup"}}
    with pytest.raises(RecipeError, match="gives the same logits as one call per token"):
        assemble(Recipe(tables=tables))
    assert RetroAttention().count == 64
