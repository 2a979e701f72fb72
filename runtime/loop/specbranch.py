"""SpecBranch (arXiv:2506.01979): draft model and target model run in parallel, and where the draft model is unsure it
drafts on from several tokens at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from accel.ir.axis import option
from accel.ir.errors import InputError
from accel.ir.trained import Tensors
from accel.runtime.call import Logits
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.decode.trained_part import Sizes, TrainedPart, sizes_of
from accel.runtime.draft._levels import Levels
from accel.runtime.inputs.ints import Ints
from accel.runtime.loop._foresight import Foresight, Predictor, taps_of
from accel.runtime.loop._parallel import Ahead, Branch, Parallel
from accel.runtime.session.core import CHUNK
from accel.runtime.session.session import Session
from accel.runtime.speculation.follow import Follower
from accel.runtime.tree import Level
from accel.runtime.tree._nodes import top

WIDTHS = (256, 64)  # of the predictor's hidden layers


@dataclass(frozen=True)
class Specbranch(TrainedPart, Parallel):
    """While a call verifies a draft, the draft model drafts what would follow: `branches` tokens that may come next,
    and up to `ahead` - 1 tokens after each, fewer where the likeliest one has a probability of at most `threshold`: the
    next branches are to begin there. If the draft is fully accepted and the next token is one of the branches', the
    next call verifies what follows it. The output is that of plain decoding, also when sampling.

    `predictor`: before a draft is verified, a small network (H-RAD) says by hidden states of the last four layers
    whether none of it stands (then none is verified), some (then it ends by `threshold`) or all (then all of it is
    verified, whatever the draft model's doubts). `trained`: the network's file, from `accel-compile train specbranch
    MODEL --draft DRAFT`; empty: the one that a build finds for the two models. Without one drafts end by `threshold`.
    """

    branches: int = option(3, least=1, most=16)
    ahead: int = option(6, least=1, most=32)
    threshold: float = option(0.4, least=0, below=1)
    predictor: bool = False
    trained: str = ""

    key: ClassVar[str] = "specbranch"
    models = ("model", "draft")
    optional = True
    grows = True

    @property
    def embeds(self) -> bool:  # type: ignore[override]
        """See Method."""
        return self.predictor

    def taps(self, layers: int) -> Sequence[str]:
        """See Method."""
        return taps_of(layers) if self.predictor else ()

    @property
    def wants_part(self) -> bool:
        """See TrainedPart."""
        return self.predictor

    @property
    def goes_on(self) -> bool:
        """Whether branches go on behind tokens that the draft model is unsure of."""
        return self.predictor and bool(self.part)

    @classmethod
    def expected(cls, tensors: Tensors) -> Sizes:
        """See TrainedPart."""
        return cls.sizes((sizes_of(tensors, "first") or (1,))[0])

    @classmethod
    def sizes(cls, width: int) -> Sizes:
        """Name -> size of the tensors of a predictor that reads so many numbers."""
        one, two = WIDTHS
        found: Sizes = {"first": (width, one), "second": (one, two), "last": (two, 3)}
        return {**found, **{f"{name}.bias": size[1:] for name, size in found.items()}}

    def foresight(self, session: Session, rows: Sequence[Row], context: DecodeContext) -> Foresight:
        """See Parallel."""
        if not (self.predictor and self.part):
            return super().foresight(session, rows, context)
        names = self.read_of(session, context)
        width = (len(names) + 1) * session.embed(np.zeros((1, 1), np.int64)).shape[2]
        if len(self.part["first"]) != width:
            raise InputError(
                f"{self.full_name}: {self.trained or 'the bundled file'} reads {len(self.part['first'])} numbers, but "
                f"the hidden states of the model have {width}; run accel-compile train {self.key} MODEL --draft DRAFT, "
                "and build again"
            )
        return Predictor(self.part, session, rows, names, self.ahead)

    def read_of(self, session: Session, context: DecodeContext) -> Sequence[str]:
        """The streams that the predictor reads. Raises InputError where the session gives none."""
        layers = 1 if context.model is None else context.model.facts.num_layers
        if missing := set(self.taps(layers)) - set(session.extra):
            raise InputError(
                f"{self.full_name} reads {', '.join(sorted(missing))}, which this model was not built to give; build "
                "it again, or with predictor = false"
            )
        return self.taps(layers)

    def drafted(
        self, follower: Follower, texts: Mapping[int, Ints], sure: Mapping[int, int]
    ) -> Mapping[int, Ahead]:
        """See Parallel. The branches of a row are a tree of the draft model's session."""
        room = {i: follower.most(text.size + 1, CHUNK) for i, text in texts.items()}
        said = follower.follow(texts, sure)[:, 0]
        rows = {i: _Branches(top(said[i][None], self.branches)[0]) for i in texts}
        trees, step = Levels(follower, texts), 1  # tokens of each branch that goes on
        levels = {i: row.level() for i, row in rows.items()}
        while step < self.ahead:
            levels = {
                i: level
                for i, level in levels.items()
                if level.tokens.size and rows[i].count + level.tokens.size <= room[i]
            }
            if not levels:
                break
            logits = trees.further(levels)
            for i, level in levels.items():
                rows[i].extend(logits[i, : level.tokens.size], self.threshold, self.goes_on)
            levels = {i: rows[i].level() for i in levels}
            step += 1
        return {i: row.ahead() for i, row in rows.items()}


@dataclass
class _Branches:
    """Of one row, each with its first token so far."""

    firsts: Ints
    tokens: list[list[int]] = field(init=False)
    count: int = 0  # nodes that ran

    def __post_init__(self) -> None:
        self.tokens = [[int(token)] for token in self.firsts]
        self._nodes = [0] * len(
            self.tokens
        )  # the number of each one's last node that ran; the root's
        self._open = list(range(len(self.tokens)))
        self._sure: list[int | None] = [None for _ in self.tokens]

    def ahead(self) -> Ahead:
        """What was drafted, by the first tokens."""
        return {
            first: Branch(np.array(rest, np.int64), sure)
            for (first, *rest), sure in zip(self.tokens, self._sure, strict=True)
        }

    def level(self) -> Level:
        """The newest token of each that goes on."""
        tokens = [self.tokens[b][-1] for b in self._open]
        parents = [self._nodes[b] for b in self._open]
        return Level(np.array(tokens, np.int64), np.array(parents, np.int64))

    def extend(self, logits: Logits, threshold: float, doubts: bool) -> None:
        """By what is said [n,V] after each of those, which ran: where it is unsure a branch ends, or, where it goes on
        with `doubts`, notes it.
        """
        going = list[int]()
        for branch, line in zip(self._open, logits, strict=True):
            self.count += 1
            self._nodes[branch] = self.count
            best = int(line.argmax())
            with np.errstate(over="ignore"):
                sure = float(1 / np.exp(line - line[best]).sum())
            if sure <= threshold and self._sure[branch] is None:
                self._sure[branch] = len(self.tokens[branch]) - 1
            if sure > threshold or doubts:
                self.tokens[branch].append(best)
                going.append(branch)
        self._open = going
