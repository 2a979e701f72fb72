"""Drafts the token after the next from the hidden state of the newest token that ran, by a head in the graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from accel.runtime.call import Arrays
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.draft import Base, Drafters, More
from accel.runtime.inputs.ints import Ints
from accel.runtime.session.observers.observer import CallWatcher
from accel.runtime.session.session import Session
from accel.runtime.tree import Tree


@dataclass(frozen=True)
class HiddenHead(Base):
    layer: int = 0

    def steps(self) -> list[Any]:
        from accel.runtime.draft._hidden_head_pass import AddHead

        return [AddHead(self.layer)]

    def open(self, session: Session, rows: Sequence[Row], context: DecodeContext) -> Drafters:
        return _Drafters(session, f"hidden.{self.layer}")


class Hidden(CallWatcher):
    """The hidden states of all tokens, by position [B,N,E]."""

    def __init__(self, name: str, shape: tuple[int, int]):
        self._name, self._shape = name, shape
        self.states = np.zeros((*shape, 0), np.float32)

    def before(self, backend: Any, width: int) -> Collection[str]:
        return (self._name,)

    def after(self, tokens: Ints, positions: Ints, extra: Arrays) -> None:
        states = extra[self._name]
        if not self.states.shape[2]:
            self.states = np.zeros((*self._shape, states.shape[2]), np.float32)
        rows, columns = np.nonzero(positions >= 0)
        self.states[rows, positions[rows, columns]] = states[rows, columns]


class _Drafters(Drafters):
    def __init__(self, session: Session, name: str):
        self._session = session
        self._hidden = Hidden(name, (session.batch, session.max_context))
        session.listen(self._hidden)

    def draft(self, limits: Mapping[int, int], more: More) -> Mapping[int, Tree]:
        rows = np.arange(self._session.batch)
        newest = self._hidden.states[rows, self._session.lengths - 1][:, None]
        zeros = np.zeros((rows.size, 1), np.int64)
        given = {"stream": newest, "positions": zeros, "slots": zeros[:, 0], "rows": zeros}
        said = self._session.entry("head", given)["logits"][:, 0].argmax(-1)
        return {i: Tree.chain([int(said[i])]) for i in limits}

    def close(self) -> None:
        self._session.unlisten(self._hidden)
