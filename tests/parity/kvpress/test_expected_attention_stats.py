"""`expected-attention-stats` against ExpectedAttentionStatsPress, by the same mean and covariance."""

import torch

from accel.passes.kv._shared.rotation import Rotation
from accel.passes.kv.inputs.mean_rotation import mean_rotation
from accel.passes.kv.score.expected_attention_stats import ExpectedAttentionStats

from ..presses import agree, kvpress
from ..query_moments import tables


def test_the_same_tokens_stay():
    method = ExpectedAttentionStats(future=7, epsilon=0.02)
    made = {}

    def operands(prompt):
        r, width = torch.Generator().manual_seed(0), prompt.module.head_dim
        heads = prompt.queries.shape[1]
        root = torch.randn(heads, width, width, generator=r) / width**0.5
        made["mean"] = torch.randn(heads, width, generator=r)
        made["covariance"] = root @ root.transpose(1, 2)
        cos, sin = tables(prompt)
        further = Rotation(None, cos, sin, False, 1.0, (None, None)).mean(method.future)
        seen = torch.full((prompt.keys.shape[0],), prompt.length)
        turn = mean_rotation(seen, (cos, sin, *further), False, width)
        return {"mean_rotation": turn, **{f"table.{n}": t for n, t in made.items()}}

    def press(ratio):
        found = kvpress.ExpectedAttentionStatsPress(ratio, n_future_positions=7, epsilon=0.02)
        layers = 8  # more than the model has
        found.mu = made["mean"].expand(layers, -1, -1)
        found.cov = made["covariance"].expand(layers, -1, -1, -1)
        return found

    agree(method, press, operands=operands)
