"""Rows that the bundled model is trained on: windows of the corpus, and tasks packed one after another."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from reference_data import BOS, SPECIAL, tasks
from tokenizers import Tokenizer
from torch import Tensor

MIX = {
    "library": 0.1,
    "packages": 0.58,
    "prose": 0.12,
    "code_edit": 0.06,
    "repeat": 0.02,
    "tasks": 0.12,
}
"""How often a row is of each kind; the last three are synthetic, as are half of the tokens of `code_edit`. Of 500 M
tokens the library (2.7 M) is read 18 times, the packages (42 M) 7 times: text teaches little after 15 times or so
(arXiv:2305.16264).
"""
TASKS = {"key_value": 2.0, "copy": 1.0, "edit": 2.0, "pass_key": 1.0, "list": 1.0}
KINDS = [*(kind for kind in MIX if kind != "tasks"), *TASKS]
"""What a token may belong to; its number stands in the third array of a batch."""
ANSWER = 2.0  # the weight of an answer's token: they are few beside those of code
LINES_OF_LIST = 4
IDENTIFIER = re.compile(r"\b[A-Za-z_][A-Za-z_0-9]{3,}\b")


@dataclass(frozen=True)
class Stage:
    """`tokens` per step, in rows of one length, which is drawn by `lengths`; it ends at `until` tokens of the run."""

    tokens: int
    lengths: dict[int, float]
    until: float = math.inf


STAGES = (
    Stage(4096, {256: 0.4, 512: 0.6}, until=4e6),
    Stage(8192, {512: 0.75, 1024: 0.2, 2048: 0.05}, until=50e6),
    Stage(8192, {512: 0.5, 1024: 0.4, 2048: 0.1}, until=100e6),
    Stage(8192, {512: 0.3, 1024: 0.3, 2048: 0.4}),
)
"""The last one ends every release, too: a model is judged at the lengths that it was last trained on."""


class Batch(NamedTuple):
    """`ids [B,T+1]`; `weights [B,T]` of the ids from the second on, 0 where nothing tells them; `kinds [B,T]`;
    `known [N]`, the places of all [B*T] that something tells.
    """

    ids: Tensor
    weights: Tensor
    kinds: Tensor
    known: Tensor


class Rows:
    """Batches, as a function of the seed and of the step; `mix`: how often a row is of each kind."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        corpus: dict[str, np.ndarray],
        seed: int,
        scale: int = 1,
        mix: dict[str, float] = MIX,
    ) -> None:
        self.tokenizer, self.corpus, self.seed = tokenizer, corpus, seed
        self.scale, self.mix, self.rng = scale, mix, random.Random()
        self._vocab = tokenizer.get_vocab_size()

    def draw(self, stage: Stage, step: int) -> Batch:
        """One step's rows."""
        self.rng.seed(f"{self.seed} {step}")
        length = self.rng.choices(list(stage.lengths), list(stage.lengths.values()))[0]
        count = max(1, self.scale * stage.tokens // length)
        kinds = self.rng.choices(list(self.mix), list(self.mix.values()), k=count)
        rows = [self._row(kind, length + 1) for kind in kinds]
        ids, weights, of = (torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True))
        weights = weights[:, 1:].contiguous()
        known = weights.flatten().nonzero().squeeze(1)
        return Batch(ids.long(), weights, of[:, 1:].contiguous(), known)

    def _row(self, kind: str, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if kind in self.corpus:
            return (
                self._window(kind, size),
                np.ones(size, np.float32),
                np.full(size, KINDS.index(kind), np.int64),
            )
        ids, weights, kinds = (
            np.empty(size, np.int32),
            np.empty(size, np.float32),
            np.empty(size, np.int64),
        )
        at = 0
        while at < size:
            name = (
                self.rng.choices(list(TASKS), list(TASKS.values()))[0] if kind == "tasks" else kind
            )
            for token, weight in self._task(name, size - at):
                ids[at], weights[at], kinds[at] = token, weight, KINDS.index(name)
                at += 1
                if at == size:
                    break
        return ids, weights, kinds

    def _window(self, part: str, size: int) -> np.ndarray:
        corpus = self.corpus[part]
        start = self.rng.randrange(len(corpus) - size)
        return np.asarray(corpus[start : start + size], dtype=np.int32)

    def _task(self, name: str, room: int) -> Iterator[tuple[int, float]]:
        if name == "repeat":
            yield from self._repeat(room)
        elif name == "code_edit":
            yield from self._code_edit(room)
        else:
            yield BOS, 0.0
            for text, is_answer in self._pieces(name, room):
                for token in self.tokenizer.encode(text, add_special_tokens=False).ids:
                    yield token, ANSWER * is_answer

    def _pieces(self, name: str, room: int) -> tasks.Pieces:
        """A task with a body of 40 tokens up to most of `room`, short ones oftener, and several answers."""
        low, high = 40.0, max(41.0, room * 0.85)
        body = int(low * (high / low) ** self.rng.random())
        if name == "list":
            return tasks.rest(self.rng, tasks.lines_for("copy", body), LINES_OF_LIST)
        lines = tasks.lines_for(name, body)
        answers = (
            1
            if name == "pass_key"
            else self.rng.randrange(1, 2 + body // tasks.TOKENS_PER_LINE[name] // 2)
        )
        return tasks.TASKS[name](self.rng, lines, answers)

    def _repeat(self, room: int) -> Iterator[tuple[int, float]]:
        """A passage of random tokens, over and over; known from its second time on."""
        alphabet = self.rng.sample(range(len(SPECIAL), self._vocab), 64)
        period = self.rng.randrange(6, max(8, min(256, room // 2)))
        passage = self.rng.choices(alphabet, k=period)
        yield BOS, 0.0
        for at in range(period * self.rng.randrange(2, 6)):
            yield passage[at % period], float(at > period)

    def _code_edit(self, room: int) -> Iterator[tuple[int, float]]:
        """Lines of code, then the same lines with one name changed wherever it stands."""
        size = self.rng.randrange(40, max(48, min(400, room // 2)))
        window = self._window(self.rng.choice(["library", "packages"]), size)
        lines = self.tokenizer.decode(window.tolist()).splitlines(keepends=True)[1:-1]
        text = "".join(lines)
        names = IDENTIFIER.findall(text)
        if len(lines) < 3 or not names:
            yield from self._repeat(room)
            return
        name = self.rng.choice(names)
        new = f"new_{name.strip('_')}" if self.rng.random() < 0.5 else self.rng.choice(tasks.WORDS)
        changed = re.sub(rf"\b{name}\b", new, text)
        how = "" if self.rng.random() < 0.5 else f", {name} becomes {new}"
        yield BOS, 0.0
        for token in self.tokenizer.encode(
            f"# before\n{text}\n\n# after{how}\n", add_special_tokens=False
        ).ids:
            yield token, 0.5
        for token in self.tokenizer.encode(changed, add_special_tokens=False).ids:
            yield token, ANSWER
