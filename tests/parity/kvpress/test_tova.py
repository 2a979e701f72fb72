"""`tova` against TOVAPress, which keeps the last token."""

from accel.passes.kv.score.tova import TOVA

from ..presses import agree, kvpress


def test_the_same_tokens_stay():
    agree(TOVA(recent=1), kvpress.TOVAPress)
