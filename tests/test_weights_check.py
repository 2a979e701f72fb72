"""Weights that are not numbers: the error names the tensor, whatever it is stored in."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import accel
from accel.ir.errors import CaptureError

SICK = "model.layers.1.mlp.down_proj.weight"


def llama(value: float = 0.5):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.get_parameter(SICK)[3, 5] = value
    return model


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_the_tensor_is_named(value):
    kind = "NaN" if value != value else "inf"
    with pytest.raises(CaptureError, match=rf"{SICK} \[16, 24\] holds {kind} \(1 of 384") as error:
        accel.optimize(llama(value), max_context=32, target="eager")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_also_in_a_directory_and_in_half_precision(tmp_path, dtype):
    llama(float("nan")).to(dtype).save_pretrained(tmp_path / "m")
    with pytest.raises(CaptureError, match=f"{SICK} .* holds NaN"):
        accel.optimize(tmp_path / "m", max_context=32)


@pytest.mark.long
def test_large_weights_are_numbers():
    """Their sum is none in half precision, and does not stand for them."""
    model = llama(60000.0).half()
    with torch.no_grad():
        model.get_parameter(SICK)[4] = 60000.0
        model.get_parameter(SICK)[5] = 60000.0
    assert not model.get_parameter(SICK).half().sum().isfinite()
    with accel.optimize(model, max_context=32, target="eager", verify=False) as compiled:
        assert compiled.generate([3, 4], max_new_tokens=2).tokens


def test_numbers_that_overflow_in_the_forward_are_not_the_weights():
    model = llama()
    with torch.no_grad():
        model.lm_head.weight.fill_(3e38)
    with pytest.raises(
        CaptureError, match="own logits are not all numbers.*though its weights are"
    ):
        accel.optimize(model, max_context=32, target="eager")
