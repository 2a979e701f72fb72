"""specache: a guess runs beside each token and is dropped; tokens are the model's own, whatever is guessed."""

import numpy as np
import pytest

from accel.runtime.decode.context import DecodeContext
from accel.runtime.loop.autoregressive import Autoregressive
from accel.runtime.loop.specache import Specache
from accel.runtime.sample.standard import Standard
from accel.runtime.session.session import Session

from ...draft_case import rows_of
from ...prefill_case import built

PROMPTS = [np.random.default_rng(n).integers(3, 50, n) for n in (17, 5, 9)]


def made(loop, sampler):
    rows = rows_of(PROMPTS, sampler, limit=12, max_context=128)
    with built("llama").session(3) as session:
        list(loop.tokens(session, rows, DecodeContext()))
        for row, length in zip(rows, session.lengths, strict=True):
            assert length == row.prompt.size + len(row.tokens) - 1
    return [row.tokens for row in rows]


@pytest.mark.parametrize(
    "sampler", [Standard(), Standard(temperature=0.8)], ids=["greedy", "drawn"]
)
def test_tokens_are_the_models_own_and_guesses_go_by_guesses(sampler, monkeypatch):
    """Greedy, every guess is right; drawn, some are not, and each goes on from the guess before it."""
    want, fed, run = made(Autoregressive(), sampler), [], Session.run

    def watched(self, tokens, lengths=None, **more):
        found = run(self, tokens, lengths, **more)
        fed.append((np.array(tokens), np.array(lengths), found.argmax(-1)))
        return found

    monkeypatch.setattr(Session, "run", watched)
    assert made(Specache(), sampler) == want
    first, pairs = fed[0], fed[1:]
    assert first[0].shape[1] == 1 and len(pairs) == 11 and all(t.shape[1] == 2 for t, _, _ in pairs)
    guess, right = first[2][:, 0], 0
    for i, (tokens, counts, best) in enumerate(pairs):
        assert (counts == 2).all() and (tokens[:, 1] == guess).all()
        assert tokens[:, 0].tolist() == [row[i] for row in want]
        right += sum(guess == [row[i + 1] for row in want])
        guess = best[:, 1]
    assert (right == 33) == sampler.greedy


def test_tokens_of_the_guess_are_caught(monkeypatch):
    want = made(Autoregressive(), Standard(temperature=0.8))
    rewind = Session.rewind
    monkeypatch.setattr(Session, "rewind", lambda self, to: rewind(self, np.maximum(to, 1) - 1))
    with pytest.raises(AssertionError):
        assert made(Specache(), Standard(temperature=0.8)) == want
