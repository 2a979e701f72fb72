"""Log-probabilities of a prompt's tokens, as the prompt runs."""

from __future__ import annotations

from accel.runtime.decode.logprobs import Logprob, TopLogprobs
from accel.runtime.inputs.ints import Ints
from accel.runtime.session.session import Session

_MOST = 1 << 24  # logits that are held at once


class PromptScores:
    """Those of one prompt [n]. `lines`: of each token so far, under the model's own distribution behind those before
    it; None for the first, which follows nothing.
    """

    def __init__(self, prompt: Ints, top: TopLogprobs):
        self._prompt, self._top = prompt, top
        self.lines: list[dict[int, Logprob] | None] = [None]

    @property
    def whole(self) -> bool:
        """Whether no token is left."""
        return len(self.lines) >= self._prompt.size

    def run(self, session: Session, tokens: Ints) -> None:
        """Run tokens [n] of the prompt in a session of one row that holds all before them, and score those that follow
        each. Those scored already are not scored again.
        """
        width = max(1, _MOST // session.vocab_size)
        for begin in range(0, tokens.size, width):
            start = int(session.lengths[0])
            logits = session.run(tokens[None, begin : begin + width])[0]
            for place, line in enumerate(logits, start + 1):
                if len(self.lines) == place < self._prompt.size:
                    self.lines.append(self._top(int(self._prompt[place]), line))
