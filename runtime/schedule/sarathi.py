"""Sarathi-Serve (arXiv:2403.02310): prompts run in chunks, so that requests that decode never wait for a whole one."""

from __future__ import annotations

from dataclasses import dataclass

from accel.ir.axis import option
from accel.runtime.schedule import Base, Limits, Plan, State
from accel.runtime.schedule._queue import served


@dataclass(frozen=True)
class Sarathi(Base):
    """`tokens`: of an iteration, at most: those of all that decode, and what is left for prompts, in the order of
    arrival. Where those that decode use all of it, no prompt goes on. A model whose prompts must run whole
    (`Session.capabilities.chunks`) gets them whole, in the iterations of `continuous-batching`.
    """

    tokens: int = option(512, least=1, most=1 << 20)

    lacks = "one call for chunks and decodes; micro-batches of pipelines"
    chunks = True

    def plan(self, state: State, limits: Limits) -> Plan:
        return served(state, limits, self.tokens)
