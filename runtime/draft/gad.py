"""Generalized Aggressive Decoding (arXiv:2205.10350) and the drafter of SpecDec (arXiv:2203.16487): a model that sees
both ways fills a block of masks behind the text, in one call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np

from accel.ir.diffusion import Diffusion
from accel.ir.errors import InputError
from accel.ir.invariants import Invariant
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.draft import Base, Drafters, More
from accel.runtime.inputs.text import same_tokens
from accel.runtime.session.modes.encoder_input import EncoderInput
from accel.runtime.session.session import Session
from accel.runtime.speculation.follow import empty
from accel.runtime.speculation.guard import steps_of
from accel.runtime.tree import Tree

OWN = "diffusion"  # of accel.reference: the bundled model that fills masks


@dataclass(frozen=True)
class Gad(Base):
    """`path`: a masked-diffusion model with the tokens of the target, an artifact or a Hugging Face directory, which is
    compiled in the same build; empty: the bundled one, for the bundled model. `weights`: as of `model`. For an
    encoder-decoder it is one itself, whose decoder sees both ways: it reads the request's source by its own encoder.

    The length is the block: so many masks follow the text, each of which becomes its likeliest token, whatever the
    others become. An encoder-decoder's decoder reads the whole text again in each call, as in the papers. Another
    model runs the tokens that came since the call before, and the masks, so older keys and values do not see what
    came later.

    The bundled model learnt to fill masks anywhere. It has as many parameters as the bundled target, so its call costs
    more than two steps: the recipes `gad` and `specdec-nar` gain with a drafter that is much smaller.
    """

    path: str = ""
    weights: str = "int8"

    fills = True
    relies = frozenset({Invariant.CHAINS})

    def draft_folder(self) -> Path:
        return Path(self.path or str(files("accel.reference") / OWN)).expanduser()

    def open(self, session: Session, rows: Sequence[Row], context: DecodeContext) -> Drafters:
        draft_model = None if context.model is None else context.model.draft_model
        if context.model is None or draft_model is None or draft_model.facts.diffusion is None:
            raise InputError(
                "draft.gad: this model was built without a masked-diffusion model; build it again"
            )
        if not same_tokens(context.model.tokenizer, draft_model.tokenizer):
            raise InputError(
                "draft.gad: the model that fills masks has another tokenizer; build with one of the same tokens"
            )
        cost, opening = 0.0, 0.0
        if context.costs is not None:  # a block in one call
            theirs, count = draft_model.costs, len(rows)
            most = theirs.tokens[-1]
            cost = steps_of(theirs, count * most, context.costs, count) / most
            opening = steps_of(theirs, sum(row.prompt.size for row in rows), context.costs, count)
        own = empty(draft_model, len(rows))
        if draft_model.facts.encoder is not None:
            reads = session.observer(EncoderInput)
            if reads is None or not reads.encoded:
                raise InputError(
                    "draft.gad: the model that fills masks has an encoder and this session has no source for it; build "
                    "an encoder-decoder with it"
                )
            own.encode(reads.source, None if reads.encoder.features else reads.lengths)
        return _Blocks(
            own,
            draft_model.facts.diffusion,
            rows,
            session.vocab_size,
            cost,
            opening,
        )


class _Blocks(Drafters):
    def __init__(
        self,
        session: Session,
        diffusion: Diffusion,
        rows: Sequence[Row],
        vocab_size: int,
        cost: float,
        opening: float,
    ):
        self.draft_cost, self.opening = cost, opening
        self._session, self._rows, self._vocab = session, rows, vocab_size
        assert diffusion.mask is not None  # checked by the build
        self._mask, self._shift = diffusion.mask, int(diffusion.shift)
        self._again = (
            session.observer(EncoderInput) is not None
        )  # reads the whole text in each call
        self._text = np.zeros(len(rows), np.int64)  # tokens of each row that its slots hold

    @property
    def kv_bytes(self) -> int:
        return self._session.kv_most

    def draft(self, limits: Mapping[int, int], more: More) -> Mapping[int, Tree]:
        session, lengths = self._session, self._session.lengths
        seen = {i: self._rows[i].seen for i in limits}
        blocks = {i: min(most, session.max_context - seen[i].size) for i, most in limits.items()}
        blocks = {i: size for i, size in blocks.items() if size > 0}
        if not blocks:
            return {}
        start, counts = lengths.copy(), np.zeros_like(lengths)
        for i, size in blocks.items():
            start[i] = min(
                self._text[i], seen[i].size - self._shift
            )  # what says the first mask runs, too
            # Slots of an earlier block stay in sight, so they are masks again.
            counts[i] = max(seen[i].size + size, lengths[i]) - start[i]
        width, most = int(counts.max()), max(blocks.values())
        tokens = np.full((lengths.size, width), self._mask)
        columns = np.zeros((lengths.size, most), np.int64)
        for i, size in blocks.items():
            new = seen[i][start[i] :]
            tokens[i, : new.size] = new
            columns[i, :size] = new.size - self._shift + np.arange(size)
        tokens[tokens >= session.vocab_size] = 0  # of the target alone
        logits = session.write(tokens, start, counts, columns)[:, :, : self._vocab]
        logits[:, :, self._mask : self._mask + 1] = -np.inf  # the mask is no guess
        if not self._again:
            self._text[list(blocks)] = [seen[i].size for i in blocks]
        return {i: Tree.chain(logits[i, :size].argmax(1)) for i, size in blocks.items()}

    def close(self) -> None:
        self._session.close()
