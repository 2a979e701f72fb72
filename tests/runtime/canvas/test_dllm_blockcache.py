"""dllm-blockcache: what a block's first call says does not depend on the cache."""

import numpy as np
import pytest

from ...diffusion_case import BLOCK, Fed, decoded, eager, prompts


def of_block(behind):
    """All slots in a block's first call, then the block, with what predicts its first slot, and what is `behind` it."""

    def feeds(before):
        at = np.arange(before.open.size)
        here = (at >= before.first - before.shift) & ((at < before.last) | behind)
        return here | (before.step == 0)

    return lambda: feeds


CASES = [Fed({}, of_block(False)), Fed({"cache": "prefix"}, of_block(True))]


@pytest.mark.parametrize("shift", [False, True], ids=["llada", "dream"])
@pytest.mark.few(1)
def test_a_blocks_first_call_is_the_uncached_one(shift):
    """All of a block at once: then nothing that is cached is read."""
    _, compiled = eager(shift)
    tables = [{"use": "dllm-blockcache", "cache": cache} for cache in ("prefix", "dual")]

    def found(threshold):
        given = {"block": BLOCK, "threshold": threshold}
        return [
            decoded(compiled, "dllm-threshold", prompts(), canvas=canvas, **given)
            for canvas in ("whole", *tables)
        ]

    whole, *cached = found(0.0)
    assert whole[1] == [3, 3] and cached == [whole] * 2
    assert len({str(one) for one in found(1.01)}) == 3, "the control: later calls read it"
