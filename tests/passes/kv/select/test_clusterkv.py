"""ClusterKV: its clusters by number, lists of consecutive clusters, builds against the oracle, bad input."""

import models
import numpy as np
import pytest
import torch

import accel
from accel.ir.errors import PassError, RecipeError
from accel.ir.ops.attention import Form
from accel.passes.kv.select._units import k_means
from accel.passes.kv.select.clusterkv import Clusterkv

from ....refused import refuses
from ....select_case import built
from ....session_ways import law_every_target

ROUNDS = 5


def by_hand(keys, count, rounds=ROUNDS, unit=False):
    """keys [n,D] of one head -> labels and means, as the paper's page has it."""

    def nearest(means):
        length = np.maximum(np.linalg.norm(means, axis=1), 1e-12)
        return (keys / np.linalg.norm(keys, axis=1)[:, None] @ (means / length[:, None]).T).argmax(
            1
        )

    means = keys[np.arange(count) * len(keys) // count].copy()
    members = keys / np.linalg.norm(keys, axis=1)[:, None] if unit else keys
    for _ in range(rounds):
        labels = nearest(means)
        for number in set(labels):
            means[number] = members[labels == number].mean(0)
    return nearest(means), means


def law_clusters(**changed):
    keys = torch.randn(2, 3, 40, 6, generator=torch.Generator().manual_seed(0)).double()
    keys *= torch.rand(2, 3, 40, 1, generator=torch.Generator().manual_seed(1)) * 5
    real = torch.arange(40) < torch.tensor([40, 21])[:, None]
    units = torch.arange(5) < torch.tensor([5, 3])[:, None]
    labels, means = k_means(keys, real, units, ROUNDS)
    for row, (n, few) in enumerate(((40, 5), (21, 3))):
        for head in range(3):
            want, centres = by_hand(keys[row, head, :n].numpy(), few, **changed)
            assert labels[row, head, :n].tolist() == want.tolist()
            np.testing.assert_allclose(means[row, head, :few], centres)


def test_clusters_are_those_of_the_paper():
    law_clusters()


def test_clusters_of_normalised_members_are_caught():
    with pytest.raises(AssertionError):
        law_clusters(unit=True)


def test_equal_keys_and_keys_that_are_no_numbers():
    real, units = torch.ones(1, 8, dtype=torch.bool), torch.ones(1, 2, dtype=torch.bool)
    labels, means = k_means(torch.ones(1, 1, 8, 4), real, units, 3)
    assert not labels.any() and means.isfinite().all()
    keys = torch.randn(1, 1, 8, 4)
    keys[0, 0, 3] = float("nan")
    labels, means = k_means(keys, real, units, 3)
    assert ((labels >= 0) & (labels < 2)).all()
    assert means[0, 0, labels[0, 0, 3]].isnan().all(), "attention shall see it"
    assert means[0, 0, 1 - labels[0, 0, 3]].isfinite().all()


def test_consecutive_clusters_are_pages_by_their_mean_key():
    page, count = 4, 3
    cluster = built("clusterkv", size=page, every=page, sinks=0, tokens_read=page * count)
    r = torch.Generator().manual_seed(0)
    keys, queries = torch.randn(1, 2, 64, 6, generator=r), torch.randn(1, 1, 4, 6, generator=r)
    at, where = torch.tensor([[40]]), torch.arange(64)[None]
    means = keys.unflatten(2, (-1, page)).mean(3)
    label = (torch.arange(64) // page).expand(1, 2, -1)
    origin = torch.tensor([40])
    x = {"queries": queries, "positions": at, "k_pos": where, "slots": at[0]}
    x |= {"origin": origin, "label": label, "mean": means}
    listed, _ = cluster.choose(x, Form("causal"), {}, at[0] < 0)
    chosen = listed[0, :, 0, -page * count :]
    worth = (queries[0, 0].view(2, 2, 6) @ means[0].transpose(-1, -2)).mean(1)[:, :10]
    for head in range(2):
        best = worth[head].topk(count).indices.tolist()
        assert chosen[head].tolist() == [page * p + i for p in best for i in range(page)]


@pytest.mark.long
@pytest.mark.parametrize("recipes", [(), ("kv-int8",)], ids=str)
def test_every_way_through_a_session_is_that_of_the_oracle(recipes):
    model = models.make("llama", 2)
    small = {"use": "clusterkv", **Clusterkv.small, "dense_layers": 1}
    recipe = [{"kv": {"select": small}}, *recipes]
    with accel.optimize(model, recipe, max_context=128, max_batch=2, verify=not recipes) as made:
        law_every_target(made, np.median if recipes else np.max)
        per_token = 8 + 2 * 2 * 2 * 10 * 4 + 2 * (8 + 10 * 4 / 4)  # of layer 1: label, mean
        if not recipes:
            assert made.report["kv_bytes_per_token"] == per_token


test_options_that_make_no_sense = refuses(
    "kv.select.clusterkv",
    ({"size": 0}, "kv.select.clusterkv: size is 0; give at least 1"),
    ({"every": 90}, "kv.select.clusterkv: every is 90; give a multiple of size = 80"),
    ({"every": 0}, "kv.select.clusterkv: every is 0; give at least 1"),
    ({"sinks": -1}, "kv.select.clusterkv: sinks is -1; give at least 0"),
    ({"sinks": 1024}, "kv.select.clusterkv: sinks is 1024; give fewer than tokens_read = 1024"),
    ({"tokens_read": 0}, "kv.select.clusterkv: tokens_read is 0; give at least 1"),
    ({"rounds": -1}, "kv.select.clusterkv: rounds is -1; give 0 to 100"),
    ({"rounds": 1000}, "kv.select.clusterkv: rounds is 1000; give 0 to 100"),
    ({"page": 16}, "page"),
)


def test_block_codecs_are_refused():
    recipe = {"kv.select": {"use": "clusterkv", **Clusterkv.small}, "kv.codec": {"use": "kivi"}}
    with pytest.raises(PassError, match="moves blocks of them to others"):
        accel.optimize(models.tiny(), recipe, max_context=64)


def test_evicted_tokens_are_refused():
    recipe = {"kv.select": {"use": "clusterkv"}, "kv.score": {"use": "knorm"}}
    with pytest.raises(RecipeError, match="TOKENS_CONTIGUOUS"):
        accel.optimize(models.tiny(), recipe, max_context=64)
