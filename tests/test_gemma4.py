"""Gemma 4 in the forms that its checkpoints have: shared keys, experts, values that are keys."""

import coverage
import pytest
import torch
from transformers import CONFIG_MAPPING

import accel
from accel.compiler.smoke.clone import shrunk
from accel.compiler.smoke.tiny_models import randomise, small_config

if "gemma4_text" not in CONFIG_MAPPING:
    pytest.skip("this transformers has no Gemma 4", allow_module_level=True)

SIX = [*["sliding_attention"] * 5, "full_attention"]
FORMS = {
    "E2B": {
        "num_hidden_layers": 12, "layer_types": SIX * 2, "num_kv_shared_layers": 6, "use_double_wide_mlp": True,
        "final_logit_softcapping": 3.0, "per_layer_config": {5: {"head_dim": 48}, 11: {"head_dim": 48}},
    },
    "26B-A4B": {
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 20,
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "attention_k_eq_v": True,
        "per_layer_config": {5: {"head_dim": 48, "num_key_value_heads": 1}},
    },
    "31B": {
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "attention_k_eq_v": True,
        "per_layer_config": {5: {"head_dim": 48, "num_key_value_heads": 1}},
    },
}  # fmt: skip


def made(form):
    from transformers import AutoModelForCausalLM

    return randomise(
        AutoModelForCausalLM.from_config(small_config("gemma4_text", **FORMS[form])), form
    )


LONG = {"E2B", "26B-A4B"}  # which take 10 seconds and more


@pytest.mark.parametrize(
    "form", [pytest.param(f, marks=pytest.mark.long) if f in LONG else f for f in FORMS]
)
def test_a_form_is_right(form):
    model = made(form)
    with accel.optimize(model, max_context=64, max_batch=3) as compiled:
        errors = coverage.check(model, compiled)
        shared = [layer.shares for layer in compiled.facts.layers]
    assert max(errors.values()) < coverage.TOLERANCE, errors
    assert shared == ([None] * 6 + [4] * 5 + [5] if form == "E2B" else [None] * 6)


def test_a_clone_keeps_what_single_layers_have_of_their_own():
    config = small_config("gemma4_text")
    assert {n: own["head_dim"] for n, own in config.to_dict()["per_layer_config"].items()} == {
        "5": 48
    }
    whole = CONFIG_MAPPING["gemma4_text"]()
    small = shrunk(whole, 6, ("head", "vocab", "window"))
    layers = [
        small.per_layer_config[kind].head_dim for kind in ("sliding_attention", "full_attention")
    ]
    assert layers == [16, 32]


@pytest.mark.parametrize("kind", ["gemma4_assistant", "gemma4_unified_assistant"])
def test_a_drafter_of_another_model_is_refused(kind):
    result = coverage.measure(kind)
    assert result.state == "refused" and "drafts for another model" in result.why


def test_keys_of_several_tokens_are_refused():
    result = coverage.measure("deepseek_v4")
    assert result.state == "refused" and "compressor makes one key of 128 tokens" in result.why


@pytest.mark.parametrize(
    ("kind", "most"),
    [("minimax_m3_vl_text", 48), pytest.param("qwen4_exp_text", 51, marks=pytest.mark.long)],
)
@pytest.mark.long
def test_a_choice_of_blocks_is_exact_while_it_takes_all(kind, most):
    from accel.compiler.smoke.clone import own_logits
    from accel.compiler.smoke.tiny_models import small_model
    from accel.ir.capture.inspect import inspect

    model = small_model(kind)
    assert [limit for limit, _ in inspect(model, 200).limits] == [most]
    tokens = torch.randint(3, 100, (1, most + 30), generator=torch.Generator().manual_seed(0))
    with accel.optimize(model, target="eager", max_context=200, verify=False) as compiled:
        assert compiled.facts.max_context == most
        got = torch.from_numpy(compiled.logits(tokens[:, :most].numpy()))
    want = own_logits(model, tokens[:, :most])
    torch.testing.assert_close(got, want, atol=2e-3, rtol=2e-3)
