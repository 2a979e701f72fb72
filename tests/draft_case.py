"""Drafters for tests, and a loop driven over a session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from accel.compiler.assemble import assemble
from accel.ir.axis import Axis, find_axes
from accel.ir.recipe import Recipe
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.draft import Base, Drafter
from accel.runtime.length.fixed import Fixed
from accel.runtime.loop.autoregressive import Autoregressive
from accel.runtime.loop.speculative import Speculative
from accel.runtime.sample.standard import Standard
from accel.runtime.tree import Tree
from accel.runtime.tree.chain import Chain

GREEDY = Standard()


@dataclass(frozen=True)
class Known(Base):
    """Drafts what comes without a draft, with every `wrong`-th token replaced (0: none), at most `most` a time.
    `free`: as of its drafters.
    """

    futures: dict[tuple[int, ...], list[int]]
    wrong: int = 0
    most: int = 99
    free: bool = True

    def begin(self, prompt, store=None):
        return _Known(self, prompt.size, self.futures.get(tuple(prompt.tolist()), []))


@dataclass
class _Known(Drafter):
    of: Known
    start: int
    future: list[int]
    told: list[Any] = field(default_factory=list)

    @property
    def free(self):
        return self.of.free

    def draft(self, seen, limit):
        done = seen.size - self.start
        assert not self.future or seen[self.start :].tolist() == self.future[:done], (
            "it is given other tokens than came"
        )
        tokens = list(self.future[done : done + min(limit, self.of.most)])
        for i in range(len(tokens)):
            if self.of.wrong and (done + i) % self.of.wrong == 0:
                tokens[i] = (tokens[i] + 1) % 7
        return Tree.chain(tokens)


@dataclass(frozen=True)
class Says(Base, Drafter):
    """Drafts by a function of (seen, limit)."""

    says: Callable[[Any, int], Tree]

    def begin(self, prompt, store=None):
        return self

    def draft(self, seen, limit):
        return self.says(seen, limit)


def rows_of(prompts: Sequence[Any], sampler: Any = GREEDY, seed: int = 0, **ends: Any) -> list[Row]:
    ends = {"limit": 24, "max_context": 1000} | ends
    return [
        Row(np.array(p, np.int64), sampler, np.random.default_rng(seed), **ends) for p in prompts
    ]


def plain(session: Any, rows: list[Row]) -> list[list[int]]:
    """The rows' tokens, decoded one at a time; the session is then closed."""
    with session:
        for _ in Autoregressive().tokens(session, rows, DecodeContext()):
            pass
    return [row.tokens for row in rows]


def speculated(
    session: Any,
    rows: list[Row],
    drafter: Any,
    rule: Any = "spec-chain",
    tokens: int = 10,
    costs: Any = None,
    length: Any = None,
    model: Any = None,
    tree: Any = None,
) -> Any:
    """The iteration of a loop that drafts."""
    verify = Axis("verify", "accel.runtime.verify").build(rule) if isinstance(rule, str) else rule
    methods = {
        "draft": drafter,
        "verify": verify,
        "length": length or Fixed(tokens),
        "tree": tree or Chain(),
    }
    return Speculative().tokens(session, rows, DecodeContext(methods, costs, model))


def surprise(
    toy: Any,
    rule: str,
    drafter_of: Callable[[Any], Base],
    count: int = 900,
    sampler: Any = Standard(temperature=1.5, top_k=3),  # noqa: B008  (frozen)
    verifier: Any = None,
    **more: Any,
) -> float:
    """How unlikely four tokens of `count` generations are under the target's own law: chi-square less its mean,
    in standard deviations. `verifier`: what rows sample with instead, for controls.
    """
    prompt, length = [3, 1, 4], 4
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        grown: dict[tuple[int, ...], float] = {}
        for past, weight in law.items():
            seen = np.array([*prompt, *past])
            found = sampler.distribution(toy.oracle(seen)[-1].astype(np.float32), seen)
            grown |= {
                (*past, int(t)): weight * p
                for t, p in zip(found.tokens, found.probabilities, strict=True)
            }
        law = grown
    drafter = drafter_of(law)
    found = dict.fromkeys(law, 0)
    for start in range(count):
        with toy.session(batch=3) as session:
            rows = rows_of([prompt] * 3, limit=length)
            for i, row in enumerate(rows):
                row.rng, row.sampler = (
                    np.random.default_rng([start, i]),
                    (verifier or sampler).branch(),
                )
            list(speculated(session, rows, drafter, rule, **more))
            for row in rows:
                found[tuple(row.tokens)] += 1
    large = [k for k in law if law[k] * 3 * count >= 5]
    cells = [(found[k], law[k] * 3 * count) for k in large]
    cells.append(
        (3 * count - sum(c[0] for c in cells), 1e-9 + 3 * count - sum(c[1] for c in cells))
    )
    square = sum((seen - due) ** 2 / due for seen, due in cells if due > 1)
    return float((square - len(large)) / np.sqrt(2 * len(large)))


def against(recipe: Recipe, loop: str) -> bool:
    """Whether a method of a recipe declares something against a loop, or the loop against it."""
    mine = find_axes()["loop"].build(loop)
    others = assemble(recipe).methods.values()
    return any(one.breaks & mine.relies or one.relies & mine.breaks for one in others)
