"""dllm-blockcache: what a block's first call says does not depend on the cache."""

import pytest

from ...diffusion_case import BLOCK, CACHES, Case, above, decoded, eager, prompts

CASES = [Case({"threshold": 0.5}, above(0.5))]


@pytest.mark.parametrize("shift", [False, True], ids=["llada", "dream"])
def test_a_blocks_first_call_is_the_uncached_one(shift):
    """All of a block at once: then nothing that is cached is read."""
    _, compiled = eager(shift)

    def found(threshold):
        given = {"block": BLOCK, "threshold": threshold}
        return [decoded(compiled, "dllm-blockcache", prompts(), cache=c, **given) for c in CACHES]

    same = decoded(compiled, "dllm-threshold", prompts(), block=BLOCK, threshold=0.0)
    assert same[1] == [3, 3] and found(0.0) == [same] * 3
    assert len({str(one) for one in found(1.01)}) == 3, "the control: later calls read it"
