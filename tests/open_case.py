"""Whole generations of a drafter over tables, its own session and the target's among them, for every way that they can
fall.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from accel.ir.diffusion import Diffusion
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.draft import Drafters
from accel.runtime.length import Paces
from accel.runtime.length.fixed import Fixed
from accel.runtime.session.observers.observer import Capabilities
from accel.runtime.speculation.round_cost import unmeasured_cost
from accel.runtime.tree import NONE, Tree
from accel.runtime.verify import Chance, Target, Verdict

from .verify_case import Prefix, World, distance, generated, outcomes

PROMPT = (0, 1, 0)
Says = Callable[[Prefix], np.ndarray]


class Tables:
    """A session whose logits are a function of the tokens that a row holds, and another one for less. `held`: those of
    the first row. `extra`: names of outputs that its steps could give; who listens hears of none.
    """

    max_context, capabilities = 64, Capabilities()
    kv_most = 0
    extra: Sequence[str] = ()

    def __init__(self, says: Says, less: Says, size: int, batch: int = 1):
        self.says, self.less = says, less
        self.vocab_size = self.token_ids = size
        self.batch = batch
        self.rows: list[list[int]] = [[] for _ in range(batch)]

    @property
    def held(self) -> list[int]:
        return self.rows[0]

    @held.setter
    def held(self, tokens: list[int]) -> None:
        self.rows[0] = tokens

    @property
    def lengths(self) -> np.ndarray:
        return np.array(list(map(len, self.rows)))

    @property
    def room(self) -> np.ndarray:
        return self.max_context - self.lengths

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def run(self, tokens, lengths=None, *, last_only=False, here=True, coarse=False, **less):
        says = self.less if coarse or less else self.says
        counts = np.full(self.batch, tokens.shape[1]) if lengths is None else np.asarray(lengths)
        width = 1 if last_only else tokens.shape[1]
        out = np.zeros((self.batch, width, self.vocab_size), np.float32)
        for i, count in enumerate(counts.tolist()):
            found = []
            for token in tokens[i, :count].tolist():
                self.rows[i].append(token)
                known = [
                    one if one < self.vocab_size else 0 for one in self.rows[i]
                ]  # a mask is a 0
                found.append(says(tuple(known)))
            found = found[-1:] if last_only else found
            out[i, : len(found)] = found or 0
        return out

    def prompt(self, tokens, lengths=None):
        return self.run(tokens, lengths, last_only=True)

    def guess(self, tokens, tree, lengths=None, columns=None, *, here=True):
        counts = np.full(self.batch, tokens.shape[1]) if lengths is None else np.asarray(lengths)
        logits = np.zeros((*tokens.shape, self.vocab_size), np.float32)
        for i, count in enumerate(counts.tolist()):
            for n in range(count):
                logits[i, n] = self.says((*self.rows[i], *tokens[i][tree[i, n]].tolist()))
        return logits if columns is None else np.take_along_axis(logits, columns[:, :, None], 1)

    def write(self, tokens, start, lengths=None, rows=None):
        """Of a model that fills masks: what follows a token, the masks before it being a 0."""
        count, first = lengths[0], int(np.ravel(start)[0])
        self.held[first : first + count] = tokens[0, :count].tolist()
        known = [token if token < self.vocab_size else 0 for token in self.held]
        logits = np.stack([self.says(tuple(known[: first + n + 1])) for n in range(count)])[None]
        return np.take_along_axis(logits, rows[:, :, None], 1)

    def take(self, other, lengths):
        self.rows = [row[: int(n)] for row, n in zip(other.rows, lengths, strict=True)]
        return True

    def rewind(self, length):
        for row, left in zip(self.rows, np.broadcast_to(length, self.batch), strict=True):
            del row[int(left) :]

    def end_prompt(self):
        pass

    def listen(self, listener):
        pass

    def unlisten(self, listener):
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
    """Generations of a drafter: `draft` of the tokens after a prompt, by a shape and a rule; of `batch` rows together,
    each with a prompt of its own.
    """

    method: Any
    shape: Any
    rule: Any
    world: World
    limit: int = 2
    misled: bool = False  # it says the contrary of the first two tokens
    length: Any = Fixed(9)
    beyond: int = 0  # tokens that a draft may have beyond a row's end
    batch: int = 1
    drafted: int = 0
    depths: set[int] = field(default_factory=set)  # levels of the trees that came
    drafts: set[tuple[int, ...]] = field(
        default_factory=set
    )  # tokens of all rows' drafts of a round

    @property
    def prompts(self) -> list[Prefix]:
        return [PROMPT[i:] + PROMPT[:i] for i in range(self.batch)]

    def logits(self, seen: Prefix) -> np.ndarray:
        """What the drafter's model says."""
        logits = np.log(np.maximum(self.world.q(seen), 1e-30)).astype(np.float32)
        return -logits if self.misled and len(seen) < len(PROMPT) + 2 else logits

    def session(self, batch: int = 1) -> Tables:
        return Tables(self.logits, self.logits, self.world.size, batch)

    def tokens(self, chance: Chance, length: int) -> tuple[Prefix, int]:
        """Of one generation, those of all rows, and how many that were drafted did not stand."""
        fell, world, size = 0, self.world, self.world.size
        target = Tables(world.logits, self.logits, size, self.batch)
        rows = [
            Row(np.array(prompt), world.sampler, None, limit=length, max_context=64)  # type: ignore[arg-type]
            for prompt in self.prompts
        ]
        target.extra = self.method.taps(2)
        target.token_ids += getattr(self.method, "masks", 0)
        depth = SimpleNamespace(plan=[0, 0], mlp=[0, 0])
        facts = SimpleNamespace(depth=depth, layers=[], parameters=1, vocab_size=size)
        masks = Diffusion(size, shift=True)  # if it fills any
        own = SimpleNamespace(kv=None, diffusion=masks, max_batch=self.batch)
        beside = SimpleNamespace(session=self.session, tokenizer=None, facts=own)
        model = SimpleNamespace(draft_model=beside, tokenizer=None, facts=facts)
        methods = {"tree": self.shape, "verify": Walked(self.rule, chance), "length": self.length}
        drafters = self.method.open(target, rows, DecodeContext(methods, None, model))
        paces = self.length.open(rows, unmeasured_cost)
        while live := [i for i, row in enumerate(rows) if not row.finish]:
            before = [row.seen.tolist()[:-1] for row in rows]
            target.rows = [list(tokens) for tokens in before]
            limits = {
                i: most
                for i, limit in paces.limits(live).items()
                if (most := min(self.limit, rows[i].left - 1 + self.beyond, limit)) > 0
            }
            trees = drafters.draft(limits, paces) if limits else {}
            assert target.rows == before, "it left something"
            kept = paces.keeps({i: len(tree) for i, tree in trees.items()})
            trees = {i: tree.head(kept[i]) for i, tree in trees.items()}
            assert all(len(tree) <= limits[i] for i, tree in trees.items())
            self.drafts.add(tuple(len(trees.get(i, NONE)) for i in live))
            for i in live:
                fell += self._judged(i, rows[i], trees.get(i, NONE), drafters, paces, chance)
        drafters.close()
        return tuple(token for row in rows for token in row.tokens), fell

    def _judged(
        self, i: int, row: Row, tree: Tree, drafters: Drafters, paces: Paces, chance: Chance
    ) -> int:
        """Let a row take what stands of its draft; how many tokens of it did not."""
        world, seen = self.world, tuple(row.seen.tolist())
        self.depths.add(max(tree.depths, default=0))
        after = [(*seen, *tree.tokens[list(tree.path(n))].tolist()) for n in range(len(tree))]
        logits = np.stack([world.logits(prefix) for prefix in (seen, *after)])
        if len(tree):
            judged = Target(tree, logits, row.seen, world.sampler)
            verdict = self.rule(judged, chance)
            taken = [token for token, _ in judged.taken(verdict)]
        else:
            verdict = Verdict((), chance.draw(world.law(seen)))
            taken = [verdict.token]
        drafters.observe(i, tree, verdict, logits)
        if len(tree):
            paces.observe(i, int(tree.depths.max()), len(verdict.path))
        self.drafted += len(tree)
        for token in taken[: row.left]:
            row.accept(token, None)
        counts = not self.misled or len(seen) >= len(PROMPT) + 2
        return len(tree) - len(verdict.path) if counts else 0

    def gap(self, length: int = 3) -> float:
        """How far the tokens are from the target's own, in total variation."""
        got = outcomes(lambda chance: self.tokens(chance, length)[0])
        law = self.world.law
        want: dict[Prefix, float] = {(): 1.0}
        for prompt in self.prompts:

            def step(seen: Prefix, chance: Chance, prompt: Prefix = prompt) -> Prefix:
                return (chance.draw(law((*prompt, *seen))),)

            own = generated(step, length)
            want = {(*a, *b): x * y for a, x in want.items() for b, y in own.items()}
        return distance(got, want)

    def falls(self, length: int = 5) -> float:
        """How many drafted tokens do not stand in a generation, on average, of those that were drafted after all that
        it was misled in.
        """
        found = outcomes(lambda chance: self.tokens(chance, length)[1])
        return sum(count * weight for count, weight in found.items())
