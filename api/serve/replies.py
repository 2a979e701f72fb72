"""What clients are answered: the objects of OpenAI's API, whole and in chunks."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from accel.runtime.decode.logprobs import Logprob
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.serve.engine import Event, Ticket, Usage
from accel.runtime.serve.reply.machine import Machine
from accel.runtime.serve.reply.parts import Finish, Part, Reasoning, Text, ToolCall
from accel.serve.scores import of_completion, token_name

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
    """A reply so far: what its `machine` reads. `calls`: each as its parts; `scores`: of each token, where they were
    asked for.
    """

    machine: Machine
    text: str = ""
    reasoning: str = ""
    calls: list[list[ToolCall]] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    finish: str | None = None

    def take(self, event: Event, usage: Usage) -> tuple[list[Part], list[Score]]:
        """An event more: the parts and the scores that it brings."""
        fresh = [] if event.logprobs is None else [Score(event.logprobs, len(self.text))]
        self.scores += fresh
        parts = list(self.machine.take(event, usage))
        for part in parts:
            if isinstance(part, Text):
                self.text += part.text
            elif isinstance(part, Reasoning):
                self.reasoning += part.text
            elif isinstance(part, ToolCall):
                self.calls += [] if part.arguments else [[]]
                self.calls[part.index].append(part)
            else:
                self.finish = part.reason
        return parts, fresh


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
            {"index": i, **self._reply(one), **self._logprobs(one.scores), "finish_reason": one.finish}
            for i, one in enumerate(choices)
        ]  # fmt: skip
        return {**self._object(self.whole_object, told), "usage": usage(tickets, prompts)}

    def first(self, index: int) -> Object | None:
        """What begins the stream of a choice; None: nothing."""
        return None

    def pieces(
        self, index: int, parts: Sequence[Part], scores: Sequence[Score]
    ) -> Iterator[Object]:
        """More of a choice, and its end; the scores go with the first piece."""
        more = [part for part in parts if not isinstance(part, Finish)]
        for one in more or ([Text("")] if scores else []):
            yield self._chunk(index, self._delta(one), self._logprobs(scores), None)
            scores = []
        for part in parts:
            if isinstance(part, Finish):
                yield self._chunk(index, self._end, {"logprobs": None}, part.reason)

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
        """As of `token_name`."""
        return token_name(self._tokenizer, token)

    @property
    @abstractmethod
    def _end(self) -> Object:
        """The part of the last chunk that would hold text."""

    @abstractmethod
    def _reply(self, choice: Choice) -> Object:
        """The part of a choice that holds all of the reply."""

    @abstractmethod
    def _delta(self, part: Reasoning | Text | ToolCall) -> Object:
        """The part of a chunk that holds more of it."""

    @abstractmethod
    def _scores(self, scores: Sequence[Score], top: int) -> Object:
        """Log-probabilities."""


class CompletionReply(Reply):
    """Of POST /v1/completions."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    @property
    def _end(self) -> Object:
        return {"text": ""}

    def _reply(self, choice: Choice) -> Object:
        return {"text": choice.text}

    def _delta(self, part: Reasoning | Text | ToolCall) -> Object:
        assert isinstance(part, Text), "completions are read as text"
        return {"text": part.text}

    def _scores(self, scores: Sequence[Score], top: int) -> Object:
        lines, offsets = [one.logprobs for one in scores], [one.offset for one in scores]
        tokens = [next(iter(line)) for line in lines]
        return of_completion(self._tokenizer, tokens, lines, offsets, top)


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

    def _reply(self, choice: Choice) -> Object:
        said: Object = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.reasoning:
            said["reasoning_content"] = choice.reasoning
        if choice.calls:
            said["content"] = choice.text or None
            said["tool_calls"] = [self._call(parts) for parts in choice.calls]
        return {"message": said}

    @staticmethod
    def _call(parts: Sequence[ToolCall]) -> Object:
        arguments = "".join(part.arguments for part in parts)
        function = {"name": parts[0].name, "arguments": arguments}
        return {"id": parts[0].id, "type": "function", "function": function}

    def _delta(self, part: Reasoning | Text | ToolCall) -> Object:
        if isinstance(part, Text):
            return {"delta": {"content": part.text}}
        if isinstance(part, Reasoning):
            return {"delta": {"reasoning_content": part.text}}
        more: Object = {"function": {"arguments": part.arguments}}
        if not part.arguments:
            more = self._call([part])
        return {"delta": {"tool_calls": [{"index": part.index, **more}]}}

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
