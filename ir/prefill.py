"""What is done to a prompt, as the methods of `prefill` say it and a manifest keeps it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from accel.ir.fields import Fields


@dataclass(frozen=True)
class Pick:
    """How many tokens of a prompt stay, those with the highest scores: at most `tokens` (0: any number), and at most
    a `share` of all that the prompt has.

    sinks, recent: first and last tokens of the prompt that stay whatever their score. observe: number of last
    queries of the prompt that the scores are computed from; 0: all. always: prompts run in parts even where all their
    tokens stay.
    """

    tokens: int
    sinks: int
    recent: int
    share: float = 1.0
    observe: int = 1
    always: bool = False

    def kept(self, count: int) -> int:
        """How many tokens stay of a prompt of `count`; at least 1."""
        most = min(count, self.tokens) if self.tokens else count
        return max(min(1, count), min(most, math.floor(self.share * count + 1e-9)))

    @classmethod
    def from_json(cls, f: Fields) -> Pick:
        """Raises ArtifactError."""
        share = f.number("share")
        if not 0 < share <= 1:
            raise f.wrong("share", share, "more than 0 and at most 1")
        tokens, sinks, recent = (f.integer(name) for name in ("tokens", "sinks", "recent"))
        return cls(tokens, sinks, recent, share, f.integer("observe"), f.boolean("always"))


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
class Ranks:
    """The step is cut at each attention, so that several ranks may share a prompt: the entries `rank.0` ..
    `rank.L`, and `attend.<n>`. forms: which of these each of the L layers has.
    """

    forms: tuple[int, ...]

    @classmethod
    def from_json(cls, f: Fields) -> Ranks:
        """Raises ArtifactError."""
        forms = f.array("forms")
        for i, form in enumerate(forms):
            if type(form) is not int or not 0 <= form < len(forms):
                raise f.wrong(f"forms[{i}]", form, f"a number, 0..{len(forms) - 1}")
        return cls(tuple(forms))


@dataclass(frozen=True)
class Fill:
    """Where only the last logits are asked for, all tokens but the last run by the entry `fill`, if these are `least`
    or more. whole: it does not read the cache, so it takes tokens of empty rows alone, in one call.
    """

    least: int
    whole: bool = False

    @classmethod
    def from_json(cls, f: Fields) -> Fill:
        """Raises ArtifactError."""
        return cls(f.integer("least", 1), f.boolean("whole") if "whole" in f.value else False)


@dataclass(frozen=True)
class Prefill:
    """filter: which tokens the model sees, by the entry `filter`. stages: which tokens the layers after each
    part of the step see; the parts are the entries `prompt.0`, `prompt.1`, … segments: how a prompt is cut
    where stretches of it read some of the keys. ranks: how it is shared. fill: which of its tokens run without logits.
    latents: embeddings that a second model adds behind it, by the entries `augment.0` and `augment.1`.
    """

    filter: Pick | None = None
    stages: tuple[Pick, ...] = ()
    segments: Segments | None = None
    ranks: Ranks | None = None
    fill: Fill | None = None
    latents: int = 0

    def held(self, count: int) -> int:
        """Slots that the model's own cache has of a prompt of `count` tokens."""
        return (count if self.filter is None else self.filter.kept(count)) + self.latents

    @classmethod
    def from_json(cls, f: Fields) -> Prefill:
        """Raises ArtifactError."""
        return cls(
            filter=Pick.from_json(f.object("filter")) if f.has("filter") else None,
            stages=tuple(Pick.from_json(stage) for stage in f.objects("stages")),
            segments=Segments.from_json(f.object("segments")) if f.has("segments") else None,
            ranks=Ranks.from_json(f.object("ranks")) if f.has("ranks") else None,
            fill=Fill.from_json(f.object("fill")) if f.has("fill") else None,
            latents=f.integer("latents") if "latents" in f.value else 0,
        )
