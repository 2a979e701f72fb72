"""CLaSp (arXiv:2505.24196): self-speculative decoding; drafts leave out the layers without which the residual stream of
the newest token comes out most alike, and all layers verify, with one cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from accel.ir.axis import option
from accel.ir.depth import RUN_LAYERS
from accel.ir.entries.skips import SKIPPING, SKIPS, STREAMS
from accel.ir.errors import InputError
from accel.ir.invariants import Invariant
from accel.ir.taps import EMBEDS, stream
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.rounds import picked
from accel.runtime.decode.row import Row
from accel.runtime.draft import Base, Drafters, More
from accel.runtime.draft._by_self import BySelf, Layers, cost_of, layers_by_call
from accel.runtime.draft._streams import Streams
from accel.runtime.inputs.ints import Ints
from accel.runtime.session.session import Session
from accel.runtime.tree import Tree

Floats = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Clasp(Base):
    """A drafted token runs all but the fraction `skip` of the layers, the final norm and the LM head.

    Which layers are left out is found for each row by the residual stream of its newest token before and behind each
    layer: at first of the prompt's last one, then anew before every `every`-th draft. One call of a copy of the session
    (`Session.fork`) runs each layer once, on as many rows as layers are left out and one more.

    The recipe gets `depth = by-call`, which makes each layer conditional and skips none by default.
    """

    skip: float = option(0.5, least=0, below=1)
    every: int = option(32, least=1)

    asks = {"tree": "chain", "length": "draft-verify"}
    needs = {"depth": "by-call"}
    relies = frozenset({Invariant.CHAINS, Invariant.LAYERS_BY_CALL})
    provides = frozenset({Invariant.PROBABILITIES})

    def steps(self) -> list[Any]:
        from accel.passes.state.skips import Skips
        from accel.passes.state.trees import Trees

        return [Trees(), Skips(self)]

    def taps(self, layers: int) -> Sequence[str]:
        return [EMBEDS, *map(stream, range(layers))]

    def open(self, session: Session, rows: Sequence[Row], context: DecodeContext) -> Drafters:
        layers = layers_by_call(context, self.full_name)
        if missing := set(self.taps(layers)) - set(session.extra):
            raise InputError(
                f"{self.full_name} reads {min(missing)}, which this model was not built to give; build with draft = "
                f"{self.use}"
            )
        return _InContext(self, session, rows, context, layers)


def without(skips: Floats, count: int) -> Layers:
    """Which layers run [L] where `count` are left out, by the choices [L,N+1] of the entry `skips`."""
    found, left = np.ones(len(skips), np.bool_), count
    for layer in reversed(range(len(skips))):
        if skips[layer, left] > 0:
            found[layer] = False
            left -= 1
    return found


@dataclass
class _Of:
    """What a row's drafts say; drafts since that was found, none before; the streams of its prompt's last token."""

    says: Mapping[str, Any]
    age: int | None = None
    prompt: tuple[Ints, Mapping[str, Floats]] | None = field(default=None, repr=False)


class _InContext(BySelf):
    def __init__(
        self,
        of: Clasp,
        session: Session,
        rows: Sequence[Row],
        context: DecodeContext,
        layers: int,
    ):
        self.count = min(layers - 1, int(of.skip * layers))
        cost = cost_of(context, 1 - self.count / layers)
        first = np.ones(layers, np.bool_)  # until a plan is found: every second layer, from the end
        order = [*range(layers - 2, 0, -2), *range(layers - 3, 0, -2), layers - 1]
        first[order[: self.count]] = False
        super().__init__(session, rows, context, cost, run_layers=first)
        self._every, self._names = of.every, of.taps(layers)
        self._of = [_Of(self.less) for _ in rows]
        self._streams, self._in_prompt = Streams(), True
        self._streams.ask(self._names if self.count else (), 1)
        session.listen(self._streams)

    def says(self, row: int) -> Mapping[str, Any]:
        return self._of[row].says

    def draft(self, limits: Mapping[int, int], more: More) -> Mapping[int, Tree]:
        self._end_prompt()
        if found := {i: last for i in limits if (last := self._last(i)) is not None}:
            for i, layers in self._plans(found).items():
                self._of[i].says, self._of[i].age = {RUN_LAYERS: layers}, 0
        self._streams.ask((), 0)
        trees = super().draft(limits, more)
        for i, tree in trees.items():
            if (age := self._of[i].age) is not None:
                self._of[i].age = age + bool(len(tree))
        if self.count and any(self._due(self._of[i]) for i in limits):
            self._streams.ask(
                self._names, 1 + max((len(tree) for tree in trees.values()), default=0)
            )
        return trees

    def _due(self, of: _Of) -> bool:
        return of.age is None or of.age >= self._every

    def _last(self, row: int) -> Floats | None:
        """The streams [L+1,E] of the last token that a row holds, where another plan is due and they were heard."""
        of = self._of[row]
        positions, heard = of.prompt or self._streams.of(row)
        of.prompt = None
        at = np.flatnonzero(positions == self._session.lengths[row] - 1)
        if not self._due(of) or not at.size:
            return None
        return np.stack([heard[name][at[-1]] for name in self._names])

    def _plans(self, streams: Mapping[int, Floats]) -> dict[int, Layers]:
        """Which layers run in drafts of rows, by the streams [L+1,E] of their last tokens."""
        rows, width = list(streams), self.count + 1
        shape = next(iter(streams.values())).shape
        given = np.zeros((self._session.batch, *shape), np.float32)
        given[rows] = [streams[i] for i in rows]
        with self._session.fork() as copy:
            back = np.zeros(self._session.batch, np.int64)
            back[rows] = 1
            copy.rewind(copy.lengths - back)
            positions = np.full((len(given), width), -1, np.int64)
            positions[rows] = copy.lengths[rows, None]
            tree = np.tile(np.eye(width, dtype=np.bool_), (len(given), 1, 1))
            inputs = {STREAMS: given, "positions": positions, "tree": tree}
            out = copy.entry(SKIPPING.name, inputs, width)
        return {i: without(out[SKIPS][i], self.count) for i in rows}

    def _end_prompt(self) -> None:
        """What was heard until now are prompts."""
        if self._in_prompt:
            for i, of in enumerate(self._of):
                of.prompt = self._streams.of(i)
        self._in_prompt = False

    def join(self, other: Self) -> None:
        super().join(other)
        for one in (self, other):
            one._end_prompt()
        self._of += other._of

    def leave(self, order: Ints) -> None:
        super().leave(order)
        self._end_prompt()
        self._of = picked(self._of, order)

    def close(self) -> None:
        super().close()
        with suppress(InputError):  # of a session that a failed call closed
            self._session.unlisten(self._streams)
