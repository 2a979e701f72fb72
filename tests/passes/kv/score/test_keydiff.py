"""KeyDiff: what it must hold beyond the laws of its axis."""

import matrix
import pytest
import torch

from accel.passes.kv.score.keydiff import KeyDiff


@pytest.mark.long
def test_onnx_equals_the_oracle():
    case = matrix.Case("llama", (("kv.score", "keydiff"),))
    outcome = matrix.Matrix().run(case)
    assert outcome.kind == "equal", outcome.why


def test_it_ranks_as_the_sum_over_all_pairs():
    keys = torch.randn(2, 3, 20, 8, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(20).expand(2, 3, 20).clone()
    positions[1, :, 15:] = -1
    scores = KeyDiff()(keys, positions)
    unit = torch.nn.functional.normalize(keys, dim=-1)
    there = (positions >= 0).float()
    pairs = -((unit @ unit.transpose(-1, -2)) * there[:, :, None]).sum(-1)
    for b, count in ((0, 20), (1, 15)):
        assert torch.equal(scores[b, :, :count].argsort(-1), pairs[b, :, :count].argsort(-1))
    scaled = KeyDiff()(keys * torch.rand(2, 3, 20, 1), positions)
    assert torch.allclose(scaled, scores, atol=1e-5)  # the length of a key says nothing
    assert not torch.allclose(KeyDiff()(keys + 1, positions), scores, atol=1e-2)
