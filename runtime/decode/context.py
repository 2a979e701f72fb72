"""What a loop is given beside sessions: methods, what calls cost, the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from accel.ir.facts import Facts
from accel.runtime.decode.costs import Costs
from accel.runtime.decode.judge import Judge
from accel.runtime.decode.scorer import Scorer
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.session.session import Session


class Model(Protocol):
    """What sessions are of."""

    @property
    def facts(self) -> Facts: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def draft_model(self) -> Model | None:
        """The smaller model that drafts, where the recipe has one."""

    @property
    def costs(self) -> Costs: ...
    def session(self, batch: int = 1) -> Session: ...


@dataclass(frozen=True)
class DecodeContext:
    """What a loop is given beside sessions: a method of each axis that it asks for, what calls cost here
    (None: not known), what the sessions are of, what outlives a request (`store` of the drafter, else of
    the loop), and what the request says
    of drafted text, and of those that a search finds (None: nothing).
    """

    methods: Mapping[str, Any] = field(default_factory=dict)
    costs: Costs | None = None
    model: Model | None = None
    store: Any = None
    judge: Judge | None = None
    scorer: Scorer | None = None
