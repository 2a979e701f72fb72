"""What is done to a prompt, as the methods of `prefill` say it and a manifest keeps it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Filter:
    """The entry `filter` says what each token of a prompt is worth; the model sees the best `tokens`.

    sinks, recent: first and last tokens of the prompt that stay whatever they are worth.
    """

    tokens: int
    sinks: int
    recent: int


@dataclass(frozen=True)
class Prefill:
    """None: prompts are run as they are."""

    filter: Filter | None = None
