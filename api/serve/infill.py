"""Fill in the middle: a text between two others, by the tokens that models learnt for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from accel.ir.errors import InputError
from accel.runtime.inputs.infill import BEFORE, BEHIND, FORMS, Form, forms_of
from accel.runtime.inputs.ints import Ints, as_ints
from accel.runtime.inputs.prompts import items_of
from accel.runtime.inputs.text import Tokenizer
from accel.serve import prompts
from accel.serve.errors import ApiError
from accel.serve.models import Served

_LEAD = "☺"  # SentencePiece treats the first word of a text otherwise than those behind it


@dataclass(frozen=True)
class Infill:
    """A form, and the numbers of its tokens and ends in a model's vocabulary."""

    form: Form
    numbers: dict[str, int]
    tokenizer: Tokenizer

    @classmethod
    def of(cls, served: Served, param: str) -> Infill:
        """Of a model; `param`: the field that asks for it. Raises ApiError."""
        tokenizer = served.model.tokenizer
        assert tokenizer is not None, "the command refuses models without"
        for form, numbers in forms_of(tokenizer):
            return cls(form, numbers, tokenizer)
        looked = "; ".join(" ".join(form.marks) for form in FORMS)
        raise ApiError(
            400,
            f"{param}: {served.name} has no tokens to fill in the middle with, of which these were looked for: "
            f"{looked}; leave it out, or serve a model that learnt them",
            param=param,
            code="unsupported_parameter",
        )

    @property
    def ends(self) -> list[int]:
        """The tokens that end the middle."""
        return [*self.numbers.values()]

    def prompt(self, before: str | Sequence[int], behind: str, ahead: Sequence[int] = ()) -> Ints:
        """Token ids [n] that the middle follows; `ahead`: what stands before the form."""
        found = [*self._opening(), *ahead]
        for part in self.form.parts:
            if part == BEFORE:
                found += self._encode(before) if isinstance(before, str) else before
            elif part == BEHIND:
                found += self._behind(behind)
            else:
                found.append(self.numbers[part])
        return np.array(found, np.int64)

    def file(self, name: str, text: str) -> list[int]:
        """The token ids of another file, to stand ahead."""
        mark = self.numbers.get(self.form.file)
        if mark is None:
            return self._encode(f"{text}\n\n")
        return [mark, *self._encode(f"{name}\n{text}\n")]

    def _opening(self) -> list[int]:
        """What the tokenizer puts before a text."""
        bare, whole = self._encode("a"), self.tokenizer.encode("a")
        places = range(len(whole) - len(bare) + 1)
        return whole[: next((i for i in places if whole[i : i + len(bare)] == bare), 0)]

    def _behind(self, text: str) -> list[int]:
        """A text that begins within a line: without the space that SentencePiece puts before a first word."""
        lead, whole = self._encode(_LEAD), self._encode(_LEAD + text)
        return whole[len(lead) :] if whole[: len(lead)] == lead else self._encode(text)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, special=False)


def of_completion(
    prompt: Any, suffix: str, served: Served, ahead: Sequence[tuple[str, str]] = (), room: int = 0
) -> tuple[list[Ints], list[int]]:
    """The prompts [n] of a completion with a text behind the gap, and the tokens that end it. `ahead`: names and texts
    of other files; the first ones are left out where they do not fit, with `room` for so many tokens. Raises ApiError.
    """
    infill = Infill.of(served, "suffix")
    prompts.check_length(suffix, served, "suffix")
    try:
        before = [_prompt(one, served) for one in items_of(prompt, "prompts")]
        found = [infill.prompt(one, suffix) for one in before]
        most = served.model.facts.max_context - max(one.size for one in found) - room
        kept = list[int]()
        for name, text in reversed(ahead):
            if len(text) > prompts.PER_TOKEN * max(most, 0):
                break
            more = infill.file(name, text)
            if len(more) + len(kept) >= most:
                break
            kept = more + kept
        if kept:
            found = [infill.prompt(one, suffix, kept) for one in before]
    except InputError as error:
        raise ApiError(400, str(error), param="suffix") from None
    return prompts.checked(found, served, "suffix"), infill.ends


def _prompt(prompt: Any, served: Served) -> str | Sequence[int]:
    """The text before the gap, or its token ids. Raises InputError, ApiError."""
    if isinstance(prompt, str):
        prompts.check_length(prompt, served, "prompt")
        return prompt
    ids = as_ints(prompt, "prompt")
    if ids.ndim != 1:
        raise InputError(f"a prompt has shape {list(ids.shape)}; give token ids [n]")
    found: list[int] = ids.tolist()
    return found
