"""Whole generations of a drafter over tables, its own session and the target's among them, for every way that they can
fall.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from accel.ir.diffusion import Diffusion
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.length.fixed import Fixed
from accel.runtime.session.observers.observer import Capabilities
from accel.runtime.speculation.round_cost import unmeasured_cost
from accel.runtime.tree import NONE
from accel.runtime.verify import Chance, Target, Verdict

from .verify_case import Prefix, World, distance, generated, outcomes

PROMPT = (0, 1, 0)
Says = Callable[[Prefix], np.ndarray]


class Tables:
    """A session of one row whose logits are a function of the tokens that it holds, and another one for less."""

    batch, max_context, capabilities = 1, 64, Capabilities()
    kv_most = 0

    def __init__(self, says: Says, less: Says, size: int):
        self.says, self.less, self.vocab_size = says, less, size
        self.held: list[int] = []

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(self.held)])

    @property
    def room(self) -> np.ndarray:
        return self.max_context - self.lengths

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def run(self, tokens, lengths=None, *, last_only=False, run_layers=None, coarse=False):
        says, found = self.less if coarse or run_layers is not None else self.says, []
        for token in tokens[0, : tokens.shape[1] if lengths is None else lengths[0]].tolist():
            self.held.append(token)
            found.append(says(tuple(self.held)))
        return np.stack(found[-1:] if last_only else found)[None]

    def prompt(self, tokens, lengths=None):
        return self.run(tokens, lengths, last_only=True)

    def guess(self, tokens, tree, lengths=None, columns=None):
        count = tokens.shape[1] if lengths is None else lengths[0]
        paths = [tokens[0][tree[0, i]].tolist() for i in range(count)]
        logits = np.stack([self.says((*self.held, *path)) for path in paths])[None]
        return logits if columns is None else np.take_along_axis(logits, columns[:, :, None], 1)

    def write(self, tokens, start, lengths=None, rows=None):
        """Of a model that fills masks: what follows a token, the masks before it being a 0."""
        count, first = lengths[0], int(np.ravel(start)[0])
        self.held[first : first + count] = tokens[0, :count].tolist()
        known = [token if token < self.vocab_size else 0 for token in self.held]
        logits = np.stack([self.says(tuple(known[: first + n + 1])) for n in range(count)])[None]
        return np.take_along_axis(logits, rows[:, :, None], 1)

    def take(self, other, lengths):
        self.held = other.held[: int(lengths[0])]
        return True

    def rewind(self, length):
        del self.held[int(np.ravel(length)[0]) :]

    def end_prompt(self):
        pass

    def close(self):
        pass


@dataclass(frozen=True)
class Walked:
    """A rule for drafters, whose tokens are drawn by a chance of the test's."""

    rule: Any
    chance: Chance

    def drawing(self, sampler, _):
        return self.rule.drawing(sampler, self.chance)


@dataclass
class Opened:
    """Generations of a drafter: `draft` of the tokens after a prompt, by a shape and a rule."""

    method: Any
    shape: Any
    rule: Any
    world: World
    limit: int = 2
    misled: bool = False  # it says the contrary of the first two tokens
    length: Any = Fixed(9)
    beyond: int = 0  # tokens that a draft may have beyond a row's end
    drafted: int = 0
    depths: set[int] = field(default_factory=set)  # levels of the trees that came

    def logits(self, seen: Prefix) -> np.ndarray:
        """What the drafter's model says."""
        logits = np.log(np.maximum(self.world.q(seen), 1e-30)).astype(np.float32)
        return -logits if self.misled and len(seen) < len(PROMPT) + 2 else logits

    def session(self, batch: int = 1) -> Tables:
        return Tables(self.logits, self.logits, self.world.size)

    def tokens(self, chance: Chance, length: int) -> tuple[Prefix, int]:
        """Of one generation, and how many that were drafted did not stand."""
        fell, world, size = 0, self.world, self.world.size
        target = Tables(world.logits, self.logits, size)
        row = Row(np.array(PROMPT), world.sampler, None, limit=length, max_context=64)  # type: ignore[arg-type]
        facts = SimpleNamespace(depth=SimpleNamespace(plan=[0, 0]), layers=[], parameters=1)
        masks = Diffusion(size, shift=True)  # if it fills any
        beside = SimpleNamespace(
            session=self.session, tokenizer=None, facts=SimpleNamespace(kv=None, diffusion=masks)
        )
        model = SimpleNamespace(draft_model=beside, tokenizer=None, facts=facts)
        methods = {"tree": self.shape, "verify": Walked(self.rule, chance), "length": self.length}
        drafters = self.method.open(target, [row], DecodeContext(methods, None, model))
        paces = self.length.open([row], unmeasured_cost)
        while not row.finish:
            seen = tuple(row.seen.tolist())
            target.held = list(seen[:-1])
            most = min(self.limit, row.left - 1 + self.beyond, paces.limits([0])[0])
            tree = drafters.draft({0: most}, paces).get(0, NONE) if most else NONE
            self.depths.add(max(tree.depths, default=0))
            assert len(tree) <= most and target.held == list(seen[:-1]), "it left something"
            after = [(*seen, *tree.tokens[list(tree.path(n))].tolist()) for n in range(len(tree))]
            logits = np.stack([world.logits(prefix) for prefix in (seen, *after)])
            if len(tree):
                judged = Target(tree, logits, row.seen, world.sampler)
                verdict = self.rule(judged, chance)
                taken = [token for token, _ in judged.taken(verdict)]
            else:
                verdict = Verdict((), chance.draw(world.law(seen)))
                taken = [verdict.token]
            drafters.observe(0, tree, verdict, logits)
            if len(tree):
                paces.observe(0, len(tree), len(verdict.path))
            self.drafted += len(tree)
            if not self.misled or len(seen) >= len(PROMPT) + 2:
                fell += len(tree) - len(verdict.path)
            for token in taken[: row.left]:
                row.accept(token, None)
        drafters.close()
        return tuple(row.tokens), fell

    def gap(self, length: int = 3) -> float:
        """How far the tokens are from the target's own, in total variation."""
        got = outcomes(lambda chance: self.tokens(chance, length)[0])
        law = self.world.law
        want = generated(lambda seen, chance: (chance.draw(law((*PROMPT, *seen))),), length)
        return distance(got, want)

    def falls(self, length: int = 5) -> float:
        """How many drafted tokens do not stand in a generation, on average, of those that were drafted after all that
        it was misled in.
        """
        found = outcomes(lambda chance: self.tokens(chance, length)[1])
        return sum(count * weight for count, weight in found.items())
