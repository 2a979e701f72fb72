"""TokenSelect: its votes and list by number, keys as at one distance, memory, builds against the oracle, bad input."""

import models
import numpy as np
import pytest
import torch

import accel
from accel.ir.errors import InputError
from accel.ir.ops.attention import Form
from accel.ir.ops.rope import rope
from accel.passes.kv.select.tokenselect import Tokenselect
from accel.runtime.session.state.choice import ChoiceMemory

from ....refused import refuses
from ....select_case import Selecting, built
from ....session_ways import law_every_target, singles

B, H, G, C, D = 2, 4, 2, 40, 8
LENGTHS = (35, 22)


def case(seed=0, **options):
    """The method without tables, and what it chooses by."""
    r = torch.Generator().manual_seed(seed)
    method = built("tokenselect", **{"reuse": 2.0, "tokens_read": 9, **options})
    slots = torch.tensor(LENGTHS)
    where = torch.arange(C).expand(B, -1)
    x = {
        "queries": torch.randn(B, 1, H, D, generator=r),
        "keys": torch.randn(B, G, C, D, generator=r),
        "positions": slots[:, None],
        "k_pos": torch.where(where <= slots[:, None], where, -1),
        "slots": slots,
    }
    return method, x


def chosen(method, x):
    return method.choose(x, Form("causal"), {}, x["slots"] < 0)[0]


def by_hand(method, x, row, normalised=True):
    """Slots of a row's token, as the paper's page has them."""
    own, votes = LENGTHS[row], np.zeros(C)
    between = np.arange(method.sinks, own + 1 - method.window)
    for head in range(H):
        logits = (x["queries"][row, 0, head] @ x["keys"][row, head // (H // G), between].T).double()
        votes[between] += (logits.softmax(0) if normalised else logits).numpy()
    best = between[np.argsort(-votes[between], kind="stable")][: method.tokens_read]
    near = range(max(0, own + 1 - method.window), own + 1)
    return sorted({*range(method.sinks), *best.tolist(), *near})


def law_votes(**changed):
    method, x = case()
    found = chosen(method, x)
    assert torch.equal(found[:, 0], found[:, 1]), "one list for all heads"
    for row in range(B):
        listed = [s for s in found[row, 0, 0].tolist() if s >= 0]
        assert len(listed) == len(set(listed)) == 2 + 9 + 4
        assert sorted(listed) == by_hand(method, x, row, **changed)


def test_heads_vote_with_their_shares():
    law_votes()


def test_votes_of_logits_are_caught():
    with pytest.raises(AssertionError):
        law_votes(normalised=False)


def test_sure_heads_do_not_hide_the_rest():
    """Where all else vanishes beside one token, others are still in the order of their logits."""
    method, x = case()
    x["queries"] *= 200
    for row in range(B):
        found = [s for s in chosen(method, x)[row, 0, 0].tolist() if s >= 0]
        assert len(set(found)) == 15
    few = case(tokens_read=1)[0]
    first = {chosen(few, x)[row, 0, 0, 1].item() for row in range(1)}
    assert first <= set(chosen(method, x)[0, 0, 0].tolist())


@pytest.mark.parametrize("interleaved", [False, True])
def test_every_candidate_is_as_far_away(interleaved):
    """Queries and keys are scored as if the keys had not been turned, and the query `window` positions."""
    method, x = case()
    angle = torch.arange(64.0)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
    cos, sin = angle.cos(), angle.sin()
    raw = x["keys"], x["queries"]
    back = torch.arange(63, 0, -1)
    kind = "interleaved" if interleaved else "halves"
    held = {
        **x,
        "keys": rope(raw[0], x["k_pos"], cos, sin, interleaved),
        "queries": rope(raw[1].transpose(1, 2), x["positions"], cos, sin, interleaved).transpose(1, 2),
        f"cos.{kind}": torch.cat((cos[back], cos)),
        f"sin.{kind}": torch.cat((-sin[back], sin)),
    }  # fmt: skip
    queries, turned = method.turned(held)
    keys = rope.reference(held["keys"], *turned)
    there = x["k_pos"][:, None, :, None].clamp(max=0) + 1.0
    torch.testing.assert_close(keys * there, raw[0] * there, atol=1e-5, rtol=1e-4)
    at = torch.full((B, 1), method.window)
    want = rope(raw[1].transpose(1, 2), at, cos, sin, interleaved).transpose(1, 2)
    torch.testing.assert_close(queries, want, atol=1e-5, rtol=1e-4)


def turned_to(x, angle, kind):
    """x [D] turned by the angles of a position, each pair of channels by itself."""
    pairs = [
        (2 * i, 2 * i + 1) if kind == "interleaved" else (i, i + D // 2) for i in range(D // 2)
    ]
    out = x.double().clone()
    for (a, b), t in zip(pairs, angle.tolist(), strict=True):
        out[a] = x[a] * np.cos(t) - x[b] * np.sin(t)
        out[b] = x[a] * np.sin(t) + x[b] * np.cos(t)
    return out


def law_list_positions(kind, method):
    """Attention over the list, whose keys are turned to 0, 1, … and the query to the last of these, token by token."""
    _, x = case()
    by_position = torch.tensor([1.0, 0.3, 0.1, 0.03])
    angle = torch.arange(64.0)[:, None] * by_position
    cos, sin = angle.cos(), angle.sin()
    r = torch.Generator().manual_seed(3)
    raw = x["keys"], x["queries"]
    back = torch.arange(63, 0, -1)
    held = {
        **x,
        "values": torch.randn(B, G, C, 5, generator=r),
        "keys": rope(raw[0], x["k_pos"], cos, sin, kind == "interleaved"),
        "queries": rope(
            raw[1].transpose(1, 2), x["positions"], cos, sin, kind == "interleaved"
        ).transpose(1, 2),
        f"cos.{kind}": torch.cat((cos[back], cos)),
        f"sin.{kind}": torch.cat((-sin[back], sin)),
    }
    form = Form("causal", scale=0.4)
    read, new = method.choose(held, form, {}, x["slots"] < 0)
    assert [[s for s in row if s >= 0] for row in read[:, 0, 0].tolist()] == [[n] for n in LENGTHS]
    for row in range(B):
        listed = by_hand(method, {**x, "queries": new_queries(method, raw, by_position, kind)}, row)
        for head in range(H):
            keys, values = raw[0][row, head // 2], held["values"][row, head // 2].double()
            query = turned_to(raw[1][row, 0, head], by_position * (len(listed) - 1), kind)
            logits = torch.stack(
                [turned_to(keys[s], by_position * i, kind) @ query for i, s in enumerate(listed)]
            )
            logits = 0.4 * logits
            want = logits.softmax(0) @ values[listed]
            lse, out = new["lse"][row, head, 0].double(), new["out"][row, head, 0].double()
            own = (logits[-1] - torch.logaddexp(lse, logits[-1])).exp()
            torch.testing.assert_close(
                (1 - own) * out + own * values[LENGTHS[row]], want, atol=1e-4, rtol=1e-3
            )


def new_queries(method, raw, by_position, kind):
    """Queries as choices read them: keys at 0, they at `window`."""
    return torch.stack(
        [
            torch.stack([turned_to(q, by_position * method.window, kind) for q in one[0]])[None]
            for one in raw[1]
        ]
    ).float()


@pytest.mark.parametrize("kind", ["interleaved", "halves"])
def test_keys_are_read_at_their_place_in_the_list(kind):
    law_list_positions(kind, built("tokenselect", reuse=2.0, tokens_read=9, at="list"))


def test_true_positions_are_caught():
    class Elsewhere(Tokenselect):
        def in_order(self, x, mask, read, slot):
            return super().in_order({**x, "k_pos": x["k_pos"] + 1}, mask, read, slot)

    options = {**Tokenselect.small, "reuse": 2.0, "tokens_read": 9, "at": "list"}
    with pytest.raises(AssertionError):
        law_list_positions("halves", Elsewhere(**options))


@pytest.mark.parametrize("wide", [1, 5])
def test_a_token_reads_the_same_alone_and_among_others(stateful, wide):
    """In calls of one token and of several; without a list that is cut, what plain attention reads."""
    made = Selecting(stateful("llama"), built("tokenselect", at="list"))
    tokens = made.tokens(1, 40)
    with made.session() as one, made.session() as other:
        one.prompt(tokens[:, :25])
        other.prompt(tokens[:, :25])
        found = np.concatenate(
            [other.run(tokens[:, i : i + wide]) for i in range(25, 40, wide)], axis=1
        )
        np.testing.assert_allclose(singles(one, tokens[:, 25:]), found, atol=1e-4)


def test_what_is_no_number_is_read():
    method, x = case()
    x["keys"][0, 1, 7] = float("nan")
    assert 7 in chosen(method, x)[0, 0, 0].tolist()


def test_one_token_and_none_before():
    method, x = case()
    x |= {"slots": torch.zeros(B, dtype=torch.int64)}
    x["positions"] = x["slots"][:, None]
    x["k_pos"] = torch.where(torch.arange(C) == 0, 0, -1).expand(B, -1)
    for row in chosen(method, x)[:, 0, 0].tolist():
        assert [s for s in row if s >= 0] == [0]


@pytest.mark.long
def test_rewinds_that_are_refused_would_leave_a_trace(stateful, monkeypatch):
    """Tokens that all go on from one search, behind which the session goes back."""
    method = built("tokenselect", dense_layers=1, reuse=-1.0)
    made = Selecting(stateful("llama"), method)
    tokens = made.tokens(1, 80)

    def far():
        with made.session() as straight, made.session() as bent:
            for session in (straight, bent):
                session.prompt(tokens[:, :20])
                singles(session, tokens[:, 20:26])
            singles(bent, tokens[:, 26:64])
            bent.rewind(26)
            return np.abs(
                singles(straight, tokens[:, 26:30]) - singles(bent, tokens[:, 26:30])
            ).max()

    with pytest.raises(InputError, match="cannot rewind row 0 to 26"):
        far()
    monkeypatch.setattr(ChoiceMemory, "check", lambda *rest: None)
    assert far() > 1e-3


@pytest.mark.long
@pytest.mark.parametrize("recipes", [(), ("kv-int8",)], ids=str)
def test_every_way_through_a_session_is_that_of_the_oracle(recipes):
    model = models.make("llama", 2)
    small = {"use": "tokenselect", **Tokenselect.small, "dense_layers": 1}
    recipe = [{"kv": {"select": small}}, *recipes]
    with accel.optimize(model, recipe, max_context=128, max_batch=2, verify=not recipes) as made:
        law_every_target(made, np.median if recipes else np.max)


def test_without_reuse_nothing_is_remembered(stateful):
    made = Selecting(stateful("llama"), built("tokenselect", reuse=1.5))
    assert not any("choice" in s.name for s in made.program.state)
    with made.session() as session:
        assert session.capabilities.back is None


test_options_that_make_no_sense = refuses(
    "kv.select.tokenselect",
    ({"sinks": -1}, "kv.select.tokenselect: sinks is -1; give at least 0"),
    ({"window": 0}, "kv.select.tokenselect: window is 0; give at least 1"),
    ({"tokens_read": 0}, "kv.select.tokenselect: tokens_read is 0; give at least 1"),
    ({"reuse": -1.5}, "kv.select.tokenselect: reuse is -1.5; give at least -1"),
    ({"reuse": float("nan")}, "kv.select.tokenselect: reuse is nan; give at least -1"),
    ({"page": 16}, "page"),
    ({"at": "end"}, "kv.select.tokenselect: at 'end' does not exist; known: list, text"),
)


def test_genai_reads_the_whole_cache():
    recipe = {"kv.select": {"use": "tokenselect", **Tokenselect.small, "reuse": 2.0}}
    with accel.optimize(models.tiny(), recipe, max_context=64, verify=False) as made:
        assert "genai" not in made.artifact.entries
