"""DA-Transformer (arXiv:2205.07459), as in DASpeech (arXiv:2310.07403): a text is a path through a graph of tokens that
one call gives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from accel.ir.axis import option
from accel.ir.errors import InputError
from accel.ir.facts import Facts
from accel.ir.invariants import Invariant
from accel.ir.paths import Paths
from accel.runtime.call import Logits
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.loop import Base
from accel.runtime.loop._graph import log_softmax, transitions, viterbi, walked
from accel.runtime.loop._whole import canvas_of, check_greedy, written
from accel.runtime.session.modes.encoder_input import EncoderInput
from accel.runtime.session.session import Session

GREEDY, LOOKAHEAD, VITERBI, JOINT = "greedy", "lookahead", "viterbi", "joint-viterbi"


@dataclass(frozen=True)
class DaTransformer(Base):
    """One call of the decoder gives vertices, each with logits and transitions to later ones. A path from the first to
    the last is the text: the likeliest token of each vertex, once where it repeats that of the vertex before.

    `path`: "greedy" takes the likeliest transition; "lookahead" adds `beta` times the log-probability of the next
    vertex's token; "viterbi" takes the likeliest path (arXiv:2210.05193), "joint-viterbi" that of the likeliest tokens
    too: the log-probability is divided by the number of inner vertices ** `length_penalty`.
    """

    path: str = option(LOOKAHEAD, one_of=(GREEDY, LOOKAHEAD, VITERBI, JOINT))
    beta: float = option(1.0, least=0)
    length_penalty: float = option(1.0, least=0)

    grade = "approximate"
    lacks = "beam search with an n-gram model, and DASpeech's acoustic decoder"
    masked_diffusion = True
    searches = True
    breaks = frozenset({Invariant.APPEND_ONLY})

    def unfit(self, facts: Facts) -> str:
        if facts.paths is None:
            return "gives no transitions between tokens (config.transition_heads); give a DA-Transformer"
        if facts.diffusion is not None and facts.diffusion.mask is None:
            return "has no token that stands at its vertices; set config.mask_token_id"
        return ""

    def tokens(
        self, session: Session, rows: list[Row], context: DecodeContext
    ) -> Iterator[tuple[int, int]]:
        canvas, encoder = canvas_of(session, self.full_name), session.observer(EncoderInput)
        paths = canvas.paths
        if paths is None or encoder is None or canvas.mask is None:
            raise InputError(
                f"{self.full_name}: this model gives no transitions between tokens; build with another loop"
            )
        check_greedy(rows, self.full_name)
        live = [i for i, row in enumerate(rows) if not row.finish]
        if wrong := [rows[i].prompt.size for i in live if rows[i].prompt.size != 1]:
            raise InputError(
                f"{self.full_name} makes a whole text of its source, and a prompt of {wrong[0]} tokens cannot come "
                "before it; leave the prompt out"
            )
        if not live:
            return
        graphs = {}
        for i in live:
            count = round(int(encoder.lengths[i]) * paths.scale)
            ids = np.full(min(max(2, count), session.max_context), canvas.mask)
            ids[0], ids[-1] = rows[i].prompt[0], paths.last
            graphs[i] = ids
        try:
            outputs = written(session, graphs)
        finally:
            session.rewind(0)
        for i in live:
            yield from self._text(
                i, rows[i], outputs[i, : graphs[i].size], paths, session.vocab_size
            )

    def _text(
        self, i: int, row: Row, outputs: Logits, paths: Paths, vocabulary: int
    ) -> Iterator[tuple[int, int]]:
        """Let a row take the text of its graph [P,…]."""
        logits = outputs[:, :vocabulary]
        tokens = row.sampler.choices(logits)
        if tokens is None:
            raise InputError(
                f"{self.full_name}: a request that picks each token by those before it has no path; leave penalties, "
                "processors and grammars out"
            )
        sure = np.take_along_axis(log_softmax(logits.astype(np.float64)), tokens[:, None], 1)[:, 0]
        last = int(tokens[0])
        for vertex in self.walk(transitions(outputs[:, vocabulary:], paths), sure, paths.scale)[1:]:
            token = int(tokens[vertex])
            if token not in (last, paths.padding):
                row.accept(token, None)
                yield i, token
                if row.finish:
                    return
            last = token
        row.end()

    def walk(self, links: Logits, sure: Logits, scale: float) -> list[int]:
        """The path through transitions [P,P] over vertices whose tokens have the log-probabilities `sure` [P]. It is
        sought among those of at most 2 P / scale inner vertices, as in the authors' code.
        """
        if self.path == GREEDY:
            return walked(links)
        if self.path == LOOKAHEAD:
            return walked(links + self.beta * sure)
        longest = max(1, int(2 * len(links) / scale))
        weight = 1.0 if self.path == JOINT else 0.0
        return viterbi(links, weight * sure, self.length_penalty, longest)
