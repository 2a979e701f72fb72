"""zipcache: salient tokens in 4 bits, the others in 2, by the mean attention of probes."""

import models
import numpy as np
import pytest
import torch

import accel
from accel.ir.errors import RecipeError
from accel.ir.ops.attention import Form
from accel.passes.kv.inputs.attends import attention_over
from accel.passes.kv.keep.zipcache import ZipCache
from accel.passes.kv.score.zipcache import ZipCache as Saliency

from ....kv_case import state
from ....kv_slots import D, G, R, build, choose, real, slots
from ....laws.test_kv_keep import demoted, no_others
from ....session_ways import oracle, singles

T, W = 29, 5


def law_mean_of_probes(score, divided=None):
    """Attention of the probes, over those that see the token; where all queries are probes, the mean of each column
    of the lower triangle.
    """
    r = torch.Generator().manual_seed(3)
    q, k = torch.randn(1, G, R, T, D, generator=r), torch.randn(1, G, T, D, generator=r)
    hidden = torch.ones(T, T).triu(1).bool()
    attention = (q @ k[:, :, None].mT).masked_fill(hidden, -torch.inf).softmax(-1).sum(2)[0]
    where = torch.arange(T)
    random = score._ahead(where) == 0
    probes = random | (where >= T - W)
    found = score(
        mass=attention[:, random].sum(1)[None],
        queries=q[..., -W:, :].flatten(1, 2),
        query_positions=where[None, -W:],
        positions=where.expand(1, G, T),
        seen=torch.tensor([T]),
        attends=attention_over(Form("causal"), {}, k, where.expand(1, G, T))["attends"],
    )
    sees = probes.flip(0).cumsum(0).flip(0) if divided is None else divided
    torch.testing.assert_close(found[0], attention[:, probes].sum(1) / sees)
    return probes


@pytest.mark.parametrize("seed", range(3))
def test_the_score_is_the_mean_attention_of_probes(seed):
    probes = law_mean_of_probes(Saliency(window=W, stride=4, seed=seed))
    assert T // 4 <= int(probes.sum()) < T // 2
    assert law_mean_of_probes(Saliency(window=W, stride=1, seed=seed), T - torch.arange(T)).all()
    with pytest.raises(AssertionError):  # divided by all queries behind, as if all were probes
        law_mean_of_probes(Saliency(window=W, stride=4, seed=seed), T - torch.arange(T))


def rounded(x, bits, axis):
    """x in 2^bits steps between its ends along an axis, in float32."""
    low, high = x.min(axis, keepdims=True), x.max(axis, keepdims=True)
    step = np.maximum((high - low) / (2**bits - 1), 1e-7)
    return np.round((x - low) / step) * step + low


def law_uniform(keep, bits):
    """All tokens that go are one class of so many bits: keys by channel, values by token of balanced channels."""
    x = slots(2, base=(0, 0, 0), recent=(14, 11, 12)) | no_others(keep)
    found = choose(x, 3, build("score", "knorm"), keep=keep, most=3)
    for (_, b, g), (tokens, read) in demoted(keep, found).items():
        if not tokens:
            continue
        k, v = (x[f"recent_{role}"][b, g, tokens].numpy() for role in "kv")
        size = np.sqrt(np.abs(v).max(0))
        want = np.concatenate((rounded(k, bits, 0), rounded(v / size, bits, 1) * size), axis=1)
        assert len(tokens) == int(x["seen"][b]) - 3
        off = np.abs(read.numpy() - want) > 8e-3
        assert off.mean() < 0.03  # a number between two codes may go to either


def test_a_ratio_of_0_is_uniform():
    law_uniform(ZipCache(ratio=0.0), 4)
    law_uniform(ZipCache(ratio=1.0), 2)
    for other in (ZipCache(ratio=0.1), ZipCache(ratio=0.0, bits=2)):
        with pytest.raises(AssertionError):
            law_uniform(other, 4)


def test_the_lowest_scores_have_fewer_bits():
    keep, x = ZipCache(ratio=0.3), slots(4)
    score = build("score", "knorm")
    read = demoted(keep, choose(x | no_others(keep), 2, score, keep=keep, most=2))
    norms = torch.cat((x["kept_k"], x["recent_k"]), dim=2).norm(dim=3)
    where = torch.cat((x["kept_pos"], x["recent_pos"][:, None].expand(-1, G, -1)), dim=2)
    for b, row in enumerate(real(x)):
        for g, tokens in enumerate(row):
            gone = max(0, len(tokens) - 2)
            last = dict(zip(where[b, g].tolist(), norms[b, g].tolist(), strict=True))
            lowest = sorted(tokens, key=last.__getitem__, reverse=True)[: int(gone * 0.3)]
            assert set(read["rest", b, g][0]) == set(lowest)
            assert len(read["salient", b, g][0]) == gone - len(lowest)


# Sessions


@pytest.fixture(scope="module")
def built():
    """A small Llama by the compiled graphs, and by the eager oracle."""
    model = models.make("llama", 2)
    score = {"use": "zipcache", "window": 4, "stride": 3}
    tables = {"kv": {"score": score, "keep": {"use": "zipcache"}}}
    tables["kv"] |= {"budget": {"use": "uniform", "tokens_kept": 1}}
    tables["kv"] |= {"when": {"use": "generated", "tokens": 6}}
    with accel.optimize(model, tables, max_context=128, max_batch=2) as compiled:
        yield compiled, oracle(compiled)


TOKENS = np.random.default_rng(0).permutation(50)[None, :48].repeat(2, 0)


def law_order(oracle, part):
    """The order of tokens in a form says nothing."""
    logits = []
    for turned in (False, True):
        with oracle.session(1) as session:
            session.prompt(TOKENS[:1, :40])
            held = session._core.backend._state
            for name in held if turned else ():
                if name.startswith("low.") and part in name and "channel" not in name:
                    held[name] = held[name].flip(2)
            logits.append(singles(session, TOKENS[:1, 40:44]))
    np.testing.assert_allclose(*logits, atol=1e-4)


@pytest.mark.long
def test_tokens_of_a_form_have_no_order(built):
    law_order(built[1], "")
    with pytest.raises(AssertionError):  # not with their values elsewhere
        law_order(built[1], ".v.")


@pytest.mark.long
def test_memory_is_its_formula(built):
    """0.6 x 4 + 0.4 x 2 = 3.2 bits a number, and the parameters: two numbers of each token's values; of each class and
    channel three; position and number of the eviction.
    """
    session = built[1].session(1)
    session.prompt(TOKENS[:1, :41])
    heads, width, few = 2 * 2, 10, 16  # of 40 tokens, one stays
    codes = 2 * (24 * -(-width * 4 // 8) + few * -(-width * 2 // 8))
    each, classes = 40 * (2 * 2 + 8 + 3), 2 * 3 * 2 * width
    held = {n: a for n, a in state(session).items() if n.startswith("low.")}
    assert sum(a.nbytes for a in held.values()) == heads * (codes + each + classes)
    assert codes / 40 / width / 2 * 8 == pytest.approx(3.2, rel=0.1)  # 10 channels fill no bytes
    singles(session, TOKENS[:1, 41:47])  # six more tokens: of them four salient
    after = state(session)
    assert {a.shape[2] for n, a in after.items() if "pos.salient" in n} == {28}
    assert all(a.shape[2] == 2 for n, a in after.items() if "channel_" in n)
    assert all((after[n][:, :, :1] == held[n]).all() for n in held if "channel_" in n)


@pytest.mark.long
def test_graphs_give_what_the_oracle_does(built):
    found = []
    for one in built:
        with one.session(2) as session:
            session.prompt(TOKENS[:, :21], [21, 5])
            found.append([*singles(session, TOKENS[:, 21:31]), session.stats["kv_bytes"]])
    for a, b in zip(*found, strict=True):  # a number between two codes may go to either
        off = np.abs(np.subtract(a, b))
        assert np.median(off) < 1e-4 and off.max() < 0.02


def test_bad_options_are_refused():
    with pytest.raises(RecipeError, match="kv.keep.zipcache: ratio is 1.5; give 0 to 1"):
        ZipCache(ratio=1.5)
    with pytest.raises(RecipeError, match="kv.keep.zipcache: low_bits is 3; give 2, 4 or 8"):
        ZipCache(low_bits=3)
    with pytest.raises(RecipeError, match="kv.score.zipcache: window is 0"):
        Saliency(window=0)
