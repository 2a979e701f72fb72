"""tokenbutler: its predictor by number, what it chooses, its training, every target, and what is refused."""

import math

import models
import numpy as np
import pytest
import torch
from matrix import Case, Matrix, over_state
from reference_data import REFERENCE
from tokenizers import Tokenizer

import accel
from accel.compiler.load.source import open_source
from accel.compiler.over_state import keys_of
from accel.compiler.train.runs.fit import Fit
from accel.ir.capture.capture import capture
from accel.ir.errors import PassError
from accel.ir.ops.attention import Form, attention, operands_of
from accel.ir.program import ancestors
from accel.passes.kv._shared.tables import appended, attentions
from accel.passes.kv.select import Select
from accel.passes.kv.select import _pages as pages
from accel.passes.kv.select.tokenbutler import TokenButler, turned
from accel.passes.trained import ALL, source, write

from ....refused import refuses
from ....select_case import Selecting, built, measured_for
from ....session_ways import close, law_every_target

B, T, E, H, G, F, C = 2, 7, 32, 4, 2, 16, 12


def case(seed=0):
    """A predictor of random numbers with biases, and a hidden state."""
    r = torch.Generator().manual_seed(seed)
    sizes = {
        "down": (8, E), "qkv": (24, 8), "out": (8, 8), "norm": (8,), "shift": (8,), "up": (8, 8),
        "up_bias": (8,), "back": (E, 8), "back_bias": (E,), "q_in": (10, E), "q_in_bias": (10,),
        "k_in": (10, E), "k_in_bias": (10,),
    }  # fmt: skip
    shared = {n: torch.randn(*s, generator=r) * 0.4 for n, s in sizes.items()}
    sizes = {"q": (H * F, 10), "q_bias": (H * F,), "k": (G * F, 10), "k_bias": (G * F,)}
    own = {n: torch.randn(*s, generator=r) * 0.4 for n, s in sizes.items()}
    return shared, own, torch.randn(B, T, E, generator=r)


def foretold(shared, own, hidden, calls, method=None):
    """Logits [B,H,T,C] of calls that end at these tokens, by the method."""
    method = method or built("tokenbutler")
    held = {n: torch.zeros(B, h, C, w) for n, (h, w) in method.trunk_state(H, shared).items()}
    keys, queries, start = torch.zeros(B, G, C, F), [], 0
    for end in calls:
        at = torch.arange(start, end).expand(B, -1)
        where = torch.arange(C)
        x = {
            "hidden": hidden[:, start:end], "positions": at,
            "k_pos": torch.where(where < end, where, -1).expand(B, -1), "slots": at[:, 0],
        }  # fmt: skip
        trunk, held = method.trunk(x, held, shared)
        q, k = method.made(trunk, at, G, own)
        keys[:, :, start:end] = k
        queries.append(q)
        start = end
    rows = torch.cat(queries, 1).transpose(1, 2).reshape(B, G, H // G * T, F)
    return method.score(rows, {"feature": keys}).reshape(B, H, T, C)[..., :T]


def rotated(x, at):
    """One head's numbers at a position, pair by pair."""
    half, out = len(x) // 2, np.zeros(len(x))
    for i in range(half):
        angle = at * 10000 ** (-i / half)
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def by_hand(shared, own, hidden):
    """The logits of one row [H,T,T], as the paper's page has the predictor."""
    w = {n: t.double().numpy() for n, t in (shared | own).items()}
    x, width = hidden.double().numpy(), 8 // H
    small = x @ w["down"].T @ w["qkv"].T
    mixed = np.zeros((T, 8))
    for t, h in np.ndindex(T, H):
        q = rotated(small[t, h * width : (h + 1) * width], t)
        keys = [rotated(small[s, 8 + h * width : 8 + (h + 1) * width], s) for s in range(t + 1)]
        share = np.exp([q @ k / math.sqrt(width) for k in keys])
        values = small[: t + 1, 16 + h * width : 16 + (h + 1) * width]
        mixed[t, h * width : (h + 1) * width] = share @ values / share.sum()
    mixed = mixed @ w["out"].T
    normal = (mixed - mixed.mean(1, keepdims=True)) / np.sqrt(mixed.var(1, keepdims=True) + 1e-5)
    up = (normal * w["norm"] + w["shift"]) @ w["up"].T + w["up_bias"]
    gelu = up * (1 + np.vectorize(math.erf)(up / math.sqrt(2))) / 2
    state = x + gelu @ w["back"].T + w["back_bias"]
    found = []
    for n in "qk":
        inner = state @ w[f"{n}_in"].T + w[f"{n}_in_bias"]
        inner = inner / (1 + np.exp(-inner))
        found.append((inner @ w[n].T + w[f"{n}_bias"]).reshape(T, -1, F))
    logits = np.zeros((H, T, T))
    for h, t, s in np.ndindex(H, T, T):
        q, k = rotated(found[0][t, h], t), rotated(found[1][s, h // (H // G)], s)
        logits[h, t, s] = q @ k / math.sqrt(F)
    return logits


def law_formula(change=lambda shared: shared):
    shared, own, hidden = case()
    found = foretold(change(shared), own, hidden, [T])
    for row in range(B):
        np.testing.assert_allclose(found[row], by_hand(shared, own, hidden[row]), atol=1e-4)


def test_the_predictor_is_the_papers():
    law_formula()


def test_a_predictor_without_its_attention_is_caught():
    with pytest.raises(AssertionError):
        law_formula(lambda shared: {**shared, "out": torch.zeros_like(shared["out"])})


@pytest.mark.parametrize("calls", [[3, 4, 7], [1, 2, 3, 4, 5, 6, 7]], ids=str)
def test_foretold_token_by_token_it_is_as_foretold_at_once(calls):
    x = case(1)
    close(foretold(*x, calls), foretold(*x, [T]))


def test_keys_that_are_rotated_again_are_caught():
    """As the cache of the release does."""

    class Again(TokenButler):
        def trunk(self, x, held, shared, *append):
            made, after = super().trunk(x, held, shared, *append)
            places = x["k_pos"].clamp(min=0)
            return made, {**after, "k": turned(after["k"], places)}

    x = case(1)
    again = foretold(*x, [3, 4, 7], Again())
    with pytest.raises(AssertionError):
        close(again, foretold(*x, [T]))


# What is chosen


def chosen(method, queries, keys):
    """Slots that the newest of keys [B,G,S,F] chooses."""
    slots = torch.full((B,), keys.shape[2] - 1)
    where = torch.arange(keys.shape[2]).expand(B, -1)
    x = {"queries": queries.transpose(1, 2), "positions": slots[:, None], "k_pos": where}
    x |= {"slots": slots, "feature": keys}
    return pages.chosen(method, Form("causal"), keys.shape[1], ["feature"], x)[:, :, 0]


def law_oracle(method, sinks):
    """Features that foretell the logits choose the tokens with the highest, beside the first."""
    r = torch.Generator().manual_seed(2)
    q, k = torch.randn(B, H, 1, F, generator=r), torch.randn(B, G, 40, F, generator=r)
    found = chosen(method, q, k)
    logits = (q.unflatten(1, (G, -1)) @ k[:, :, None].transpose(-1, -2)).amax((2, 3))
    for b, g in np.ndindex(B, G):
        rest = logits[b, g, sinks:39].topk(7 - 1).indices + sinks
        assert set(found[b, g].tolist()) == {39, *range(sinks), *rest.tolist()}


@pytest.mark.parametrize("sinks", [0, 2, 4])
def test_true_logits_choose_as_an_oracle_and_the_first_are_always_read(sinks):
    law_oracle(built("tokenbutler", sinks=sinks), sinks)


def test_first_tokens_that_compete_are_caught():
    class Competing(TokenButler):
        vote = pages.Pages.vote

    with pytest.raises(AssertionError):
        law_oracle(Competing(tokens_read=7, sinks=4), 4)


# The trained part


@pytest.fixture(scope="module")
def two_layers():
    return models.make("llama", 2)


@pytest.fixture(scope="module")
def program(two_layers):
    program = over_state(capture(two_layers, max_context=128))
    program.facts.max_batch = 2
    return program


@pytest.mark.long
def test_training_comes_nearer_to_the_logits(program):
    fit = Fit(program, TokenButler())
    parts = fit.start(8, 0)
    tensors = [t.requires_grad_() for part in parts.values() for t in part.values()]
    optimiser, losses = torch.optim.Adam(tensors, lr=1e-2), []
    r = torch.Generator().manual_seed(0)
    ids = torch.randint(3, program.facts.vocab_size, (2, 25), generator=r)
    rows = fit.rows(ids, torch.ones(2, 24))
    for _ in range(80):
        loss = fit.method.loss(parts, rows, 0.0)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    idle = [n for n, t in (parts[ALL] | parts[1]).items() if t.grad is None or not t.grad.any()]
    assert not idle and all(t.grad is None for t in parts[0].values()), "the first layer is dense"


def test_the_loss_is_of_logits_that_the_mask_shows(program):
    """By hand, of the layer that chooses."""
    fit = Fit(program, TokenButler())
    parts = fit.start(8, 0)
    ids = torch.arange(2 * 7).reshape(2, 7) + 5
    rows = fit.rows(ids, torch.ones(2, 6))
    told, hidden = rows.layers[1], rows.hidden
    at = torch.arange(6).expand(2, -1)
    x = {"hidden": hidden, "positions": at, "k_pos": at, "slots": torch.zeros(2, dtype=torch.int64)}
    held = {
        n: torch.zeros(2, h, 6, w) for n, (h, w) in fit.method.trunk_state(4, parts[ALL]).items()
    }
    q, k = fit.method.made(fit.method.trunk(x, held, parts[ALL])[0], at, 2, parts[1])
    wrong = [
        (q[b, t, h] @ k[b, h // 2, s] - told.form.scale * told.queries[b, h, t] @ told.keys[b, h // 2, s]) ** 2
        for b, h, t, s in np.ndindex(2, 4, 6, 6) if s <= t
    ]  # fmt: skip
    close(fit.method.loss(parts, rows, 0.0), torch.stack(wrong).mean())


@pytest.mark.long
def test_the_bundled_part_knows_more_than_position():
    """What of the bundled model's attention lies on the 16 tokens of 240 that it foretells, beside chance; from layer
    5 on also beside the newest: before, attention is nearly local.
    """
    loaded = open_source(REFERENCE).load()
    program = over_state(capture(loaded.model, stored=loaded.stored))
    text = (REFERENCE / "calibration.txt").read_text(encoding="utf-8")
    ids = Tokenizer.from_file(str(REFERENCE / "tokenizer.json")).encode(text[:4000]).ids[:241]
    fit, keys = Fit(program, TokenButler()), keys_of(program)
    rows = fit.rows(torch.tensor([ids]), torch.ones(1, 240))
    parts = fit.method.tensors(program, keys)
    assert sum(t.numel() for part in parts.values() for t in part.values()) < 200_000
    at = torch.arange(240)[None]
    x = {"hidden": rows.hidden, "positions": at, "k_pos": at, "slots": torch.zeros(1).long()}
    held = {
        n: torch.zeros(1, h, 240, w) for n, (h, w) in fit.method.trunk_state(4, parts[ALL]).items()
    }
    trunk, _ = fit.method.trunk(x, held, parts[ALL])
    late, random = (
        torch.arange(120, 240),
        torch.rand(240, generator=torch.Generator().manual_seed(0)),
    )
    for layer in range(1, 8):
        q, k = fit.method.made(trunk, at, 2, parts[layer])
        told = rows.layers[layer]
        logits = (
            told.queries @ told.keys.repeat_interleave(2, 1).transpose(-1, -2) * told.form.scale
        )
        seen = torch.ones(240, 240, dtype=torch.bool).tril()
        share = logits.masked_fill(~seen, -torch.inf).softmax(-1)[0, :, late]
        foretold = (q.transpose(1, 2) @ k.repeat_interleave(2, 1).transpose(-1, -2))[0, :, late]

        def mass(worth, share=share, seen=seen):
            best = worth.masked_fill(~seen[late], -torch.inf).topk(16).indices
            return share.gather(2, best.expand(4, -1, -1)).sum(-1).mean()

        assert mass(foretold) > 1.3 * mass(random.expand(4, 120, -1)), layer
        if layer >= 5:
            assert mass(foretold) > mass(torch.arange(240.0).expand(4, 120, -1)), layer


# Targets


@pytest.fixture(scope="module")
def compiled(two_layers, program, tmp_path_factory):
    """Of two layers, the second of which chooses."""
    file = measured_for(TokenButler(), program, tmp_path_factory.mktemp("part")).trained
    recipe = {
        "kv": {
            "select": {"use": "tokenbutler", "tokens_read": 7, "dense_layers": 1, "trained": file}
        }
    }
    with accel.optimize(two_layers, recipe, max_context=128, max_batch=2, verify=True) as made:
        yield made


@pytest.mark.long
def test_every_way_through_a_session_is_that_of_the_oracle(compiled):
    law_every_target(compiled)


def test_features_take_what_the_formula_says(compiled):
    """Of the layer that chooses 16 numbers a KV head, and the predictor's own keys and values."""
    found = {s.name: s.shape for s in compiled.program.state if s.name.startswith("pages.")}
    assert found["pages.1.feature"] == ("B", 2, "C/1", 16)
    assert {n for n in found if n.startswith("pages.0")} == {"pages.0.trunk.k", "pages.0.trunk.v"}


def test_no_list_needs_what_a_layer_computes(stateful):
    """Only the hidden state behind the keys of the first: no attention comes before a list."""
    made = Selecting(stateful("llama"), built("tokenbutler"))
    sites = made.program.nodes(attention.default, entry=made.program.step)
    first = source(appended(attentions(made.program)[0]))
    for node in sites:
        before = ancestors([operands_of(node).pages], set())
        assert first in before and not before & set(sites)
    quest = Selecting(stateful("llama"), built("quest"))
    sites = quest.program.nodes(attention.default, entry=quest.program.step)
    assert ancestors([operands_of(sites[1]).pages], set()) & set(sites), "those of quest do"


# Bad input


test_options_that_make_no_sense = refuses(
    "kv.select.tokenbutler",
    ({"page": 16}, "page"),
    ({"sinks": -1}, "kv.select.tokenbutler: sinks is -1; give at least 0"),
    ({"tokens_read": 0}, "kv.select.tokenbutler: tokens_read is 0; give at least 1"),
    ({"dense_layers": -1}, "kv.select.tokenbutler: dense_layers is -1; give at least 0"),
)


def test_a_part_of_another_model_is_refused(stateful):
    with pytest.raises(PassError, match="the bundled file was trained for another model"):
        Select(built("tokenbutler")).run(stateful("llama"))


def test_a_part_for_other_query_heads_is_refused(program, tmp_path):
    fit = Fit(program, TokenButler())
    keys = {layer: appended(node) for layer, node in attentions(program).items()}
    method = measured_for(TokenButler(), program, tmp_path)
    parts = method.tensors(program, keys)
    parts[1]["q"], parts[1]["q_bias"] = parts[1]["q"][:32], parts[1]["q_bias"][:32]
    write(method, tmp_path / "other.safetensors", parts, fit.names, {})
    other = TokenButler(trained=str(tmp_path / "other.safetensors"), dense_layers=1)
    with pytest.raises(PassError, match="layer 1 has 4 query heads, the trained part foretells 2"):
        Select(other).run(program.copy())


@pytest.mark.parametrize("use", ["tokenbutler", "attention-predictor"])
def test_keys_that_are_encoded_one_by_one_are_refused(use):
    case = Case("llama", (("kv.codec", "kv-fp8"), ("kv.select", use)))
    outcome = Matrix().run(case)
    assert outcome.kind == "refused" and "file is checked by plain ones" in outcome.why
