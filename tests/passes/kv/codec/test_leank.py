"""LeanK: channels of the keys between sinks and window, learnt and dropped."""

import models
import numpy as np
import pytest
import torch

from accel.compiler.over_state import over_state
from accel.compiler.train.runs.fit import Fit
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
    """Of a layer whose queries are large in the channels `needed` only."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, n, T, D, generator=generator) for n in (2 * G, G, G))
    q = q * (0.01 + 3 * needed.float().repeat_interleave(2, 0)[:, None])
    layer = Observed(q, k, v, Form("causal", scale=D**-0.5), k)
    return Rows(torch.zeros(1, T + 1), torch.ones(1, T), {0: layer})


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


def test_the_loss_is_of_attention_by_hand():
    """Keys before the sinks' end and in the window of a query are exact, others are weighted by alpha."""
    method, told = method_of(), rows().layers[0]
    alpha = torch.rand(G, D, generator=torch.Generator().manual_seed(1))
    got = method.attend(told, alpha)
    for n, t in enumerate(range(10, T)):
        for h in range(2 * G):
            by = [
                alpha[h // 2] if 2 <= s <= t - 8 else torch.ones(D) for s in range(t + 1)
            ]  # fmt: skip
            keys = told.keys[0, h // 2, : t + 1] * torch.stack(by)
            odds = (keys @ told.queries[0, h, t] * told.form.scale).softmax(0)
            close(got[0, h, n], odds @ told.values[0, h // 2, : t + 1])
    want = method.attend(told, None)
    wrong = (got - want).square().sum() / want.square().sum()
    close(method.loss({0: {"alpha": alpha}}, rows(), 0.0), wrong + 0.06 * alpha.mean())


def test_kept_channels_are_those_of_largest_alpha_in_aligned_numbers():
    """A head's number goes by all layers' alphas, the nearest multiple; none has none."""
    generator = torch.Generator().manual_seed(0)
    alphas = {i: torch.rand(3, 64, generator=generator) / (1 + i) for i in (0, 4, 7)}
    least = torch.cat([a.flatten() for a in alphas.values()]).quantile(0.7)
    for alignment in (1, 8):
        method = method_of(ratio=0.7, alignment=alignment)
        told = method.constants({i: {"alpha": a} for i, a in alphas.items()})
        for layer, alpha in alphas.items():
            want = []
            for head, one in enumerate(alpha):
                raw = int((one > least).sum())
                many = max(alignment, (raw + alignment // 2) // alignment * alignment)
                want += sorted(64 * head + c for c in one.topk(many).indices.tolist())
            assert told[layer]["channels"].tolist() == want
        total = sum(len(t["channels"]) for t in told.values())
        assert abs(total - 0.3 * 9 * 64) <= 9 * alignment / 2 + alignment
    raw = method_of(ratio=0.0, alignment=5).channels_kept(alphas)
    assert all(x.all() for x in raw.values())


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
