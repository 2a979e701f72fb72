"""Log-probabilities of tokens in the form of completions, and those of prompts, which come before the answer's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accel.runtime.decode.logprobs import Logprob
from accel.runtime.inputs.text import Tokenizer

Line = Mapping[int, Logprob]
MOST = 20  # likely tokens beside each one


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """A token's text; one of bytes that are no text is written as such, so that none looks like another."""
    data = tokenizer.token_bytes(token) or b""
    try:
        return data.decode("utf-8") or tokenizer.token(token) or ""
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def of_completion(
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    lines: Sequence[Line | None],
    offsets: Sequence[int],
    top: int,
) -> dict[str, Any]:
    """OpenAI's object of completions. `lines`: of each token, None where nothing is known of it; `offsets`: where its
    text begins; `top`: of how many likely tokens it tells beside each one.
    """
    named = [None if line is None else _named(tokenizer, line) for line in lines]
    return {
        "tokens": [token_name(tokenizer, token) for token in tokens],
        "token_logprobs": [None if one is None else next(iter(one.values())) for one in named],
        "top_logprobs": named if top else None,
        "text_offset": [*offsets],
    }


def of_prompt(lines: Sequence[Line | None], top: int) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: by the number of each token, as text."""
    return [
        None if line is None else {str(t): vars(one) for t, one in cut(line, top).items()}
        for line in lines
    ]


def cut(line: Line, top: int) -> Line:
    """Of the token that came, and of `top` likely ones."""
    came = next(iter(line))
    return {token: one for token, one in line.items() if token == came or one.rank <= top}


def offsets(tokenizer: Tokenizer, text: str, tokens: Sequence[int]) -> list[int]:
    """Where each token's part of a text begins; a special token has a part where the text spells it."""
    stream, found, place = tokenizer.stream(), list[int](), 0
    for token in tokens:
        found.append(place)
        piece = stream.push(token)
        if token in tokenizer.special and text.startswith(tokenizer.token(token) or "", place):
            piece = tokenizer.token(token) or ""
        place = min(place + len(piece), len(text))
    return found


def _named(tokenizer: Tokenizer, line: Line) -> dict[str, float]:
    """By the text of each token: the one that came, then the likeliest. Of those with one text the first."""
    named: dict[str, float] = {}
    for token, one in line.items():
        named.setdefault(token_name(tokenizer, token), one.logprob)
    return named


class Echo:
    """The prompt in front of a completion, with the log-probabilities of its tokens where `top` is no None."""

    def __init__(self, tokenizer: Tokenizer, text: str, tokens: Sequence[int], top: int | None):
        self._tokenizer, self._text, self._tokens, self._top = tokenizer, text, tokens, top

    def open(self, choice: dict[str, Any], lines: Sequence[Line | None] | None) -> None:
        """Put the prompt before the first of a choice, whose other offsets are right already; `lines`: of its
        tokens.
        """
        choice["text"] = self._text + choice["text"]
        if self._top is None or lines is None:
            return
        places = offsets(self._tokenizer, self._text, self._tokens)
        parts = [None if line is None else cut(line, self._top) for line in lines]
        told = of_completion(self._tokenizer, self._tokens, parts, places, self._top)
        for name, values in (choice["logprobs"] or {}).items():
            told[name] = None if told[name] is None else told[name] + values
        choice["logprobs"] = told

    def shift(self, choice: dict[str, Any]) -> None:
        """Count the offsets of a choice, or of a part of it, from the prompt's beginning."""
        if choice["logprobs"] is not None:
            found = choice["logprobs"]["text_offset"]
            choice["logprobs"]["text_offset"] = [len(self._text) + one for one in found]
