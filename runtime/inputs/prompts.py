"""What users call a prompt, made into arrays of token ids, with errors that say what to do."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from accel.ir.errors import InputError, shown
from accel.ir.facts import Facts
from accel.runtime.inputs.ints import Ints, as_ints, check_vocabulary
from accel.runtime.inputs.text import Tokenizer

MOST_STOPS, LONGEST_STOP = 64, 1024  # all are looked for at every token


def as_prompts(
    value: Any,
    facts: Facts,
    tokenizer: Tokenizer | None,
    starts: Sequence[Sequence[int]] | None = None,
    what: str = "prompt",
) -> list[Ints]:
    """One array [n] per prompt: from a str, token ids (list, array, tensor [n]), a list of those,
    or an array [B,n]. `starts`: of each, the tokens that go before a text, in place of the tokenizer's own. `what`:
    the name of one in errors.

    Raises InputError for an empty, too long or out-of-vocabulary prompt, and for text without a
    tokenizer.
    """
    items = items_of(value, f"{what}s")
    before = [None] * len(items) if starts is None else starts
    prompts = [
        _one(item, f"{what} {i}", tokenizer, start)
        for i, (item, start) in enumerate(zip(items, before, strict=True))
    ]
    for i, prompt in enumerate(prompts):
        name = f"{what} {i}"
        if not prompt.size:
            raise InputError(
                f"{name} is empty; give at least one token, such as the model's bos token"
            )
        if prompt.size > facts.max_context:
            raise InputError(
                f"{name} has {prompt.size} tokens; max_context is {facts.max_context}. "
                "Shorten it, or build with more: max_context=…"
            )
        check_vocabulary(prompt, facts.token_ids, name)
    return prompts


def without_messages(
    value: Any, tokenizer: Tokenizer | None, template_kwargs: Mapping[str, Any] | None
) -> Any:
    """What the user gave, each conversation (a list of messages) as the token ids that the chat template makes of it.

    `template_kwargs`: arguments of `Tokenizer.apply_chat_template`. Raises InputError.
    """
    many = isinstance(value, (list, tuple)) and any(map(is_conversation, value))
    if not many and not is_conversation(value):
        if template_kwargs is not None:
            raise InputError(
                "chat_template_kwargs are for messages, and the prompt is none; leave them out, or give a list of "
                "messages"
            )
        return value
    if tokenizer is None:
        raise InputError(
            "the prompt is a list of messages, but this model has no tokenizer; give token ids, or build with "
            "tokenizer=…"
        )

    def ids(prompt: Any) -> Any:
        return (
            tokenizer.apply_chat_template(prompt, **template_kwargs or {})
            if is_conversation(prompt)
            else prompt
        )

    return [ids(one) for one in value] if many else ids(value)


def is_conversation(value: Any) -> bool:
    """Whether a prompt is a list of messages rather than text or token ids."""
    return (
        isinstance(value, (list, tuple))
        and bool(value)
        and all(isinstance(message, Mapping) for message in value)
    )


def is_text(value: Any) -> bool:
    """Whether a prompt is text rather than token ids."""
    return isinstance(value, str)


def as_eos(value: Any, facts: Facts) -> tuple[int, ...]:
    """The tokens that end a row: None gives the model's own, an int or a list of ints replaces
    them, [] is none.
    """
    if value is None:
        return tuple(facts.eos)
    found = np.atleast_1d(as_ints(value, "eos"))
    if found.ndim != 1:
        raise InputError(f"eos has shape {list(found.shape)}; give a token id or a list of them")
    check_vocabulary(found, facts.vocab_size, "eos")
    return tuple(found.tolist())


def as_stops(value: Any, tokenizer: Tokenizer | None) -> tuple[str, ...]:
    """As of `check_stops`. Raises InputError, also where there is no tokenizer."""
    stops = check_stops(value)
    if stops and tokenizer is None:
        raise InputError(
            "stop needs a tokenizer, but this model has none; use eos=… (token ids), or build with "
            "tokenizer=…"
        )
    return stops


def check_stops(value: Any) -> tuple[str, ...]:
    """Stop strings: None, a str or a list of them. Raises InputError."""
    if value is None:
        return ()
    stops = tuple(value) if isinstance(value, (list, tuple, set, frozenset)) else (value,)
    if len(stops) > MOST_STOPS or any(len(s) > LONGEST_STOP for s in stops if isinstance(s, str)):
        raise InputError(
            f"stop has {len(stops)} strings; give at most {MOST_STOPS}, each of at most {LONGEST_STOP} characters"
        )
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise InputError(f"stop = {shown(value)}: give a non-empty string or a list of them")
    return stops


def as_count(value: Any, name: str, low: int, high: int | None = None) -> int:
    """A whole number in its range. Raises InputError."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):
        upto = f"from {low} to {high}" if high is not None else f"of {low} or more"
        raise InputError(f"{name} = {shown(value)} is out of range; give an integer {upto}")
    return int(value)


def items_of(value: Any, name: str) -> list[Any]:
    """The prompts (or encoder inputs, as `name` says) in what the user gave, each still as given."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, (list, tuple)):
        if not value:
            raise InputError(f"{name} are empty; give text, token ids, or a list of them")
        return [value] if all(_scalar(v) for v in value) else list(value)
    if not hasattr(value, "__array__") and not hasattr(value, "tolist"):
        raise InputError(
            f"{name} are {type(value).__name__}; give text, token ids, or a list of them"
        )
    array = as_ints(value, name)
    if array.ndim not in (1, 2):
        raise InputError(f"{name} have shape {list(array.shape)}; give [n] or [B, n]")
    return [array] if array.ndim == 1 else list(array)


def _scalar(value: Any) -> bool:
    """A number, plain or as an array without axes."""
    return isinstance(value, numbers.Number) or getattr(value, "ndim", None) == 0


def _one(value: Any, name: str, tokenizer: Tokenizer | None, start: Sequence[int] | None) -> Ints:
    """One prompt as token ids [n]."""
    if is_text(value):
        if tokenizer is None:
            raise InputError(
                f"{name} is text, but this model has no tokenizer; "
                "give token ids, or build with tokenizer=…"
            )
        if start is not None:
            return np.array([*start, *tokenizer.encode(value, special=False)], np.int64)
        return np.array(tokenizer.encode(value) if value else [], np.int64)
    ids = as_ints(value, name)
    if ids.ndim != 1:
        raise InputError(f"{name} has shape {list(ids.shape)}; give token ids [n]")
    return ids
