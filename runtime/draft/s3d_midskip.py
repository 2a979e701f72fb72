"""S3D (arXiv:2405.20314), its layer skipping: self-speculative decoding; the first and the last layers draft, without
those in the middle, and all layers verify, with one cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.draft import Drafters
from accel.runtime.draft._by_self import BySelf, cost_of
from accel.runtime.draft._midskip import MidSkip
from accel.runtime.session.session import Session


@dataclass(frozen=True)
class S3dMidskip(MidSkip):
    """A drafted token runs the `first` and the `last` layers, the final norm and the LM head; where both are 0, half of
    the layers, one more of the first than of the last where they are odd.

    The recipe gets `depth = by-call`, which makes each layer conditional and skips none by default.
    """

    def open(self, session: Session, rows: Sequence[Row], context: DecodeContext) -> Drafters:
        layers = self.layers(context)
        return BySelf(
            session, rows, context, cost_of(context, float(layers.mean())), run_layers=layers
        )
