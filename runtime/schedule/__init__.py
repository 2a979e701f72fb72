"""Axis: which requests run in the next iteration of an engine, and how much of their prompts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from accel.ir.invariants import Method

__all__ = ["Base", "Limits", "Plan", "State", "Task"]


@dataclass(frozen=True)
class Task:
    """A request as a schedule sees it. Counts are of tokens.

    Attributes:
        id: its place in the order of arrival; lower came earlier.
        length: what has to run before it decodes: its prompt, and what it had made when it was preempted.
        most: what it may hold at its end.
        computed: of `length`, what has run; then it grows with each token that is made. A token that was made last has
            not run.
        blocks: those that it owns.
        arrived: when, in seconds.
    """

    id: int
    length: int
    most: int
    computed: int = 0
    blocks: int = 0
    arrived: float = 0.0

    @property
    def decodes(self) -> bool:
        """Whether its prompt has run."""
        return self.computed >= self.length


@dataclass(frozen=True)
class Limits:
    """rows: most requests at once. blocks: all there are, of `block` tokens each. step: most tokens that an iteration
    adds to a request that decodes. recompute: a request that loses its blocks may run again, all of its tokens as a
    prompt; else none is preempted, and one that is admitted gets the blocks of all that it may ever hold.
    """

    rows: int
    blocks: int
    block: int = 16
    step: int = 1
    recompute: bool = True

    def needs(self, tokens: int) -> int:
        """The blocks of so many tokens."""
        return -(-tokens // self.block)

    def admitted(self, task: Task) -> int:
        """The blocks that a request gets at first: of its whole prompt, so that two half-admitted ones never wait for
        each other.
        """
        return self.needs(task.length if self.recompute else task.most)

    def fits(self, task: Task) -> bool:
        """Whether it can ever run: if not, it is refused, since waiting would not help."""
        return self.needs(task.most) <= self.blocks


@dataclass(frozen=True)
class State:
    """waiting: in the order of the queue. running: in the order of arrival. free: blocks that no one owns. now: the
    clock, in seconds.
    """

    waiting: Sequence[Task]
    running: Sequence[Task]
    free: int
    now: float = 0.0


@dataclass(frozen=True)
class Plan:
    """Of one iteration, by ids.

    Attributes:
        decodes: those that decode.
        chunks: (id, tokens): how much of whose prompt runs; of those that wait, it admits them.
        preempted: they lose their blocks, and go back to the front of the queue.
        refused: those that can never fit.
        blocks: how many more blocks each gets.
    """

    decodes: Sequence[int] = ()
    chunks: Sequence[tuple[int, int]] = ()
    preempted: Sequence[int] = ()
    refused: Sequence[int] = ()
    blocks: Mapping[int, int] = field(default_factory=dict)


class Base(Method, ABC):
    """A frozen dataclass whose fields are its options; it remembers nothing. No schedule changes tokens."""

    chunks: ClassVar[bool] = False  # whether it may split prompts

    @abstractmethod
    def plan(self, state: State, limits: Limits) -> Plan:
        """What runs next. All that decode and are not preempted run."""
