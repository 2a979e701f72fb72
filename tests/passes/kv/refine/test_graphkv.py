"""GraphKV: against a double loop, and what the paper says of keys that are alike."""

import numpy as np
import pytest
import torch

from ....kv_slots import B, G, build, choose, sets, slots
from ....laws.test_kv_refine import refined


def looped(x, share, neighbours, rounds):
    """The page's rule, one pair of tokens at a time."""
    scores, keys = x["scores"].double().numpy().copy(), x["keys"].double().numpy()
    for row, head in np.ndindex(B, G):
        real = np.flatnonzero(x["positions"][row, head].numpy() >= 0)
        s, k = scores[row, head], keys[row, head]
        kept = int(x["counts"][row, head])
        count = int(np.ceil(round(share * kept, 9)))
        near = {0: int(np.ceil(kept / count)), -1: len(s)}.get(neighbours, neighbours)
        for _ in range(rounds):
            s -= min(0, s.min())
            sources = sorted(real, key=lambda j: -s[j])[:count]
            factor = np.ones_like(s)
            for i in sources:
                cosine = {
                    j: max(0, k[i] @ k[j] / np.linalg.norm(k[i]) / np.linalg.norm(k[j]))
                    for j in real
                    if j != i
                }
                for j in sorted(cosine, key=lambda j: -cosine[j])[:near]:
                    factor[j] *= max(1 - cosine[j], 1e-6)
            s *= factor
    return scores


@pytest.mark.parametrize("neighbours", [0, -1, 2])
@pytest.mark.parametrize("base", ["snapkv", "knorm"])
def test_is_the_double_loop(neighbours, base):
    for rounds, share in ((1, 0.3), (3, 0.5), (0, 0.3)):
        method = build("refine", "graphkv", neighbours=neighbours, rounds=rounds, share=share)
        x = slots(rounds, recent=(16, 9, 3))
        given = refined(method, x, build("score", base), kept=7)
        want = looped({**given}, share, neighbours, rounds)
        found = method(**given)
        if rounds:
            real = (given["positions"] >= 0).numpy()
            np.testing.assert_allclose(found.numpy()[real], want[real], rtol=1e-3, atol=1e-6)
            assert not np.allclose(want[real], given["scores"].numpy()[real]), "the control"
        else:
            assert torch.equal(found, given["scores"])


def test_orthogonal_keys_change_nothing_and_copies_lose():
    x = slots(0, base=(0, 0, 0), recent=(6, 6, 6))
    x["recent_k"] = torch.eye(16)[None, None, :, :6].expand(B, G, -1, -1).clone()
    x["kept_mass.recent"] = torch.linspace(6, 1, 16).expand(B, G, -1).clone()
    method, score = build("refine", "graphkv"), build("score", "h2o", recent=0)
    given = refined(method, x, score, kept=4)
    real = given["positions"] >= 0
    assert torch.equal(method(**given)[real], given["scores"][real])
    assert sets(choose(x, 4, score, refine=method))[0][0] == {0, 1, 2, 3}
    x["recent_k"][:, :, 1] = x["recent_k"][:, :, 5] = x["recent_k"][:, :, 0]  # 0 and 1 are sources
    given = refined(method, x, score, kept=4)
    found = method(**given)
    assert (found[..., 9 + 5] < 1e-4).all() and (found <= given["scores"]).all()
    assert sets(choose(x, 3, score, refine=method))[0][0] == {0, 2, 3} - {0} | {4}
