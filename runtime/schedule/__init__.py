"""Axis: which requests run in the next iteration of an engine, how much of their prompts, and where."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from accel.ir.axis import host_method
from accel.ir.invariants import Method

__all__ = ["Base", "Limits", "Place", "Plan", "Route", "State", "Task", "chosen"]

PROMPT, TOKEN, MIXED = "prompt", "token", "mixed"  # what a process is for


def chosen(recipe: Mapping[str, Any]) -> Base:
    """The schedule that a recipe (JSON) names. Raises RecipeError."""
    found: Base = host_method(recipe.get("tables", {}), "schedule", "continuous-batching")
    return found


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
        hits: of `length`, what earlier prompts left that need not run (`kv.reuse`), where the schedule `reads_hits`.
    """

    id: int
    length: int
    most: int
    computed: int = 0
    blocks: int = 0
    arrived: float = 0.0
    hits: int = 0

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
    clock, in seconds. busy: which of those that run has a part of its prompt under way, beside the iterations; it can
    be neither preempted nor given another part yet.
    """

    waiting: Sequence[Task]
    running: Sequence[Task]
    free: int
    now: float = 0.0
    busy: int | None = None


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


@dataclass(frozen=True)
class Place:
    """A process, as a router sees it. Counts are of tokens.

    Attributes:
        home: "prompt", "token" or "mixed".
        pending: of prompts that are to run here.
        reserved: what requests that decode here, or will, may hold at their ends.
        capacity: what all of them may hold.
    """

    home: str
    pending: int = 0
    reserved: int = 0
    capacity: int = 1 << 62

    @property
    def role(self) -> str:
        """Its home, or "mixed" as long as it has work of the other phase."""
        other = {PROMPT: self.reserved, TOKEN: self.pending}.get(self.home, 0)
        return MIXED if other else self.home


@dataclass(frozen=True)
class Route:
    """By place: which process runs a request's prompt, and which decodes it. Its state moves where they differ."""

    prompt: int
    token: int


class Base(Method, ABC):
    """A frozen dataclass whose fields are its options; it remembers nothing. No schedule changes tokens."""

    chunks: ClassVar[bool] = False  # whether it may split prompts
    overtakes: ClassVar[bool] = (
        False  # whether a request may be admitted before one that came earlier
    )
    reads_hits: ClassVar[bool] = False  # whether it asks what is known of prompts that wait
    splits_cores: ClassVar[bool] = (
        False  # whether prompts run while others decode, on a part of the cores
    )

    @abstractmethod
    def plan(self, state: State, limits: Limits) -> Plan:
        """What runs next. All that decode and are not preempted run."""

    @property
    def homes(self) -> Sequence[str]:
        """The processes that it wants, and what each is for (`Place.home`); one, unless it says so."""
        return (MIXED,)

    def route(self, places: Sequence[Place], prompt: int, most: int) -> Route:
        """Where a request of `prompt` tokens that may hold `most` at its end goes, of `homes`."""
        return Route(0, 0)

    def share(self, state: State, limits: Limits, shares: Sequence[float], now: float) -> float:
        """Where it `splits_cores`: which of the shares of the cores, ascending, prompts get while others decode.
        `now`: the one that they have.
        """
        return now
