"""Routers whose experts are equally good: both sides take the first, a note says so, and where rounding decides, the
error does.
"""

import numpy as np
import pytest
import torch

import accel
from accel.compiler.smoke.clone import own_logits
from accel.ir import program, ties
from accel.ir.errors import Miscompiled, PassError
from accel.ir.ties import FirstOfTies, topk


def mixture(experts: int, router: float):
    """A Mixtral whose router's rows are all the same."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=61, hidden_size=40, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=experts, num_experts_per_tok=2, max_position_embeddings=64,
    )  # fmt: skip
    model = MixtralForCausalLM(config).eval()
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight.copy_(torch.randn(40) * router)
    return model


def last_of_ties(x, k, dim=-1, largest=True, sorted=True):
    values, places = topk(x.flip(dim), k, dim, largest)
    return values, x.shape[dim] - 1 - places


def test_the_first_of_equal_values_is_taken_and_others_as_torch_does():
    x = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert topk(x, 2)[1].tolist() == [[1, 2], [0, 1]]
    assert topk(x, 2, -1, False)[1].tolist() == [[0, 3], [0, 1]]
    apart = torch.rand(3, 7, 5)
    for dim, largest in ((1, True), (-1, False)):
        got, want = topk(apart, 3, dim, largest), torch.topk(apart, 3, dim, largest)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    with FirstOfTies() as seen:
        assert x.topk(2).indices.tolist() == [[1, 2], [0, 1]]
        apart.topk(3)
        apart.topk(5)  # all of them: no choice
    assert (seen.tied, seen.choices) == (2, 23)


@pytest.mark.long
def test_a_router_of_zeros_is_compared_past_its_ties():
    model = mixture(8, 0.0)
    with accel.optimize(model, max_context=32) as compiled:
        (note,) = [n for n in compiled.report["notes"] if "ties" in n]
        assert "accel takes the first of equal experts" in note
        assert compiled.report["errors"]["onnx"] < 1e-5
        tokens = np.arange(5, 17)[None]
        assert (
            np.abs(compiled.logits(tokens) - own_logits(model, torch.tensor(tokens)).numpy()).max()
            < 1e-4
        )


@pytest.mark.long
def test_where_rounding_decides_the_error_names_the_tie(monkeypatch):
    """Of two orders of the same sums one takes other experts: here the program's own takes the last."""
    monkeypatch.setattr(program, "topk", last_of_ties)
    monkeypatch.setattr(ties, "topk", last_of_ties)
    with pytest.raises(PassError, match="experts are equally good.*load trained weights") as error:
        accel.optimize(mixture(8, 0.0), max_context=32)
    assert not isinstance(error.value, Miscompiled), "no fault of accel's"


@pytest.mark.long
def test_a_trained_router_has_no_note():
    model = mixture(4, 0.0)
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight.normal_()
    with accel.optimize(model, target="eager", max_context=32, verify=False) as compiled:
        assert not any("ties" in n for n in compiled.report["notes"])
