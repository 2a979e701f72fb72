"""`h2o` against ObservedAttentionPress, which divides the mass by the queries that see the token and keeps no
newest tokens.
"""

from accel.passes.kv.score import Base

from ..presses import agree, kvpress


class Averaged(Base):
    def __call__(self, mass, positions, seen):
        return mass / (seen[:, None, None] - positions).clamp(min=1)


def test_the_same_tokens_stay():
    agree(Averaged(), kvpress.ObservedAttentionPress, attentions=True)
