"""double-sparsity: its channels and labels, what it equals at its limits, every target, and what is refused."""

import models
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import accel
from accel.ir.errors import PassError
from accel.ir.ops.attention import Form
from accel.ir.tables import Observed, Rows
from accel.passes.kv.select import Select
from accel.passes.kv.select import _pages as pages
from accel.passes.kv.select.double_sparsity import DoubleSparsity

from ....refused import refuses
from ....select_case import Selecting, built, constants, measured_for, scores
from ....session_ways import close, law_every_target, singles

B, G, R, S, D = 2, 2, 3, 30, 6


def rows(seed=0):
    r = torch.Generator().manual_seed(seed)
    q = torch.randn(B, G, R, D, generator=r)
    return q, torch.randn(B, G, S, 1, D, generator=r)


def method(**options):
    return built("double-sparsity", **options)


# Channels


def test_channels_are_ranked_by_what_they_add_to_a_tokens_own_logit():
    r = torch.Generator().manual_seed(3)
    q, k = torch.randn(2, 4, 9, D, generator=r), torch.randn(2, G, 9, D, generator=r)
    parts = [
        Rows(None, None, {1: Observed(q[[i]], k[[i]], k[[i]], Form("causal"))}) for i in (0, 1)
    ]
    found = DoubleSparsity().measure(parts)[1]["order"]
    for group in range(G):
        total = np.zeros(D)
        for row in range(2):
            for head in (2 * group, 2 * group + 1):
                for t in range(9):
                    total += np.abs(q[row, head, t].numpy() * k[row, group, t].numpy())
        assert found[group].tolist() == np.argsort(-total).tolist()
    last = DoubleSparsity().measure(parts[1:])[1]["order"]
    assert not torch.equal(found, last), "the first sample counts, too"


@pytest.mark.parametrize("labels", [True, False])
def test_scores_are_the_products_of_the_channels(labels):
    q, k = rows()
    order = constants(method(), G, D)["order"]
    found = scores(method(channels=3, labels=labels), q, k)
    want = np.zeros((B, G, R, S))
    for b, g, m, s in np.ndindex(*want.shape):
        want[b, g, m, s] = sum(q[b, g, m, c] * k[b, g, s, 0, c] for c in order[g, :3].tolist())
    close(found, want)
    mixed = torch.randperm(3, generator=torch.Generator().manual_seed(1))
    shuffled = torch.cat((order[:, mixed], order[:, 3:]), 1)
    again = method(channels=3, labels=labels)
    parts = again.summary(k, shuffled)
    close(again.score(q, parts, k.flatten(2, 3), shuffled), found)


@pytest.mark.parametrize("labels", [True, False])
def test_all_channels_are_exact_top_k(labels):
    q, k = rows(1)
    q = q[:, :, None].transpose(2, 3)  # [B,G,R,1,D]
    every, few = (method(channels=n, labels=labels) for n in (99, 2))
    order = constants(every, G, D)["order"]

    def chosen(one):
        parts = one.summary(k, order)
        queries = q.flatten(1, 2).transpose(1, 2)
        slots = torch.full((B,), S - 1)
        where = torch.arange(S).expand(B, -1)
        x = {"queries": queries, "positions": slots[:, None], "k_pos": where, "slots": slots}
        x |= {**parts, "keys": k.flatten(2, 3), "order": order}
        return pages.chosen(one, Form("causal"), G, list(parts), x)[:, :, 0]

    logits = (q[:, :, :, 0] @ k.squeeze(3).transpose(-1, -2)).amax(2)[..., : S - 1]
    want = logits.topk(6).indices.sort().values
    assert torch.equal(chosen(every)[..., 1:].sort().values, want)
    assert (chosen(every)[..., 0] == S - 1).all()
    assert not torch.equal(chosen(few)[..., 1:].sort().values, want)


def test_labels_change_nothing_but_memory(stateful):
    cases = [
        Selecting(stateful("llama"), method(labels=labels, channels=5)) for labels in (True, False)
    ]
    tokens = cases[0].tokens(2, 50)
    with cases[0].session(2) as a, cases[1].session(2) as b:
        for s in (a, b):
            s.run(tokens[:, :40], np.array([40, 33]))
        close(a.run(tokens[:, 40:45]), b.run(tokens[:, 40:45]))
        close(singles(a, tokens[:, 45:]), singles(b, tokens[:, 45:]))
    found = [{s.name: s.shape for s in case.program.state} for case in cases]
    assert found[0].items() - found[1].items() == {
        (f"pages.{i}.label", ("B", 2, "C/1", 5)) for i in (0, 1)
    }


# Targets


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Of two layers, the second of which chooses."""
    folder = tmp_path_factory.mktemp("table")
    model = models.make("llama", 2)
    from matrix import over_state

    from accel.ir.capture.capture import capture

    table = measured_for(method(), over_state(capture(model, max_context=128)), folder).table
    options = {"use": "double-sparsity", "tokens_read": 7, "dense_layers": 1, "channels": 3}
    recipe = {"kv": {"select": {**options, "table": table}}}
    with accel.optimize(model, recipe, max_context=128, max_batch=2, verify=True) as made:
        yield made


@pytest.mark.long
def test_every_way_through_a_session_is_that_of_the_oracle(compiled):
    law_every_target(compiled)


def test_labels_take_what_the_formula_says(compiled):
    width, groups, layers = 10, 2, 2
    assert compiled.report["kv_bytes_per_token"] == 8 + 4 * groups * (2 * layers * width + 3)


def test_the_bundled_table_ranks_all_channels():
    from reference_data import REFERENCE

    found = load_file(REFERENCE / "double-sparsity.safetensors")
    assert len(found) == 8
    for order in found.values():
        assert order.dtype == torch.int64 and order.shape == (2, 64)
        assert torch.equal(order.sort(1).values, torch.arange(64).expand(2, -1))


# Bad input


test_options_that_make_no_sense = refuses(
    "kv.select.double-sparsity",
    ({"page": 16}, "kv.select.double-sparsity: page is 16; give 1"),
    ({"channels": 0}, "kv.select.double-sparsity: channels is 0; give 1 to 4096"),
    ({"channels": 5000}, "kv.select.double-sparsity: channels is 5000; give 1 to 4096"),
    ({"tokens_read": 0}, "kv.select.double-sparsity: tokens_read is 0; give at least 1"),
    ({"labels": 1}, "not bool"),
)


def test_a_table_of_another_model_is_refused(stateful):
    with pytest.raises(PassError, match="the bundled file was measured for another model"):
        Select(method()).run(stateful("llama"))


def test_no_table_is_asked_for_where_no_layer_chooses(stateful):
    report = Select(method(dense_layers=9)).run(stateful("llama"))
    assert not report.changed and all("dense_layers is 9" in line for line in report.refused)
