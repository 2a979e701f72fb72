"""Modules of papers that are no methods: captured like any decoder, and refused where they are none."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accel

V, E, HEADS = 50, 32, 4


class Rational(nn.Module):
    """P(x) / Q(x) of degrees 5 and 4, with coefficients of groups of channels (KAT)."""

    def __init__(self, groups=4):
        super().__init__()
        self.above = nn.Parameter(0.5 * torch.randn(groups, 6))
        self.below = nn.Parameter(0.5 * torch.randn(groups, 4))

    def forward(self, x):
        y = x.unflatten(-1, (len(self.above), -1))
        powers = torch.stack([y**n for n in range(6)], -1)
        above = (powers * self.above[:, None]).sum(-1)
        below = (powers[..., 1:5].abs() * self.below.abs()[:, None]).sum(-1)
        return (above / (1 + below)).flatten(-2)


class Decoder(nn.Module):
    """Two layers; `size`: channels of a query and a key, of a value E / HEADS."""

    def __init__(self, activation, size=E // HEADS):
        super().__init__()
        self.size = size
        self.embed = nn.Embedding(V, E)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "qk": nn.Linear(E, 2 * HEADS * size),
                    "v": nn.Linear(E, E),
                    "up": nn.Linear(E, 2 * E),
                    "act": activation(),
                    "down": nn.Linear(2 * E, E),
                }
            )
            for _ in range(2)
        )
        self.head = nn.Linear(E, V)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            parts = layer["qk"](x).unflatten(-1, (2, HEADS, self.size)).unbind(2)
            q, k = (part.transpose(1, 2) for part in parts)
            v = layer["v"](x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + mixed.transpose(1, 2).flatten(2)
            x = x + layer["down"](layer["act"](layer["up"](x)))
        return self.head(x)


@pytest.mark.parametrize(
    "module", [lambda: Decoder(Rational), lambda: Decoder(nn.GELU, size=2)], ids=["KAT", "strips"]
)
@pytest.mark.few(1)
def test_logits_are_the_modules(module):
    torch.manual_seed(0)
    one = module().eval()
    tokens = np.random.default_rng(0).integers(0, V, (2, 9))
    with torch.no_grad():
        want = one(torch.from_numpy(tokens)).numpy()
    with accel.optimize(one, target="eager", max_context=32) as model, model.session(2) as session:
        several = session.run(tokens[:, :6])
        single = [session.run(tokens[:, n : n + 1]) for n in range(6, 9)]
        assert len(model.facts.layers) == 2, "each attends"
    found = np.concatenate([several, *single], 1)
    np.testing.assert_allclose(found, want, atol=1e-4, rtol=1e-3)
    assert np.abs(found - np.roll(want, 1, 1)).max() > 0.1
