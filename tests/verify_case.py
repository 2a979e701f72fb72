"""Rounds of speculative decoding over tables: every way that drafting and judging can fall, with its probability."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from accel.ir.axis import Axis
from accel.runtime.sample import Distribution, Sampler
from accel.runtime.sample.standard import Standard
from accel.runtime.tree import Siblings, Tree, without
from accel.runtime.verify import Chance, Target

AXIS = Axis("verify", "accel.runtime.verify")
CHAINS = ((), (-1,), (-1, 0), (-1, 0, 1))
DRAFTS = ("same", "other", "disjoint", "holes", "sure", "chosen", "mixed")
WAYS = [(draft, False) for draft in DRAFTS] + [(draft, True) for draft in DRAFTS[:5]]
Prefix = tuple[int, ...]


def meant(draft: str, replacement: bool) -> Siblings:
    """How siblings of such a draft come about."""
    if draft == "chosen":
        return Siblings.CHOSEN
    return Siblings.INDEPENDENT if replacement else Siblings.APART


def takes(rule: Any, parents: Prefix, draft: str, replacement: bool = False) -> bool:
    """Whether a rule takes such a tree."""
    if parents in CHAINS:
        return not replacement  # which is nothing without siblings
    return rule.branches and meant(draft, replacement) in rule.siblings


class Walk(Chance):
    """A chance that follows a script of branches, the first one beyond its end, and knows the weight."""

    def __init__(self, script: list[int]):
        self.weight = 1.0
        self._script, self._taken = script, list[tuple[int, int]]()

    def accept(self, probability: float) -> bool:
        sure = min(max(probability, 0.0), 1.0)
        return self._choose([(True, sure), (False, 1 - sure)])

    def draw(self, law: Distribution) -> int:
        assert len(law.tokens) == 1 or law.random, "greedy draws nothing"
        return self._choose(list(zip(law.tokens.tolist(), law.probabilities.tolist(), strict=True)))

    def following(self) -> list[int] | None:
        """The script of the next way."""
        while self._taken:
            branch, count = self._taken.pop()
            if branch + 1 < count:
                return [b for b, _ in self._taken] + [branch + 1]
        return None

    def _choose(self, options: list[tuple[Any, float]]) -> Any:
        possible = [o for o in options if o[1] > 0]
        at = len(self._taken)
        branch = self._script[at] if at < len(self._script) else 0
        self._taken.append((branch, len(possible)))
        value, weight = possible[branch]
        self.weight *= weight
        return value


def outcomes(program: Callable[[Chance], Any]) -> dict[Any, float]:
    """What a program gives, and how probably: run once for every way that its choices can fall."""
    found: dict[Any, float] = defaultdict(float)
    script: list[int] | None = []
    while script is not None:
        walk = Walk(script)
        found[program(walk)] += walk.weight
        script = walk.following()
    return dict(found)


def distance(a: dict[Any, float], b: dict[Any, float]) -> float:
    """Total variation between two laws."""
    return 0.5 * sum(abs(a.get(k, 0.0) - b.get(k, 0.0)) for k in a.keys() | b.keys())


@dataclass
class World:
    """A target and a drafter that are tables of what has been seen, V tokens each.

    `draft`: "same" (the target's own), "other", "disjoint" (nothing that the target says), "holes" (zeros in
    both), "sure" (one-hot, so that siblings run out of it), "chosen" (the best of "other", no q), "mixed" (every
    second one chosen).
    """

    sampler: Sampler
    draft: str = "other"
    seed: int = 0
    size: int = 3
    replacement: bool = False
    _kept: dict[Any, Any] = field(default_factory=dict)

    def logits(self, seen: Prefix) -> np.ndarray:
        return self._once("logits", seen, self._logits)

    def law(self, seen: Prefix) -> Distribution:
        """The target's, after a prefix."""
        return self._once(
            "law", seen, lambda s: self.sampler.distribution(self.logits(s), np.array(s, np.int64))
        )

    def q(self, seen: Prefix) -> np.ndarray:
        """The drafter's, [V]."""
        return self._once("q", seen, self._q)

    def drafted(self, parents: Prefix, seen: Prefix, chance: Chance) -> Prefix:
        """The tokens of a tree of that form: every one drawn as `Tree` says, or chosen."""
        tokens: list[int] = []
        before = [seen]
        for node, parent in enumerate(parents):
            prefix = before[parent + 1]
            tried = np.array([tokens[i] for i in range(node) if parents[i] == parent], np.int64)
            q = self.q(prefix)
            if self.chooses(node):
                token = next(t for t in np.argsort(-q, kind="stable").tolist() if t not in tried)
            else:
                law = Distribution(np.arange(self.size), q)
                token = chance.draw(law if self.replacement else without(law, tried))
            tokens.append(token)
            before.append((*prefix, token))
        return tuple(tokens)

    def chooses(self, node: int) -> bool:
        """Whether a token is not drawn."""
        return self.draft == "chosen" or (self.draft == "mixed" and node % 2 == 1)

    def tree(self, parents: Prefix, tokens: Prefix, seen: Prefix) -> tuple[Tree, np.ndarray]:
        """The record of that draft, and the target's logits [N+1,V]."""
        before = [seen]
        for token, parent in zip(tokens, parents, strict=True):
            before.append((*before[parent + 1], token))
        rows = np.array([self.q(before[p + 1]) for p in parents]).reshape(-1, self.size)
        drawn = None if self.draft == "chosen" else rows
        ids, above = np.array(tokens, np.int64), np.array(parents, np.int64)
        of = [-1 if self.chooses(node) else node for node in range(len(ids))]
        tree = Tree(ids, above, drawn, np.array(of, np.int64), self.replacement)
        return tree, np.stack([self.logits(prefix) for prefix in before])

    def round(self, rule: Any, parents: Prefix, seen: Prefix, chance: Chance) -> Prefix:
        """One round: the tokens that come out of it."""
        tokens = self.drafted(parents, seen, chance)
        tree, logits = self._once(
            ("tree", parents, tokens), seen, lambda s: self.tree(parents, tokens, s)
        )
        verdict = rule(Target(tree, logits, np.array(seen, np.int64), _Known(self)), chance)
        return (*(tokens[node] for node in verdict.path), verdict.token)

    def _once(self, what: Any, seen: Prefix, make: Callable[[Prefix], Any]) -> Any:
        if (what, seen) not in self._kept:
            self._kept[what, seen] = make(seen)
        return self._kept[what, seen]

    def _table(self, seed: int, seen: Prefix) -> np.ndarray:
        rng = np.random.default_rng([self.seed, seed, *seen])
        return (rng.standard_normal(self.size) * 1.5).astype(np.float32)

    def _logits(self, seen: Prefix) -> np.ndarray:
        logits = self._table(1, seen)
        if self.draft == "disjoint":
            logits[self._side(seen)] = -np.inf
        elif self.draft == "holes":
            logits[sum(seen) % self.size] = -np.inf
        return logits

    def _q(self, seen: Prefix) -> np.ndarray:
        if self.draft == "same":
            return self.law(seen).dense(self.size)
        q = np.exp(self._table(2, seen).astype(np.float64))
        if self.draft == "disjoint":
            q[~self._side(seen)] = 0
        elif self.draft == "holes":
            q[(1 + sum(seen)) % self.size] = 0
        elif self.draft == "sure":
            q = (q == q.max()).astype(np.float64)
        return np.asarray(q / q.sum(), np.float32)

    def _side(self, seen: Prefix) -> np.ndarray:
        """The tokens that only the drafter says."""
        return np.arange(self.size) < 1 + (sum(seen) + len(seen)) % (self.size - 1)


@dataclass(frozen=True)
class _Known(Sampler):
    """The world's sampler, which has been asked before; checks that it is given the right row and prefix."""

    world: World

    def scores(self, logits, seen):
        return logits

    def distribution(self, logits, seen):
        prefix = tuple(seen.tolist())
        assert np.array_equal(logits, self.world.logits(prefix)), "the row of another node"
        return self.world.law(prefix)


def generated(step: Callable[[Prefix, Chance], Prefix], length: int) -> dict[Prefix, float]:
    """The law of the first `length` tokens, where each step gives one or more."""
    found: dict[Prefix, float] = defaultdict(float)
    open_ = {(): 1.0}
    while open_:
        follows: dict[Prefix, float] = defaultdict(float)
        for seen, weight in open_.items():
            for new, share in outcomes(lambda chance, seen=seen: step(seen, chance)).items():
                whole = (*seen, *new)
                into = found if len(whole) >= length else follows
                into[whole[:length]] += weight * share
        open_ = follows
    return dict(found)


def alone(world: World, length: int) -> dict[Prefix, float]:
    """What the target gives without a drafter."""
    return generated(lambda seen, chance: (chance.draw(world.law(seen)),), length)


def gap(rule: Any, world: World, parents: Prefix, length: int = 3) -> float:
    """How far a rule's tokens are from the target's own, in total variation; 1 where one comes that the
    target cannot say.
    """
    got = generated(lambda seen, chance: world.round(rule, parents, seen, chance), length)
    assert abs(sum(got.values()) - 1) < 1e-12
    possible = all(world.law(t[:i]).of(t[i]) > 0 for t in got for i in range(length))
    return distance(got, alone(world, length)) if possible else 1.0


def sampled(**options: Any) -> Standard:
    return Standard(**{"temperature": 1.0, **options})


class Stuck:
    """A generator whose every number is the same."""

    def __init__(self, number):
        self.random = lambda: number
