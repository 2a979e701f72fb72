"""Searches beside versions that read every text anew, over the toy."""

from types import SimpleNamespace

import numpy as np

from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.scorer import Scorer
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.sample.standard import Standard

from .draft_case import rows_of

WARM = Standard(temperature=0.9, top_k=30)
PROMPTS = [[5, 17, 200, 3, 88], [9], list(range(40, 61))]


def told(toy, scorer=None):
    """What a search is given beside the session."""
    tokenizer = Tokenizer(toy.path / "tokenizer.json")
    model = SimpleNamespace(tokenizer=tokenizer, facts=None, draft_model=None)
    return DecodeContext(model=model, scorer=scorer and Scorer(scorer))


def letters(prompt, texts):
    """A score in 0 .. 1 that takes turns: the share of vowels in each text."""
    return [sum(c in "aeiou" for c in text) / (1 + len(text)) for text in texts]


def searched(toy, loop, prompts, scorer=None, sampler=WARM, seed=0, wrap=None, **ends):
    """The rows of a search, and their session's figures."""
    rows = rows_of(prompts, sampler, seed, **ends)
    with toy.session(batch=len(rows), wrap=wrap) as session:
        came = [[] for _ in rows]
        for i, token in loop.tokens(session, rows, told(toy, scorer)):
            came[i].append(token)
        assert came == [row.tokens for row in rows] and session.batch == len(rows)
        stats = session.stats
        check_session(toy, session, rows)
        return rows, stats


def check_session(toy, session, rows):
    """It holds a part of what came from its first token on, and nothing else."""
    held = session.lengths
    for row, count in zip(rows, held, strict=True):
        assert count == 0 or row.prompt.size <= count < row.seen.size
    for row, count, line in zip(rows, held, session.run([[7]] * len(rows)), strict=True):
        want = toy.oracle(np.array([*row.seen[:count], 7]))[-1]
        np.testing.assert_allclose(line[0], want, atol=1e-3, rtol=1e-3)


class Text:
    """A text that is read anew for each token."""

    def __init__(self, toy, prompt, rng, limit, eos, sampler=WARM, tokens=(), logs=()):
        self.toy, self.prompt, self.rng, self.limit, self.eos = toy, list(prompt), rng, limit, eos
        self.sampler, self.tokens, self.logs = sampler, list(tokens), list(logs)

    @property
    def ended(self):
        return len(self.tokens) == self.limit or bool(self.tokens and self.tokens[-1] in self.eos)

    def copies(self, count):
        rngs = [self.rng, *self.rng.spawn(count - 1)]
        return [self.copy(rng) for rng in rngs]

    def copy(self, rng):
        return Text(
            self.toy, self.prompt, rng, self.limit, self.eos, self.sampler, self.tokens, self.logs
        )

    def write(self, most=10**9, until="", decode=None):
        start = len(self.tokens)
        while not self.ended and len(self.tokens) - start < most:
            if until and until in decode(self.tokens[start:]).lstrip():
                return
            seen = np.array([*self.prompt, *self.tokens])
            logits = self.toy.oracle(seen)[-1].astype(np.float32)
            token = int(self.sampler(logits, seen, self.rng))
            p = np.exp(logits.astype(np.float64) - logits.max())
            self.logs.append(float(np.log(p[token] / p.sum())))
            self.tokens.append(token)

    def decoded(self, decode):
        return decode(self.tokens[:-1] if self.tokens[-1] in self.eos else self.tokens)
