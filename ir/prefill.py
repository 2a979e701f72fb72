"""What is done to a prompt, as the methods of `prefill` say it and a manifest keeps it."""

from __future__ import annotations

from dataclasses import dataclass

from accel.ir.fields import Fields


@dataclass(frozen=True)
class Pick:
    """How many `tokens` of a prompt stay, those that are worth most.

    sinks, recent: first and last tokens of the prompt that stay whatever they are worth.
    """

    tokens: int
    sinks: int
    recent: int

    @classmethod
    def from_json(cls, f: Fields) -> Pick:
        """Raises ArtifactError."""
        return cls(f.integer("tokens", 1), f.integer("sinks"), f.integer("recent"))


@dataclass(frozen=True)
class Segments:
    """A prompt runs `tokens` at a time; what begins at `threshold` or later, and is not its last, by the
    entry `sparse`.
    """

    tokens: int
    threshold: int

    @classmethod
    def from_json(cls, f: Fields) -> Segments:
        """Raises ArtifactError."""
        return cls(f.integer("tokens", 1), f.integer("threshold"))


@dataclass(frozen=True)
class Prefill:
    """filter: which tokens the model sees, by the entry `filter`. stages: which tokens the layers after each
    part of the step see; the parts are the entries `prompt.0`, `prompt.1`, … segments: how a prompt is cut
    where stretches of it read some of the keys.
    """

    filter: Pick | None = None
    stages: tuple[Pick, ...] = ()
    segments: Segments | None = None

    @classmethod
    def from_json(cls, f: Fields) -> Prefill:
        """Raises ArtifactError."""
        return cls(
            filter=Pick.from_json(f.object("filter")) if f.has("filter") else None,
            stages=tuple(Pick.from_json(stage) for stage in f.objects("stages")),
            segments=Segments.from_json(f.object("segments")) if f.has("segments") else None,
        )
