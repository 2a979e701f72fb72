"""What methods of a recipe may rely on, break or provide: the one vocabulary of what goes with what."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, ClassVar

__all__ = ["PROVIDED", "Invariant", "Method"]


class Invariant(Enum):
    """A sentence that holds of a session unless a method of its recipe breaks it; those of `PROVIDED` hold only where a
    method provides them. The value is the sentence that an error prints.
    """

    UNIFORM_SLOTS = "all layers write the same tokens into the same slots"
    FIXED_LAYERS = "no layer is deleted once its cache is laid out"
    ALL_LAYERS_RUN = "every layer makes queries, keys and values of every token"
    TOKENS_CONTIGUOUS = "the tokens of a row lie in its slots one after the other, without gaps"
    ALL_TOKENS_HELD = "a session holds every token that it was given"
    ROW_PRIVATE = "the cache of a row is its own"
    PLAIN_KEYS = "the cache holds keys as attention reads them, and nothing that was made of them"
    FULL_ATTENTION = "every query reads every key that it may see"
    APPEND_ONLY = "tokens come one after the other, and none is written again"
    CHAINS = "the tokens of a call are one chain, each after the one before"
    CALL_INDEPENDENT = (
        "a token's keys and values depend on the tokens before it, not on how calls cut them"
    )
    DECODE_WIDTH = "a call of a few tokens gives the logits of as many calls of one"
    EXACT_WIDTH = "the same tokens give the same bits, however they came into the cache"
    REWIND = "the newest tokens can be taken back"
    HOST_MEMORY = "the cache lies in the memory of this process"
    PROBABILITIES = "the drafter gives probabilities, not only an order of tokens"
    DRAFT_MODEL = "a draft model is built into the artifact"
    LAYERS_BY_CALL = "a call may say which layers run"


PROVIDED = frozenset({Invariant.PROBABILITIES, Invariant.DRAFT_MODEL, Invariant.LAYERS_BY_CALL})


class Method:
    """What a method declares, as class attributes, or as properties where an option decides. A recipe is refused
    exactly where one method relies on what another breaks, or on what is to be provided and no method provides.
    `small`: options with which a tiny model and a few dozen tokens feel the method, where its defaults are too large.
    """

    small: ClassVar[Mapping[str, Any]] = {}

    @property
    def relies(self) -> frozenset[Invariant]:
        """What it cannot work without."""
        return frozenset()

    @property
    def breaks(self) -> frozenset[Invariant]:
        """What no longer holds with it."""
        return frozenset()

    @property
    def provides(self) -> frozenset[Invariant]:
        """What of `PROVIDED` holds by it."""
        return frozenset()
