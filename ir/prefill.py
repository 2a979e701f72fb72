"""What is done to a prompt, as the methods of `prefill` say it and a manifest keeps it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pick:
    """How many `tokens` of a prompt stay, those that are worth most.

    sinks, recent: first and last tokens of the prompt that stay whatever they are worth.
    """

    tokens: int
    sinks: int
    recent: int


@dataclass(frozen=True)
class Segments:
    """A prompt runs `tokens` at a time; what begins at `threshold` or later, and is not its last, by the
    entry `sparse`.
    """

    tokens: int
    threshold: int


@dataclass(frozen=True)
class Prefill:
    """filter: which tokens the model sees, by the entry `filter`. stages: which tokens the layers after each
    part of the step see; the parts are the entries `prompt.0`, `prompt.1`, … segments: how a prompt is cut
    where stretches of it read some of the keys.
    """

    filter: Pick | None = None
    stages: tuple[Pick, ...] = ()
    segments: Segments | None = None

    @property
    def entries(self) -> tuple[str, ...]:
        """The graphs that a session asks for this, beside the step."""
        parts = range(len(self.stages) + 1 if self.stages else 0)
        others = {"filter": self.filter, "sparse": self.segments}
        return (*(name for name, plan in others.items() if plan), *(f"prompt.{i}" for i in parts))
