"""Axis: which drafted tokens are accepted, and which token follows them, from the target's distributions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from accel.ir.errors import InputError
from accel.ir.invariants import Invariant, Method
from accel.runtime.inputs.ints import Ints, check_vocabulary
from accel.runtime.sample import Distribution, Sampler
from accel.runtime.tree import ROOT, Draw, Siblings, Tree

__all__ = ["Base", "Chance", "Target", "Verdict"]


@dataclass(frozen=True)
class Verdict:
    """`path`: the accepted nodes, from below the root on, none or more; `token`: the one that follows."""

    path: tuple[int, ...]
    token: int


class Chance:
    """Where a rule's random choices come from; what is certain takes no random number."""

    def __init__(self, rng: np.random.Generator):
        self._rng = rng

    def accept(self, probability: float) -> bool:
        """True with this probability; never at 0, always at 1 or more."""
        return probability > 0 and (probability >= 1 or self._rng.random() < probability)

    def draw(self, law: Distribution) -> int:
        """A token, as a sampler draws it."""
        return law.draw(self._rng)


class Target:
    """A drafted tree, and what the target says after each of its nodes, computed where a rule first asks.

    logits [N+1,V]: row 0 after the last committed token, row i+1 after node i; seen [n]: the tokens up to
    the last committed one. Penalties see the draft before a node too. Raises InputError where the tree
    does not fit the logits.
    """

    def __init__(self, tree: Tree, logits: npt.NDArray[np.float32], seen: Ints, sampler: Sampler):
        if logits.ndim != 2 or len(logits) != len(tree) + 1:
            raise InputError(
                f"verify: logits {list(logits.shape)} for a tree of {len(tree)} tokens; give a row for the last "
                f"committed token and one for each of the tree, [{len(tree) + 1}, vocabulary]"
            )
        check_vocabulary(tree.tokens, logits.shape[1], "verify: tree")
        if tree.q is not None and tree.q.shape[1] > logits.shape[1]:
            raise InputError(
                f"verify: q has {tree.q.shape[1]} columns and the target {logits.shape[1]} tokens; sample from "
                "a q without the tokens that the target lacks"
            )
        self.tree = tree
        self._logits = logits
        self._sampler = sampler
        self._size = seen.size
        self._ids = np.concatenate([seen, np.zeros(tree.depths.max(initial=0), np.int64)])
        self._laws: dict[int, Distribution] = {}
        self._errors: dict[int, Exception] = {}

    @cached_property
    def choices(self) -> list[int] | None:
        """The token after ROOT and after each node, [N+1], where the sampler says it of all at once."""
        found = self._sampler.choices(self._logits)
        return None if found is None else found.tolist()

    def taken(self, verdict: Verdict) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
        """The tokens of a verdict, each with the logits [V] that it follows from. Raises the error of a path whose end
        nothing follows.
        """
        before = ROOT
        for node in verdict.path:
            yield int(self.tree.tokens[node]), self._logits[before + 1]
            before = node
        if before in self._errors:
            raise self._errors[before]
        yield verdict.token, self._logits[before + 1]

    def law(self, node: int) -> Distribution:
        """What the token after a node, or after ROOT, is drawn from.

        A node may be behind the row's end, or fall. So an error there, of the request's functions, its grammar or the
        logits, is the outcome "a token beyond the vocabulary" (`ends`); after ROOT it is raised.
        """
        if node not in self._laws:
            try:
                law = self._sampler.distribution(self._logits[node + 1], self._seen(node))
            except Exception as error:
                if node == ROOT:
                    raise
                self._errors[node] = error
                law = Distribution(np.array([self._logits.shape[1]]), np.ones(1), random=False)
            self._laws[node] = law
        return self._laws[node]

    def ends(self, node: int) -> bool:
        """Whether nothing may follow a node: there is an error behind it."""
        self.law(node)
        return node in self._errors

    def scores(self, node: int) -> npt.NDArray[np.float32]:
        """The logits [V] after a node that does not end, or after ROOT, with penalties."""
        return self._sampler.scores(self._logits[node + 1], self._seen(node))

    def _seen(self, node: int) -> Ints:
        """The tokens up to a node; a view, not to be kept."""
        path = list(self.tree.path(node))
        end = self._size + len(path)
        self._ids[self._size : end] = self.tree.tokens[path]
        return self._ids[:end]


class Base(Method, ABC):
    """A rule: a frozen dataclass whose fields are its options; it has no state between rounds."""

    # How tokens compare with those that the target alone would give: lossless (the same, given the same
    # random numbers), distribution-exact or approximate.
    grade: ClassVar[str]
    branches: ClassVar[bool] = True  # False: takes chains only
    siblings: ClassVar[frozenset[Siblings]] = frozenset(Siblings)  # that it takes
    instead: ClassVar[str] = ""  # the nearest rule that takes what this one does not
    tolerant: ClassVar[bool] = False  # True: greedy decoding, too, may take what does not match
    reads_q: ClassVar[bool] = True  # False: what tokens were drawn from does not matter
    # False: what is drafted stands. How much is drafted then decides which tokens come, so no guard goes by time
    verifies: ClassVar[bool] = True

    def __call__(self, target: Target, chance: Chance) -> Verdict:
        """Judge a round. Greedy decoding takes what matches, by every rule that is not tolerant.

        Raises InputError for a tree that this rule does not take.
        """
        self._check(target.tree)
        greedy = not self.tolerant and (target.choices is not None or not target.law(ROOT).random)
        if greedy:
            return match(target, chance)
        return self.judge(target, chance)

    @property
    def relies(self) -> frozenset[Invariant]:
        if not self.branches:
            return frozenset({Invariant.CHAINS})
        if Siblings.APART not in self.siblings:
            return frozenset({Invariant.EXCHANGEABLE_SIBLINGS})
        return frozenset()

    def _check(self, tree: Tree) -> None:
        """Raise InputError for a tree that this rule does not take."""
        name = self.use
        if not self.branches and (node := tree.branch) is not None:
            raise InputError(
                f"verify.{name} takes chains, but node {node} of the tree follows node "
                f"{tree.parents[node]}, not {node - 1}; use verify = {self.instead}, or draft a chain"
            )
        if not self.branches and tree.siblings:
            raise InputError(
                f"verify.{name} takes chains, but node {next(iter(tree.siblings.values()))} of the tree was drawn more "
                f"than once; use verify = {self.instead}, or draft a chain"
            )
        if self.branches and len(self.siblings) < len(Siblings):
            for kind in tree.siblings.keys() - self.siblings:
                takes = " or ".join(one.value for one in Siblings if one in self.siblings)
                raise InputError(
                    f"verify.{name} takes siblings that are {takes}, but node {tree.siblings[kind]} of the tree was "
                    f"{kind.value}; use verify = {self.instead}, or draft another tree"
                )

    def drawing(self, sampler: Sampler, chance: Chance) -> Draw | None:
        """What drafted tokens are best drawn with; None: they are best chosen, as the likeliest."""
        return chance.draw if self.reads_q and not sampler.greedy else None

    @abstractmethod
    def judge(self, target: Target, chance: Chance) -> Verdict:
        """The same where the target samples, or the rule is tolerant, for a tree of a form that this rule takes."""


def match(target: Target, chance: Chance) -> Verdict:
    """Draw from the target, and follow while the tree has what was drawn."""
    node, path, tokens = ROOT, list[int](), target.tree.tokens
    while True:
        token = (
            chance.draw(target.law(node)) if target.choices is None else target.choices[node + 1]
        )
        found = [c for c in target.tree.children(node) if tokens[c] == token]
        if not found:
            return Verdict(tuple(path), token)
        node = found[0]
        path.append(node)
