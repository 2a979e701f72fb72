"""ActQKV: its probe query, blocks, budgets and table by number, one list per layer, builds, bad input."""

import matrix
import models
import numpy as np
import pytest
import torch
from matrix import over_state

import accel
from accel.ir.capture.capture import capture
from accel.ir.errors import PassError, RecipeError
from accel.ir.ops.attention import Form
from accel.ir.tables import Observed, Rows
from accel.passes.kv.select import Select
from accel.passes.kv.select._tokens import Memory
from accel.passes.kv.select.actqkv import Actqkv, likeliest, unusual

from ....select_case import Selecting, built, constants, measured_for
from ....session_ways import law_every_target, singles

B, T, H, G, C, D = 2, 9, 4, 2, 64, 6
NONE = torch.zeros(B, dtype=torch.bool)


def inputs(seed=0, tokens=T):
    r = torch.Generator().manual_seed(seed)
    slots = torch.tensor([C - tokens, 50 - tokens])
    return {
        "queries": 3 * torch.randn(B, tokens, H, D, generator=r),
        "positions": slots[:, None] + torch.arange(tokens),
        "k_pos": torch.arange(C).expand(B, -1),
        "slots": slots,
        "origin": torch.tensor([20, 14]),
        "label": (torch.arange(C) // 4).expand(B, G, -1),
        "mean": torch.randn(B, G, C // 4, D, generator=r),
        "query_mean": torch.randn(H, D, generator=r),
        "query_variance": torch.rand(H, D, generator=r),
    }


def weight_of(query, x):
    """How unusual a query [H,D] is, as the paper's page has it."""
    mean, variance = x["query_mean"].numpy(), x["query_variance"].numpy()
    return float(((query - mean) ** 2 / (variance + variance.mean() / 100)).mean())


def probes(x, chunk, memory, known):
    """Token after token: the probe query of each [H,D], of norm 1."""
    found = []
    for row in range(B):
        total, weight = memory["sum"][row].numpy(), float(memory["weight"][row])
        start, origin = int(x["slots"][row]), int(x["origin"][row])
        if not known[row]:
            total, weight = np.zeros((H, D)), 0.0
        for i, query in enumerate(x["queries"][row].numpy()):
            if (start + i - origin) % chunk == 0 or start + i == origin:
                total, weight = np.zeros((H, D)), 0.0
            heavy = weight_of(query, x)
            total, weight = total + heavy * query, weight + heavy
            probe = total / weight
            found.append(probe / np.linalg.norm(probe))
    return np.array(found).reshape(B, -1, H, D)


def memory(seed=1):
    r = torch.Generator().manual_seed(seed)
    return {"sum": torch.randn(B, H, D, generator=r), "weight": torch.tensor([2.0, 5.0])}


def law_probe(method):
    for seed in range(3):
        x, known = inputs(seed), torch.tensor([True, False])
        found, _, new = method.search(x, memory(seed), known)
        np.testing.assert_allclose(found, probes(x, method.chunk, memory(seed), known), atol=1e-5)
        assert list(new) == ["sum", "weight"]


@pytest.mark.parametrize("chunk", [2, 3, 50])
def test_a_probe_is_the_weighted_mean_of_its_chunk(chunk):
    law_probe(built("actqkv", chunk=chunk))


def test_a_probe_without_weights_is_caught():
    class Broken(Actqkv):
        def gathered(self, queries, weights, *rest):
            return super().gathered(queries, torch.ones_like(weights), *rest)

    with pytest.raises(AssertionError):
        law_probe(Broken(**Actqkv.small))


def test_equally_unusual_queries_have_their_mean_as_probe():
    x = inputs(tokens=2)
    x["slots"] = x["origin"] + 3  # a chunk begins
    x["query_mean"] = torch.zeros(H, D)
    x["query_variance"] = torch.ones(H, D)
    x["queries"] = x["queries"] / x["queries"].square().sum((2, 3), keepdim=True).sqrt()
    found = built("actqkv").search(x, memory(), NONE)[0]
    mean = x["queries"].mean(1)
    np.testing.assert_allclose(
        found[:, 1], mean / mean.flatten(1).norm(dim=1)[:, None, None], atol=1e-6
    )


def test_one_token_s_probe_does_not_depend_on_the_table():
    method, x = built("actqkv", chunk=1), inputs()
    found = method.search(x, {}, NONE)[0]
    other = {**x, "query_mean": x["query_mean"] + 9, "query_variance": x["query_variance"] * 7}
    assert torch.equal(found, method.search(other, {}, NONE)[0])
    assert method.memory(H, D, G) == Memory()
    torch.testing.assert_close(
        found, x["queries"] / x["queries"].flatten(2).norm(dim=2)[..., None, None]
    )


def test_a_query_that_is_no_number_weighs_nothing_in_others():
    x = inputs()
    x["queries"][0, 4] = float("nan")
    found, *_ = built("actqkv", chunk=50).search(x, memory(), NONE)
    assert found[0, :4].isfinite().all() and found[0, 5:].isfinite().all()
    assert unusual(x["queries"], x["query_mean"], x["query_variance"])[0, 4].isnan()


def law_list(method):
    """Blocks by the cosine of all heads together; each KV head has the same list."""
    for seed in range(3):
        x = inputs(seed)
        listed, _ = method.choose(x, Form("causal"), memory(), NONE)
        probe = method.search(x, memory(), NONE)[0]
        for row, i in np.ndindex(B, T):
            end = int(method.grouped(x["slots"][:, None] + i, x["origin"])[row])
            wide = x["mean"][row].repeat_interleave(H // G, 0)  # [H,U,D]
            like = [
                float(torch.cosine_similarity(probe[row, i].flatten(), wide[:, u].flatten(), dim=0))
                for u in range(C // 4)
            ]
            best = sorted(range(C // 4), key=lambda u: -like[u])
            want = [s for u in best for s in range(method.sinks, end) if s // 4 == u]
            for head in range(G):
                assert listed[row, head, i, -8:].tolist() == (want + [-1] * 8)[:8]


def test_a_layer_has_one_list_by_the_cosine_of_all_heads():
    law_list(built("actqkv"))


def test_heads_that_choose_alone_are_caught():
    class Broken(Actqkv):
        def vote(self, scores, seen):
            return scores.sum(2)

    with pytest.raises(AssertionError):
        law_list(Broken(**Actqkv.small))


def test_blocks_by_the_product_are_caught():
    class Broken(Actqkv):
        def score(self, queries, means):
            return queries @ means.transpose(-1, -2)

    with pytest.raises(AssertionError):
        law_list(Broken(**Actqkv.small))


def test_a_block_is_the_mean_of_its_best_keys():
    r = torch.Generator().manual_seed(0)
    keys, mean = torch.randn(B, G, 11, D, generator=r), torch.randn(H, D, generator=r)
    real = torch.arange(11) < torch.tensor([11, 6])[:, None]
    units = torch.arange(3) < torch.tensor([3, 2])[:, None]
    method = built("actqkv")
    labels, means = method.group(keys, real, units, mean)
    for row, head in np.ndindex(B, G):
        asked = mean[head * 2 : head * 2 + 2].mean(0)
        for unit in range(int(units[row].sum())):
            mine = [i for i in range(11) if real[row, i] and labels[row, head, i] == unit]
            best = sorted(mine, key=lambda i: -float(keys[row, head, i] @ asked))[:2]
            torch.testing.assert_close(means[row, head, unit], keys[row, head, best].mean(0))
    assert not means[1, :, 2].any(), "a unit without tokens"
    keys[0, 1, 5] = float("nan")
    found = likeliest(keys, real, labels, units, mean, 2)
    assert found.isnan().any(-1).sum() == 1, "its own unit, which attention shall see"


# Budgets


def test_budgets_by_hand():
    """Of 4 blocks on average: what is left times the density over that of the layers to come."""
    method = built("actqkv", tokens_read=18, floor=0)
    assert method.blocks([0.5, 0.5, 0.5]) == [4, 4, 4]
    assert method.blocks([0.9, 0.3, 0.6]) == [6, 2, 4]
    assert method.blocks([1.0, 0.0, 0.0]) == [8, 2, 2], (
        "twice the mean at most; what is left is shared"
    )
    assert method.blocks([0.0, 0.5, 0.5]) == [1, 6, 5], "a block at least"
    assert method.blocks([0.0, 0.0]) == [4, 4]
    for seed in range(20):
        density = np.random.default_rng(seed).uniform(0.3, 1, 6).tolist()
        assert sum(method.blocks(density)) <= 6 * 4
    floor = built("actqkv", tokens_read=18, floor=12)
    assert min(floor.blocks([0.9, 0.1, 0.1])) == 3
    release = built("actqkv", tokens_read=18, floor=32)
    assert release.blocks([0.9, 0.1, 0.5]) == [8, 8, 8], "a floor above the mean: all alike"


def test_layers_of_unlike_density_read_unequal_numbers():
    method = built("actqkv", tokens_read=18, floor=0)
    tables = {i: {"density": torch.tensor([d])} for i, d in ((2, 0.9), (5, 0.3), (6, 0.6))}
    layers = (2, 5, 6)
    assert [method.in_layer(i, layers, tables).tokens_read for i in layers] == [26, 10, 18]
    assert max(method.in_layer(i, layers, tables).tokens_read for i in layers) <= method.count


def rows(seed=0, tokens=40, heads=H):
    r = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, n, tokens, D, generator=r) + 0.3 for n in (heads, G, G))
    return Rows(
        torch.zeros(2, tokens + 1),
        torch.ones(2, tokens),
        {0: Observed(q, k, v, Form("causal", scale=0.5))},
    )


def test_the_table_is_what_all_rows_say():
    many = [rows(seed) for seed in range(3)]
    found = built("actqkv").measure(many)[0]
    every = torch.cat([m.layers[0].queries for m in many], 0).transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(found["query_mean"], every.mean(0))
    torch.testing.assert_close(found["query_variance"], every.var(0, unbiased=False))
    assert 0 < float(found["density"]) < 1
    assert built("actqkv").measure([rows(tokens=5)])[0]["density"].tolist() == [1.0], (
        "no two blocks"
    )


def test_density_is_the_entropy_of_cosines():
    method = built("actqkv", best=4)
    x = rows().layers[0]
    found = method.densities(x.queries, x.keys)
    assert found.shape == (2, 4)  # tokens 8, 16, 24, 32
    wide = x.keys.unflatten(2, (10, 4)).mean(3).repeat_interleave(H // G, 1)  # [B,H,U,D]
    for row, i in np.ndindex(2, 4):
        at = 8 + 8 * i
        like = [
            float(
                torch.cosine_similarity(
                    x.queries[row, :, at].flatten(), wide[row, :, u].flatten(), dim=0
                )
            )
            for u in range(at // 4)
        ]
        shares = np.exp(like) / np.exp(like).sum()
        want = -(shares * np.log(shares)).sum() / np.log(len(like))
        assert abs(float(found[row, i]) - want) < 1e-5


@pytest.mark.long
def test_a_session_reads_as_many_blocks_as_the_layer_may(stateful):
    case = Selecting(stateful("llama"), built("actqkv"))
    with case.session() as session:
        tokens = case.tokens(1, 50)
        session.prompt(tokens[:, :44])
        assert np.isfinite(singles(session, tokens[:, 44:])).all()
    assert set(constants(case.method, G, D)) == {"query_mean", "query_variance", "density"}


@pytest.mark.long
def test_every_target_is_that_of_the_oracle(tmp_path):
    model = models.make("llama", 1)
    table = measured_for(
        built("actqkv"), over_state(capture(model, max_context=128)), tmp_path
    ).table
    recipe = {"kv": {"select": {"use": "actqkv", **Actqkv.small, "table": table}}}
    with accel.optimize(model, recipe, max_context=128, max_batch=2) as made:
        law_every_target(made)


@pytest.mark.parametrize("use", ["actqkv", "double-sparsity"])
@pytest.mark.few(1)
def test_keys_of_a_codec_are_refused(use):
    case = matrix.Case("llama", (("kv.codec", "kv-int8"), ("kv.select", use)))
    found = matrix.Matrix().run(case)
    assert found.kind == "refused"
    assert "kv.codec encodes its keys" in found.why or "PLAIN_KEYS" in found.why, found.why


def test_a_model_without_a_table_is_refused(stateful):
    with pytest.raises(
        PassError,
        match=r"the bundled file was measured for another model; .*accel-compile train actqkv",
    ):
        Select(built("actqkv")).run(stateful("llama"))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"best": 0}, "best is 0; give 1 to 1024"),
        ({"chunk": 0}, "chunk is 0; give 1 to 1048576"),
        ({"floor": -1}, "floor is -1; give at least 0"),
        ({"floor": 2000}, "floor is 2000; give at most 1920 tokens"),
        ({"tokens_read": 80}, "size is 32, but a layer reads tokens_read - sinks = 16"),
        ({"every": 48}, "every is 48; give a multiple of size = 32"),
    ],
    ids=str,
)
def test_options_that_make_no_sense(options, why):
    with pytest.raises(RecipeError, match=why):
        Actqkv(**options)
