"""The user's prompts: JSONL with `prompt` and an optional `answer`, or a text file that is one prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from accel.compiler.quality.divergence import Ids
from accel.ir.errors import InputError, unknown
from accel.ir.facts import Facts
from accel.runtime.inputs.encoder_inputs import encoder_rows
from accel.runtime.inputs.prompts import as_prompts
from accel.runtime.inputs.text import Tokenizer

_FORM = '{"prompt": "…", "answer": "…"} (answer is optional)'
_WARM = 4  # tokens
_STRIDE = 0.6180339887498949  # places i * _STRIDE mod 1 are spread evenly, however many are taken


@dataclass(frozen=True)
class Prompt:
    """place: the file and the line, for messages."""

    text: str
    answer: str | None = None
    place: str = ""


@dataclass(frozen=True)
class Sample:
    """A prompt as the model takes it. ids: [P]; source: an encoder's input [X]; new: tokens to generate."""

    prompt: Prompt
    ids: Ids
    source: Ids | None
    new: int

    @property
    def length(self) -> int:
        """Tokens in the cache at the end."""
        return int(self.ids.size) + self.new

    def request(self) -> dict[str, Any]:
        """What `generate` takes. The model's own end tokens do not end it, so all runs are equally long."""
        given = {} if self.source is None else {"encoder_input": [self.source]}
        return {"prompts": [self.ids], "max_new_tokens": self.new, "eos": [], **given}

    def warm(self) -> dict[str, Any]:
        """The same of the prompt backwards, which shares no prefix with it, and few tokens."""
        return {**self.request(), "prompts": [self.ids[::-1].copy()], "max_new_tokens": _WARM}


@dataclass(frozen=True)
class Samples:
    """All prompts, in an order whose beginnings are spread over the files."""

    rows: list[Sample] = field(default_factory=list)

    @property
    def longest(self) -> Sample:
        return max(
            self.rows, key=lambda row: row.length + (0 if row.source is None else row.source.size)
        )

    @property
    def answers(self) -> bool:
        return any(row.prompt.answer is not None for row in self.rows)


def read_prompts(paths: Sequence[Path]) -> list[Prompt]:
    """The prompts of files. Raises InputError with the file and the line."""
    return [prompt for path in paths for prompt in _read(path)]


def _read(path: Path) -> list[Prompt]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"--prompts {path}: {error.strerror}; give a .jsonl or text file"
        ) from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise InputError(
            f"--prompts {path}, line {line}: not UTF-8 text (byte {data[error.start]:#04x}); convert it to UTF-8"
        ) from None
    if path.suffix.lower() == ".json":
        raise InputError(f"--prompts {path}: give .jsonl, one JSON object per line: {_FORM}")
    if path.suffix.lower() != ".jsonl":
        found = [Prompt(text.removesuffix("\n"), None, str(path))]
    else:
        lines = enumerate(text.split("\n"), 1)  # U+2028 may stand in a JSON string
        found = [_line(f"{path}, line {i}", line) for i, line in lines if line.strip()]
    if not any(prompt.text.strip() for prompt in found):
        raise InputError(f"--prompts {path} is empty; write one JSON object per line: {_FORM}")
    return found


def _line(place: str, line: str) -> Prompt:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"--prompts {place}: not JSON ({error}); write {_FORM}") from None
    if not isinstance(value, dict):
        raise InputError(f"--prompts {place}: a {_kind(value)}, not an object; write {_FORM}")
    if "prompt" not in value:
        wrong = min(value, default="", key=lambda key: "did you mean" not in _near(key))
        raise InputError(
            f"--prompts {place}: no key 'prompt'; {_near(wrong) if wrong else ''} write {_FORM}"
        )
    for key in ("prompt", "answer"):
        if not isinstance(value.get(key), str) and (key == "prompt" or value.get(key) is not None):
            raise InputError(
                f"--prompts {place}: '{key}' is a {_kind(value[key])}; write it as a string"
            )
    if not value["prompt"] or value.get("answer") == "":
        raise InputError(f"--prompts {place}: an empty string; write {_FORM}")
    return Prompt(value["prompt"], value.get("answer"), place)


def _near(key: str) -> str:
    return unknown("key", str(key), ("prompt", "answer"))


def _kind(value: Any) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def samples(prompts: Sequence[Prompt], facts: Facts, tokenizer: Tokenizer, new: int) -> Samples:
    """Prompts as token ids; of those with an answer, as many new tokens as it has, or more.

    Raises InputError where one does not fit into the context.
    """
    rows = [_sample(prompt, facts, tokenizer, new) for prompt in prompts]
    order = sorted(range(len(rows)), key=lambda i: (i * _STRIDE) % 1)
    return Samples([rows[i] for i in order])


def _sample(prompt: Prompt, facts: Facts, tokenizer: Tokenizer, new: int) -> Sample:
    source = None
    if prompt.answer is not None:
        new = max(new, len(tokenizer.encode(prompt.answer, special=False)) + 1)
    try:
        if facts.encoder is not None:
            source = (encoder_rows(prompt.text, facts.encoder, tokenizer) or [])[0]
            ids = np.array(facts.encoder.start, np.int64)
            room = facts.encoder.max_length
            if source.size > room:
                raise InputError(f"{source.size} tokens are more than the encoder's {room}")
        else:
            ids = np.array(tokenizer.encode(prompt.text), np.int64)
        if ids.size + new > facts.max_context:
            raise InputError(
                f"{ids.size} tokens and {new} new ones are more than the context of {facts.max_context}; "
                f"shorten it, or give a larger max_context=…"
            )
        return Sample(prompt, as_prompts([ids], facts, tokenizer)[0], source, new)
    except InputError as error:
        raise InputError(f"--prompts {prompt.place}: {error}") from None
