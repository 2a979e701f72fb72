"""gateskip: gates that weigh branches, and tokens that leave them out, against plain gates on transformers' module."""

import numpy as np
import pytest
import torch

import accel
from accel.compiler.pipeline import pipeline
from accel.ir.errors import PassError, RecipeError
from accel.passes import run
from accel.passes.depth.gateskip import GateSkip

from ...depth_case import NEVER, far, module_of, program_of
from ...router_case import file_of_part, opened, part, ran_by, routed_oracle, soft, trained, unit

COUNT, PROMPT, BOTH = 3, 6, ("attn", "mlp")
TOKENS = np.random.default_rng(5).integers(3, 90, (2, 10))
TEXT = torch.from_numpy(np.random.default_rng(6).permutation(72).reshape(3, 24) + 3)  # no ties


def gate_of(parts, target, layer, x):
    down, up, bias = (parts[layer][f"{target}.{n}"] for n in ("down", "up", "bias"))
    return torch.sigmoid((up @ (down @ unit(x).mT)).mT + bias)


def plain(name, tokens, parts, least):
    """The module with branches weighed, and left out by tokens that are no more important than `least`."""

    def factor(target, layer, x):
        gate = gate_of(parts, target, layer, x)
        return gate * (gate.mean(-1, keepdim=True) > least.get((target, layer), -1))

    return routed_oracle(name, module_of(COUNT, name), tokens, factor, BOTH)


def limits(name, parts, ratio):
    """The quantile of each branch's importances over the text, whose tokens left out branches before."""
    least = {}

    def factor(target, layer, x):
        gate = gate_of(parts, target, layer, x)
        important = gate.mean(-1)
        least[target, layer] = np.quantile(important.detach().numpy(), ratio)
        return gate * (important > least[target, layer])[..., None]

    routed_oracle(name, module_of(COUNT, name), TEXT.numpy(), factor, BOTH)
    return least


def built(name="llama", on="eager", **options):
    table = {"use": "gateskip", **trained(name, COUNT, "gateskip"), **options}
    return accel.optimize(
        *(module_of(COUNT, name), {"depth": table}),
        target=on,
        max_context=64,
        max_batch=2,
        verify=False,
        calibration=torch.cat((TEXT, TEXT[:1])),  # the last row is another measure's
    )


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "on"), [("llama", "onnx"), ("gpt_neox", "eager")])
def test_it_is_the_plain_gate(name, on):
    """In a prompt and token by token, for two rows and for each alone. The control: limits of other layers."""
    parts = part(name, COUNT, "gateskip")
    with built(name, on, ratio=0.4) as compiled:
        least = limits(name, parts, 0.4)
        want = plain(name, TOKENS, parts, least)
        assert far(ran_by(compiled, TOKENS, PROMPT), want) < 1e-4
        assert far(ran_by(compiled, TOKENS[:1], PROMPT), want[:1]) < 1e-4
        gated = plain(name, TOKENS, parts, {})
        assert far(ran_by(compiled, TOKENS, PROMPT, threshold=NEVER), gated) < 1e-4
        turned = {(t, i): least[t, (i + 1) % COUNT] for t, i in least}
        assert min(far(plain(name, TOKENS, parts, turned), want), far(gated, want)) > 1e-2


@pytest.mark.few(1)
@pytest.mark.parametrize("gates", ["trained", "open"])
def test_a_ratio_of_0_is_the_gated_model_and_with_open_gates_the_base_bit_for_bit(gates):
    whole = opened("llama", COUNT, "gateskip") if gates == "open" else {}
    base = accel.optimize(
        module_of(COUNT), "base", target="eager", max_context=64, max_batch=2, verify=False
    )
    with built(ratio=0.0, **whole) as compiled, base:
        got, want = (ran_by(one, TOKENS, PROMPT) for one in (compiled, base))
        assert np.array_equal(got, want) is (gates == "open")
        assert far(got, plain("llama", TOKENS, part("llama", COUNT, "gateskip"), {})) < 1e-4 or (
            gates == "open"
        )


def test_a_token_that_leaves_attention_out_is_attended_to():
    """Its keys and values are of its stream: another token there changes what comes behind."""
    parts = part("llama", COUNT, "gateskip")
    with built(ratio=0.9) as compiled:
        other = TOKENS.copy()
        other[:, PROMPT] = (other[:, PROMPT] + 1) % 90
        found = [ran_by(compiled, t, PROMPT, threshold=0.5)[:, -1] for t in (TOKENS, other)]
        least = limits("llama", parts, 0.9)
        gone = []

        def factor(target, layer, x):
            important = gate_of(parts, target, layer, x).mean(-1)
            gone.append(important[:, PROMPT] <= least[target, layer])
            return gate_of(parts, target, layer, x) * (important > least[target, layer])[..., None]

        routed_oracle("llama", module_of(COUNT), TOKENS, factor, BOTH)
        assert torch.stack(gone).float().mean() > 0.5
        assert far(*found) > 1e-5


def test_training_begins_near_the_model_and_leaves_out_more_and_more():
    one = soft("llama", COUNT, "gateskip")
    ids, parts = torch.from_numpy(TOKENS), one.start(6, 0)
    x = torch.randn(2, 10, parts[0]["attn.down"].shape[1])
    router = {n: parts[0][f"attn.{n}"] for n in ("down", "up", "bias")}
    for progress, share in ((0.0, 0.0), (0.5, 0.1), (1.0, 0.2)):
        by, cost = one.method.soft(x, progress, **router)
        assert cost == pytest.approx(float(gate_of(parts, "attn", 0, x).square().mean()), rel=1e-4)
        assert float((by == 0).all(-1).float().mean()) == pytest.approx(share, abs=0.06)
    with torch.no_grad():
        loss = one.logits(ids, parts, 0.0)[0]
    assert far(loss.numpy(), one.logits(ids)[0].numpy()) < 0.1
    assert one.method.price(torch.tensor(0.5)) == pytest.approx(0.05)


def test_a_build_without_gates_or_with_those_of_another_model_is_refused():
    made = program_of(COUNT, TEXT)
    with pytest.raises(PassError, match="gateskip: .*train it: accel-compile train gateskip"):
        run(made, GateSkip().steps()[:1], done=pipeline())
    with pytest.raises(PassError, match="was trained for another model"):
        built("gpt_neox", trained=trained("llama", COUNT, "gateskip")["trained"])
    parts = {i: dict(p) for i, p in part("llama", COUNT, "gateskip").items()}
    parts[1]["attn.up"] = parts[1]["attn.up"][:, :-1]
    with pytest.raises(PassError, match=r"has 1.attn with down, up of the widths \[\d+, \d+\]"):
        built(trained=file_of_part("llama", COUNT, "gateskip", parts))


@pytest.mark.parametrize("ratio", [-0.1, 1.0])
def test_bad_ratios_are_refused(ratio):
    with pytest.raises(RecipeError, match=f"ratio is {ratio}; give"):
        GateSkip(ratio=ratio)
