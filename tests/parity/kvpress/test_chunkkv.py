"""`chunkkv` against ChunkKVPress, which keeps whole chunks and so not always as many tokens as a budget."""

import pytest

from accel.passes.kv.refine.chunkkv import ChunkKV
from accel.passes.kv.score.knorm import KNorm

from ...kv_slots import choose, sets
from ..presses import LENGTHS, RATIOS, Prompt, kvpress


@pytest.mark.parametrize("length", LENGTHS)
def test_the_same_chunks_stay(length):
    """The press takes the chunks of the first row for all, so a row alone."""
    prompt = Prompt.of(length, batch=1, seed=length)
    x = prompt.slots(KNorm())
    for ratio in RATIOS:
        press = kvpress.ChunkKVPress(kvpress.KnormPress(ratio), chunk_length=6)
        theirs = prompt.left(press)
        assert theirs[0][0] == theirs[0][1] and len(theirs[0][0]) < length
        mine = choose(x, len(theirs[0][0]), KNorm(), refine=ChunkKV(chunk=6, pooling="mean"))
        assert sets(mine) == theirs
        whole = choose(x, len(theirs[0][0]), KNorm())
        assert sets(whole) != theirs, "the control"
