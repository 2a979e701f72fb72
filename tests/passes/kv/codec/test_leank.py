"""LeanK: channels of the keys between sinks and window, learnt and dropped."""

from dataclasses import replace
from itertools import islice

import models
import numpy as np
import pytest
import torch

from accel.compiler.over_state import over_state
from accel.compiler.train.runs.fit import Fit, Inside
from accel.ir.axis import find_axes
from accel.ir.capture.capture import capture
from accel.ir.errors import PassError, RecipeError
from accel.ir.ops.attention import Form
from accel.ir.tables import Observed, Rows
from accel.passes.kv.codec._encode import Encode
from accel.passes.trained import write

from ....select_case import Selecting
from ....session_ways import close

AXIS = find_axes()["kv.codec"]
T, G, D = 48, 2, 8
NEEDED = torch.tensor([[1, 1, 0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1, 0, 0]], dtype=torch.bool)


def method_of(**options):
    return AXIS.build("leank", **{"sinks": 2, "window": 8, "group": 8, "alignment": 1, **options})


def rows(seed=0, needed=NEEDED):
    """Of a layer whose queries are large in the channels `needed` only, in a model that is this attention."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, n, T, D, generator=generator) for n in (2 * G, G, G))
    q = q * (0.01 + 3 * needed.float().repeat_interleave(2, 0)[:, None])
    layer = Observed(q, k, v, Form("causal", scale=D**-0.5), k)

    def last(instead=None):
        whole = (layer.weights() @ v[:, :, None]).flatten(1, 2)
        return (whole if instead is None else instead(0, layer)).transpose(1, 2).flatten(2)

    known = (torch.arange(T) >= 10).float()[None]
    return Rows(torch.zeros(1, T + 1), known, {0: layer}, last=last)


def test_training_finds_the_channels_that_queries_read():
    """In both stages; the loss of other channels, as many, is larger."""
    method = method_of(ratio=0.75)
    parts = method.start(rows(), 8, torch.Generator())
    alpha = parts[0]["alpha"].requires_grad_()
    optimiser = torch.optim.Adam([alpha], lr=0.02)
    assert method.loss(parts, rows(), 1.0).item() > 0.1  # of all alike the first ones stay
    for step in range(120):
        loss = method.loss(parts, rows(step), step / 120)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert torch.equal(method.channels_kept({0: alpha})[0], NEEDED)
    learnt, other = (
        float(method.loss({0: {"alpha": x.float()}}, rows(999), 1.0))
        for x in (alpha.detach(), NEEDED.roll(1, 1))
    )
    assert learnt < 0.01 and other > 20 * learnt


def test_attention_by_hand():
    """Keys before the sinks' end and in the window of a query are exact, others are weighted by alpha; a head that is
    dropped reads none of these.
    """
    method, told = method_of(), rows().layers[0]
    alpha = torch.rand(G, D, generator=torch.Generator().manual_seed(1))
    got = method.attend(told, alpha)
    few = method.attend(told, alpha, torch.tensor([True, False]))
    for t in range(T):
        between = [2 <= s <= t - 8 for s in range(t + 1)]
        for h in range(2 * G):
            by = [alpha[h // 2] if there else torch.ones(D) for there in between]
            keys = told.keys[0, h // 2, : t + 1] * torch.stack(by)
            odds = keys @ told.queries[0, h, t] * told.form.scale
            close(got[0, h, t], odds.softmax(0) @ told.values[0, h // 2, : t + 1])
            if h >= 2:
                odds = odds.masked_fill(torch.tensor(between), -torch.inf)
            close(few[0, h, t], odds.softmax(0) @ told.values[0, h // 2, : t + 1])


def test_the_loss_is_that_of_answers_alone():
    """As a share of what they are, and what channels cost; other tokens count for nothing."""
    method, told = method_of(), rows()
    alpha = torch.rand(G, D, generator=torch.Generator().manual_seed(1))
    want, got = told.last(), told.last(lambda _, x: method.attend(x, alpha))
    off = (got - want).square().sum(-1) / want.square().sum(-1)
    parts = {0: {"alpha": alpha}}
    close(method.loss(parts, told, 0.0), off[0, 10:].mean() + 0.06 * alpha.mean())
    one = torch.zeros(1, T)
    one[0, 40] = 1
    close(method.loss(parts, replace(told, known=one), 0.0), off[0, 40] + 0.06 * alpha.mean())
    assert off[0, 40] != off[0, 10:].mean()


def test_kept_channels_are_those_of_largest_alpha_in_aligned_numbers():
    """A head's number goes by all layers' alphas, the nearest multiple; a layer has one head with some."""
    generator = torch.Generator().manual_seed(0)
    alphas = {i: torch.rand(3, 64, generator=generator) / (1 + i) for i in (0, 4, 7)}
    least = torch.cat([a.flatten() for a in alphas.values()]).quantile(0.7)
    for alignment in (1, 8):
        method = method_of(ratio=0.7, alignment=alignment)
        told = method.constants({i: {"alpha": a} for i, a in alphas.items()})
        for layer, alpha in alphas.items():
            counts = [
                (int((a > least).sum()) + alignment // 2) // alignment * alignment for a in alpha
            ]
            if not any(counts):
                counts[int(alpha.amax(1).argmax())] = alignment
            want, values = [], []
            for head, (one, many) in enumerate(zip(alpha, counts, strict=True)):
                want += sorted(64 * head + c for c in one.topk(many).indices.tolist())
                values += [64 * head + c for c in range(64 * bool(many))]
            assert told[layer]["channels"].tolist() == want
            assert told[layer]["value_channels"].tolist() == values
            assert told[layer]["unread"].tolist() == [not many for many in counts]
        total = sum(len(t["channels"]) for t in told.values())
        assert abs(total - 0.3 * 9 * 64) <= 9 * alignment / 2 + 3 * alignment
    assert told[7]["unread"].sum() == 2 and told[0]["unread"].sum() == 0
    raw = method_of(ratio=0.0, alignment=5).channels_kept(alphas)
    assert all(x.all() for x in raw.values())


def test_examples_hide_what_they_ask_for():
    """One fact tells it; the bundled text of the row does not."""
    for example in islice(method_of().examples(0), 60):
        (fact,), number = example.facts, example.answer.strip()
        assert number.isdigit() and number in fact and example.answer not in example.question
        named = [
            word
            for word in fact.replace('"', " ").replace(",", " ").split()
            if word in example.question
        ]
        assert any(word[0].isupper() and word not in ("The", "What") for word in named)
    first, again, other = (next(method_of().examples(seed)) for seed in (0, 0, 1))
    assert first == again != other


@pytest.fixture(scope="module")
def program():
    program = over_state(capture(models.make("llama", 2), max_context=128))
    program.facts.max_batch = 2
    return program


@pytest.fixture(scope="module")
def file(program, tmp_path_factory):
    """Random alphas."""
    file = tmp_path_factory.mktemp("leank") / "alpha.safetensors"
    fit, generator = Fit(program, method_of()), torch.Generator().manual_seed(0)
    parts = fit.start(8, 0)
    for part in parts.values():
        part["alpha"].copy_(torch.rand(part["alpha"].shape, generator=generator))
    write(fit.method, file, parts, fit.names, {})
    return str(file)


def drive(program, count, **options):
    """Logits of two tokens after so many; no options: without a codec. And the bytes of keys and values."""
    program = program.copy()
    if options:
        Encode(method_of(**options)).run(program)
    case = Selecting(program)
    tokens = case.tokens(1, count + 2)
    with case.session() as session:
        session.run(tokens[:, :count])
        return session.run(tokens[:, count:]), session.stats["kv_bytes"]


def test_sinks_and_window_are_exact_and_ratio_0_is_the_model(program, file):
    whole, size = drive(program, 40)
    assert np.array_equal(drive(program, 15, trained=file)[0], drive(program, 15)[0])
    close(drive(program, 40, trained=file, ratio=0.0)[0], whole)
    few, small = drive(program, 40, trained=file)
    assert np.abs(few - whole).max() > 1e-3 and small < size


def test_a_head_without_channels_reads_sinks_and_window_alone(program, tmp_path):
    """Of 40 tokens 2 to 25 are in blocks; its values of these are not held. With zeros for keys it would read them."""
    fit, file = Fit(program, method_of()), tmp_path / "alpha.safetensors"
    parts = fit.start(8, 0)
    for part in parts.values():
        part["alpha"].copy_(torch.tensor([1.0, 0.0])[:, None].expand_as(part["alpha"]))
    write(fit.method, file, parts, fit.names, {})
    got, few = drive(program, 40, trained=str(file), ratio=0.5)
    tokens = torch.as_tensor(Selecting(program).tokens(1, 42))
    inside, method = Inside(program, tokens[:, :41], fit.keys), method_of(window=15, group=15)

    def logits(some):
        def instead(layer, x):
            exact, dropped = (
                method.attend(x, a, s)
                for a, s in ((torch.ones(G, x.keys.shape[3]), None), (parts[layer]["alpha"], some))
            )
            return torch.cat((exact[:, :, :40], dropped[:, :, 40:]), 2)

        return (inside(instead)[0, 40] @ head.float().T).detach().numpy()

    node = program.step.output_nodes()["logits"]
    while node.target is not torch.ops.aten.linear.default:
        node = node.args[0]
    head = program.params[str(node.args[1].target)]
    close(got[0, 0], logits(torch.tensor([True, False])))
    assert np.abs(got[0, 0] - logits(None)).max() > 1e-3
    assert few < drive(program, 40, trained=str(file), ratio=0.0)[1] - 24 * 8 * 4 * 2


def test_another_model_is_refused(program):
    with pytest.raises(PassError, match="the bundled file was trained for another model"):
        Encode(method_of()).run(program.copy())


@pytest.mark.parametrize(
    "options", [{"ratio": 1.0}, {"bits": 8}, {"alignment": 0}, {"sinks": -1}, {"window": 12}]
)
def test_what_makes_no_sense_is_refused(options):
    (name,) = options
    with pytest.raises(RecipeError, match=f"{name} is {options[name]}( and group 8)?; give"):
        method_of(**options)
