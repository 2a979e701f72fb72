"""What clients are answered: the objects of OpenAI's API, whole and in chunks."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from accel.runtime.decode.logprobs import Logprob
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.serve.engine import Event, Ticket

Object = dict[str, Any]


@dataclass(frozen=True)
class Score:
    """The log-probabilities of one token: its own, then the likeliest. `offset`: the characters of the text that were
    certain before it.
    """

    logprobs: Mapping[int, Logprob]
    offset: int


@dataclass
class Choice:
    """A text so far; `scores`: of each token, where they were asked for."""

    text: str = ""
    scores: list[Score] = field(default_factory=list)
    finish: str | None = None

    def take(self, event: Event) -> list[Score]:
        """An event more; the scores that it brings."""
        fresh = [] if event.logprobs is None else [Score(event.logprobs, len(self.text))]
        self.scores += fresh
        self.text += event.text
        self.finish = event.finish
        return fresh


class Reply(ABC):
    """The answer to one request. `top`: of how many likely tokens it tells log-probabilities beside each one that came
    (None: of none at all); `usage`: each chunk has a field for it.
    """

    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, model: str, tokenizer: Tokenizer, *, top: int | None, usage: bool):
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time())}
        self._model, self._tokenizer = model, tokenizer
        self._top, self._usage = top, usage

    def whole(self, choices: Sequence[Choice], tickets: Sequence[Ticket], prompts: int) -> Object:
        """All of it at once; `prompts`: how many the tickets are of."""
        told = [
            {"index": i, **self._text(one.text), **self._logprobs(one.scores), "finish_reason": one.finish}
            for i, one in enumerate(choices)
        ]  # fmt: skip
        return {**self._object(self.whole_object, told), "usage": usage(tickets, prompts)}

    def first(self, index: int) -> Object | None:
        """What begins the stream of a choice; None: nothing."""
        return None

    def piece(self, index: int, text: str, scores: Sequence[Score]) -> Object:
        """More of a choice."""
        return self._chunk(index, self._delta(text), self._logprobs(scores), None)

    def last(self, index: int, finish: str) -> Object:
        """What ends a choice."""
        return self._chunk(index, self._end, {"logprobs": None}, finish)

    def total(self, tickets: Sequence[Ticket], prompts: int) -> Object:
        """The chunk of the usage."""
        return {**self._object(self.chunk_object, []), "usage": usage(tickets, prompts)}

    def _chunk(self, index: int, delta: Object, logprobs: Object, finish: str | None) -> Object:
        choice = {"index": index, **delta, **logprobs, "finish_reason": finish}
        more: Object = {"usage": None} if self._usage else {}
        return {**self._object(self.chunk_object, [choice]), **more}

    def _object(self, kind: str, choices: Sequence[Object]) -> Object:
        return {**self._head, "object": kind, "model": self._model, "choices": choices}

    def _logprobs(self, scores: Sequence[Score]) -> Object:
        return {"logprobs": None if self._top is None else self._scores(scores, self._top)}

    def _name(self, token: int) -> str:
        """A token's text; one of bytes that are no text is written as such, so that none looks like another."""
        data = self._tokenizer.token_bytes(token) or b""
        try:
            return data.decode("utf-8") or self._tokenizer.token(token) or ""
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    @property
    @abstractmethod
    def _end(self) -> Object:
        """The part of the last chunk that would hold text."""

    @abstractmethod
    def _text(self, text: str) -> Object:
        """The part of a choice that holds all text."""

    @abstractmethod
    def _delta(self, text: str) -> Object:
        """The part of a chunk that holds more text."""

    @abstractmethod
    def _scores(self, scores: Sequence[Score], top: int) -> Object:
        """Log-probabilities."""


class CompletionReply(Reply):
    """Of POST /v1/completions."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    @property
    def _end(self) -> Object:
        return {"text": ""}

    def _text(self, text: str) -> Object:
        return {"text": text}

    def _delta(self, text: str) -> Object:
        return {"text": text}

    def _scores(self, scores: Sequence[Score], top: int) -> Object:
        named = [self._named(one.logprobs) for one in scores]
        return {
            "tokens": [next(iter(line)) for line in named],
            "token_logprobs": [next(iter(line.values())) for line in named],
            "top_logprobs": named if top else None,
            "text_offset": [one.offset for one in scores],
        }

    def _named(self, logprobs: Mapping[int, Logprob]) -> dict[str, float]:
        """By the text of each token: the one that came, then the likeliest. Of those with one text the first."""
        named: dict[str, float] = {}
        for token, one in logprobs.items():
            named.setdefault(self._name(token), one.logprob)
        return named


class ChatReply(Reply):
    """Of POST /v1/chat/completions."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    @property
    def _end(self) -> Object:
        return {"delta": {}}

    def first(self, index: int) -> Object:
        """The role."""
        return self._chunk(
            index, {"delta": {"role": "assistant", "content": ""}}, {"logprobs": None}, None
        )

    def _text(self, text: str) -> Object:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta(self, text: str) -> Object:
        return {"delta": {"content": text}}

    def _scores(self, scores: Sequence[Score], top: int) -> Object:
        content = []
        for score in scores:
            told = {token: self._score(token, one) for token, one in score.logprobs.items()}
            best = sorted(told, key=lambda token: score.logprobs[token].rank)[:top]
            content.append({**next(iter(told.values())), "top_logprobs": [told[t] for t in best]})
        return {"content": content, "refusal": None}

    def _score(self, token: int, logprob: Logprob) -> Object:
        data = self._tokenizer.token_bytes(token)
        return {
            "token": self._name(token),
            "logprob": logprob.logprob,
            "bytes": None if data is None else list(data),
        }


def usage(tickets: Sequence[Ticket], prompts: int) -> Object:
    """Tokens of a request, whose tickets are samples of each of its prompts in turn: a prompt counts once. Drafted
    tokens are told as OpenAI's predicted ones; those that were rejected are no part of `completion_tokens`.
    """
    samples = len(tickets) // prompts
    told = [ticket.usage for ticket in tickets]
    prompt = sum(one.prompt_tokens for one in told[::samples])
    made = sum(one.completion_tokens for one in told)
    accepted = sum(one.accepted for one in told)
    return {
        "prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": sum(one.reused for one in told[::samples])},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(one.drafted for one in told) - accepted,
        },
    }  # fmt: skip
