"""S3D (arXiv:2405.20314): self-speculative decoding; one pass of the first and the last layers over the newest token
and masks drafts several tokens, and all layers verify, with one cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from accel.ir.axis import option
from accel.ir.errors import InputError
from accel.runtime.call import Logits
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.draft import Drafters
from accel.runtime.draft._by_self import BySelf, cost_of
from accel.runtime.draft._midskip import MidSkip
from accel.runtime.session.session import Session
from accel.runtime.speculation.guard import steps_of


@dataclass(frozen=True)
class S3d(MidSkip):
    """A draft is one call of the newest token and `masks` masks behind it, one token for each and one more. Token i of
    the call says the one i + 1 after the newest, whatever those between become. The call runs the `first` and the
    `last` layers, the final norm and the LM head; where both are 0, half of the layers, one more of the first than of
    the last where they are odd. Its cache entries are rewound and written again by the verification call.

    The embeddings of the masks, and a low-rank product in place of the layers that are left out, are trained beside
    the model (`accel-compile train s3d`). `trained`: their file; empty: the one that a build finds. Without masks
    (0) nothing trained is used.

    The recipe gets `depth = by-call`, which makes each layer conditional and skips none by default.
    """

    masks: int = option(4, least=0, most=64)
    trained: str = ""

    key: ClassVar[str] = "s3d"
    lacks = "training of the model's own weights, and trees of the likeliest tokens of each mask"

    def steps(self) -> list[Any]:
        """See Base."""
        from accel.passes.state.masks import MaskRows, Shortcut

        rows = MaskRows(self)
        return [rows, Shortcut(self, rows.shortcut)] if self.masks else []

    def open(self, session: Session, rows: Sequence[Row], context: DecodeContext) -> Drafters:
        layers = self.layers(context)
        if session.token_ids - session.vocab_size < self.masks:
            raise InputError(
                f"{self.full_name} drafts by {self.masks} masks, which this model was not built with; build with "
                f"draft = {self.use}"
            )
        tokens, count = self.masks + 1, len(rows)
        cost = cost_of(context, float(layers.mean()))
        if context.costs is not None:
            cost *= steps_of(context.costs, count * tokens, context.costs, count)
        return Simultaneous(
            session, rows, context, cost / tokens, masks=self.masks, run_layers=layers
        )


class Simultaneous(BySelf):
    """All tokens of a draft are said by one call, whose masks are the last ids behind the vocabulary."""

    def __init__(
        self,
        session: Session,
        rows: Sequence[Row],
        context: DecodeContext,
        draft_cost: float,
        masks: int,
        **less: Any,
    ):
        super().__init__(session, rows, context, draft_cost, **less)
        self._masks = session.token_ids - masks + np.arange(masks)
        self._sizes: dict[int, int] = {}  # tokens of each row's draft, at most
        self._said: Logits = np.zeros((0, 0, 0), np.float32)
        self._depths = np.zeros(0, np.int64)  # of the token that is drafted next, of each row

    def most(self, row: int, limit: int) -> int:
        """See ByLogits."""
        self._sizes[row] = min(limit, 1 + self._masks.size)
        return self._sizes[row]

    def first(self, rows: list[int]) -> Logits:
        """See ByLogits."""
        self._held = self._session.lengths
        counts = np.zeros_like(self._held)
        counts[rows] = [self._sizes[i] for i in rows]
        width = int(counts.max())
        tokens = np.zeros((counts.size, width), np.int64)
        tokens[:, 1:] = self._masks[: width - 1]
        tokens[rows, 0] = [self.rows[i].seen[-1] for i in rows]
        lengths = None if (counts == width).all() else counts
        self._said = self._session.run(tokens, lengths, **self.less)
        self._depths = np.zeros(counts.size, np.int64)
        return self._said[:, :1]

    def further(self, tokens: dict[int, int]) -> Logits:
        """See ByLogits."""
        self._depths[list(tokens)] += 1
        return self._said[np.arange(self._depths.size), self._depths][:, None]
