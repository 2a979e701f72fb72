"""What is done to a prompt, as the methods of `prefill` say it and a manifest keeps it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from accel.ir.fields import Fields, Positive


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

    def tokens_kept(self, count: int) -> int:
        """How many tokens stay of a prompt of `count`; at least 1."""
        most = min(count, self.tokens) if self.tokens else count
        return max(min(1, count), min(most, math.floor(self.share * count + 1e-9)))

    def check(self, f: Fields) -> None:
        """See `fields.read`."""
        if not 0 < self.share <= 1:
            raise f.wrong("share", self.share, "more than 0 and at most 1")


@dataclass(frozen=True)
class Segments:
    """A prompt runs `tokens` at a time; what begins at `threshold` or later, and is not its last, by the
    entry `sparse`.
    """

    tokens: Positive
    threshold: int


@dataclass(frozen=True)
class Ranks:
    """The step is cut at each attention, so that several ranks may share a prompt: the entries `rank.0` ..
    `rank.L`, and `attend.<n>`. forms: which of these each of the L layers has.
    """

    forms: tuple[int, ...]

    def check(self, f: Fields) -> None:
        """See `fields.read`."""
        for i, form in enumerate(self.forms):
            if form >= len(self.forms):
                raise f.wrong(f"forms[{i}]", form, f"a number, 0..{len(self.forms) - 1}")


@dataclass(frozen=True)
class Fill:
    """Where only the last logits are asked for, all tokens but the last run by the entry `fill`, if these are `least`
    or more. whole: it does not read the cache, so it takes tokens of empty rows alone, in one call.
    """

    least: Positive
    whole: bool = False


@dataclass(frozen=True)
class Prefill:
    """filter: which tokens the model sees, by the entry `filter`. stages: which tokens the layers after each
    part of the step see; the parts are the entries `prompt.0`, `prompt.1`, … segments: how a prompt is cut
    where stretches of it read some of the keys. ranks: how it is shared. fill: which of its tokens run without logits.
    latents: embeddings that a second model adds before its last `behind` tokens, by the entries `augment.0` and
    `augment.1`.
    """

    filter: Pick | None = None
    stages: tuple[Pick, ...] = ()
    segments: Segments | None = None
    ranks: Ranks | None = None
    fill: Fill | None = None
    latents: int = 0
    behind: int = 0

    def cached_slots(self, count: int) -> int:
        """Slots that the model's own cache has of a prompt of `count` tokens."""
        return (count if self.filter is None else self.filter.tokens_kept(count)) + self.latents
