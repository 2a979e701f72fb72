"""`keydiff` against KeyDiffPress."""

from accel.passes.kv.score.keydiff import KeyDiff

from ..presses import agree, kvpress


def test_the_same_tokens_stay():
    agree(KeyDiff(), kvpress.KeyDiffPress)
