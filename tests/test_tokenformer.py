"""TokenFormer: captured like any model, with the formulas of its paper, and grown without a change."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import accel
from accel.ir.capture.arch.tokenformer import Pattention, TokenFormer, TokenFormerConfig

CONFIG = TokenFormerConfig(60, 32, 24, 64, 2, 4)
TOKENS = np.random.default_rng(0).integers(0, 60, (2, 11))


@pytest.fixture(scope="module")
def module():
    torch.manual_seed(0)
    return TokenFormer(CONFIG).eval()


@torch.no_grad()
def test_pattention_is_the_papers():
    torch.manual_seed(1)
    one, x = Pattention(8, 6, 10), torch.randn(3, 8)
    with torch.no_grad():
        scores = x @ one.keys.T
        weights = F.gelu(10**0.5 * scores / scores.pow(2).sum(-1, keepdim=True).sqrt())
        np.testing.assert_allclose(one(x), weights @ one.values, atol=1e-6)
        assert not torch.allclose(one(x), scores.softmax(-1) @ one.values, atol=1e-2)
        assert one(torch.zeros(1, 8)).isfinite().all()
        before = one(x)
        one.keys.mul_(3.0)
        np.testing.assert_allclose(one(x), before, atol=1e-6, err_msg="only directions count")


@pytest.mark.parametrize("target", ["eager", "onnx"])
def test_prompts_and_single_tokens_are_one_pass_of_the_module(module, target, tmp_path):
    out = {"out": tmp_path / "out"} if target == "onnx" else {}
    with torch.no_grad():
        want = module(torch.from_numpy(TOKENS)).numpy()
    with accel.optimize(module, "base", target=target, max_context=32, **out) as model:
        assert len(model.facts.layers) == 2
        with model.session(2) as session:
            parts = [session.run(TOKENS[:, :6])]
            parts += [session.run(TOKENS[:, n : n + 1]) for n in range(6, 11)]
    np.testing.assert_allclose(np.concatenate(parts, 1), want, atol=1e-4, rtol=1e-3)


@torch.no_grad()
def test_it_grows_without_a_change():
    """The control: the scale of the tokens that there are now would change all."""
    torch.manual_seed(2)
    module = TokenFormer(CONFIG).eval()
    tokens = torch.from_numpy(TOKENS)
    before, size = module(tokens), sum(p.numel() for p in module.parameters())
    module.grow(8)
    assert sum(p.numel() for p in module.parameters()) == size + 2 * 5 * 8 * 64
    np.testing.assert_allclose(module(tokens), before, atol=1e-5)
    for one in module.modules():
        if isinstance(one, Pattention):
            one.scale.fill_(len(one.keys) ** 0.5)
    assert (module(tokens) - before).abs().max() > 1e-2


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="hidden_size 30 must be a multiple of 4 heads"):
        TokenFormerConfig(60, 30, 24, 64, 2, 4)
