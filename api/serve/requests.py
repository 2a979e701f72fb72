"""What a client asks for -> requests of an engine."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from accel.ir.errors import InputError, shown
from accel.runtime.decode.sampling_params import SamplingParams
from accel.runtime.decode.structured_outputs import StructuredOutputsParams
from accel.runtime.inputs.ints import Ints
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.serve.embedder import NO_TEXT
from accel.runtime.serve.engine import Event, Request, Ticket
from accel.runtime.serve.reply.machine import Reading
from accel.serve import infill, prompts, tools
from accel.serve.constraints import FIELDS, constraint
from accel.serve.errors import ApiError, of_exception, unsupported
from accel.serve.models import Served
from accel.serve.schemas import ChatRequest, CompletionRequest, Generation, InfillRequest
from accel.serve.scores import Echo

COMPLETION_TOKENS = 16  # OpenAI's default
TEMPERATURE = 1.0  # OpenAI's default
_BAN = -100.0  # the least bias of OpenAI's: the token never comes


@dataclass(frozen=True)
class Asked:
    """The prompts of a request [n], and how many samples of each: choice i is of prompt i // samples. `reading`: how
    they are read; `guide`: what they have to be; `echoes`: each prompt, where answers begin with it; `ends`: token
    ids that end them beside those that were asked for, and are no text.
    """

    prompts: Sequence[Ints]
    samples: int
    asked: Generation
    served: Served
    adapter: str | None
    reading: Reading
    guide: StructuredOutputsParams | None
    echoes: Sequence[Echo] = ()
    ends: Sequence[int] = ()
    ignored: Sequence[str] = ()
    words: Mapping[str, str] = field(default_factory=dict)

    def submit(self) -> list[Ticket]:
        """Give all choices to the engine, or none. Raises Full, ApiError, AccelError."""
        tickets: list[Ticket] = []
        try:
            params = _params(self.asked, self.served, self.guide, self.ends)
            marks = frozenset([*self.reading.marks.values(), *self.ends])
            scored = _scored(self.asked)
            for prompt in self.prompts:
                for sample in range(self.samples):
                    nothing = self.asked.max_tokens == 0 and isinstance(
                        self.asked, CompletionRequest
                    )
                    if nothing and scored is None:
                        tickets.append(_ended(prompt))
                        continue
                    request = Request(
                        prompt,
                        params,
                        adapter=self.adapter,
                        sample=sample,
                        marks=marks,
                        prompt_logprobs=scored,
                        only_prompt=nothing,
                    )
                    tickets.append(self.served.engine.submit(request))
        except BaseException as error:
            for ticket in tickets:
                ticket.cancel()
            if isinstance(error, InputError) and _full_context(self.prompts, self.served):
                raise ApiError(400, str(error), code="context_length_exceeded") from None
            if isinstance(error, InputError):
                raise _in_their_words(error, self.asked).in_words(self.words) from None
            raise
        return tickets


def check_makes_text(served: Served) -> None:
    """Raise ApiError for a model of vectors."""
    if served.model.facts.embedding is not None:
        raise ApiError(400, f"{served.name}: {NO_TEXT}", param="model")


def of_infill(asked: InfillRequest, served: Served, adapter: str | None) -> Asked:
    """Raises ApiError."""
    check_makes_text(served)
    for name in ("stream", "suffix", "echo"):
        if getattr(asked, name):
            raise unsupported(name)
    room = served.model.facts.max_context
    limit = room if asked.n_predict in (None, -1) else asked.n_predict
    samples = _samples(asked, served)
    found, ends = infill.of_completion(
        asked.input_prefix + asked.prompt,
        asked.input_suffix,
        served,
        [(one.filename or "file", one.text) for one in asked.input_extra or ()],
        min(limit or 0, room // 4),
    )
    asked = asked.model_copy(update={"max_tokens": limit})
    reading = Reading(_tokenizer(served))
    return Asked(found, samples, asked, served, adapter, reading, _constraint(asked), ends=ends)


def of_completion(asked: CompletionRequest, served: Served, adapter: str | None) -> Asked:
    """Raises ApiError."""
    check_makes_text(served)
    if asked.suffix and asked.echo:
        told = "echo gives the prompt before the answer, and suffix lies behind it; leave out one"
        raise ApiError(400, told, param="echo")
    if asked.best_of is not None and asked.best_of != (asked.n or 1):
        raise unsupported("best_of")
    samples = _samples(asked, served)
    _check_texts(prompts.count(asked.prompt) * samples, served)
    ends = list[int]()
    if asked.suffix:
        found, ends = infill.of_completion(asked.prompt, asked.suffix, served)
    else:
        found = prompts.of_completion(asked.prompt, served)
    tokenizer = _tokenizer(served)
    reading, echoes = Reading(tokenizer), list[Echo]()
    if asked.echo:
        texts = zip(prompts.texts(asked.prompt, served), found, strict=True)
        echoes = [Echo(tokenizer, text, ids.tolist(), asked.logprobs) for text, ids in texts]
    guide = _constraint(asked)
    return Asked(found, samples, asked, served, adapter, reading, guide, echoes, ends)


def of_chat(
    asked: ChatRequest,
    served: Served,
    adapter: str | None,
    *,
    words: Mapping[str, str] | None = None,
    ignored: Sequence[str] = (),
) -> Asked:
    """`words`, `ignored`: as of `Asked`. Raises ApiError, AccelError."""
    check_makes_text(served)
    if asked.functions:
        raise unsupported("functions")
    if asked.top_logprobs is not None and not asked.logprobs:
        raise ApiError(400, "top_logprobs goes with logprobs: true", param="top_logprobs")
    samples = _samples(asked, served)
    _check_texts(samples, served)
    calling = tools.calling(asked, served)
    text = _text(asked, served, calling)
    found = prompts.fitting(prompts.encoded(text, served), served)
    thinking = calling.thinking
    reading = calling.reading(served, bool(thinking and text.rstrip().endswith(thinking.open)))
    guide = calling.guide(reading, _constraint(asked))
    return Asked(
        [found],
        samples,
        asked,
        served,
        adapter,
        reading,
        guide,
        ignored=[*ignored, *calling.ignored],
        words=words or {},
    )


def chat_tokens(asked: ChatRequest, served: Served) -> Sequence[int]:
    """The tokens of a chat's prompt, which may be longer than the context. Raises ApiError, AccelError."""
    return prompts.encoded(_text(asked, served, tools.calling(asked, served)), served)


def _text(asked: ChatRequest, served: Served, calling: tools.Calling) -> str:
    """The text of a chat's prompt. Raises ApiError, AccelError."""
    effort: dict[str, Any] = {}
    if asked.reasoning_effort is not None:
        effort["reasoning_effort"] = asked.reasoning_effort
    if asked.reasoning_effort == "none":
        effort["enable_thinking"] = False
    variables = {**effort, **(prompts.variables(asked) or {})}
    go_on = bool(asked.continue_final_message)
    return prompts.of_chat(asked.messages, variables, served, calling.shown, go_on)


def top(asked: Generation) -> int | None:
    """Of how many likely tokens log-probabilities are to be told beside each one; None: of none at all."""
    if isinstance(asked, ChatRequest):
        return (asked.top_logprobs or 0) if asked.logprobs else None
    assert isinstance(asked, CompletionRequest)
    return asked.logprobs


def _tokenizer(served: Served) -> Tokenizer:
    assert served.model.tokenizer is not None, "the command refuses models without"
    return served.model.tokenizer


def _scored(asked: Generation) -> int | None:
    """Of how many likely tokens log-probabilities are to be told beside each one of the prompt; None: of none at all.
    Raises ApiError.
    """
    if asked.prompt_logprobs is not None and asked.stream:
        told = "prompt_logprobs are not told in a stream; leave out one of them"
        raise ApiError(400, told, param="prompt_logprobs")
    echoed = asked.logprobs if isinstance(asked, CompletionRequest) and asked.echo else None
    return max((one for one in (asked.prompt_logprobs, echoed) if one is not None), default=None)


def _samples(asked: Generation, served: Served) -> int:
    """`n`, which must fit. Raises ApiError."""
    n, most = 1 if asked.n is None else asked.n, served.engine.max_batch
    if not 1 <= n <= most:
        raise ApiError(
            400,
            f"n = {n} is out of range; this server runs {most} texts at once: give from 1 to {most}, "
            "or serve an artifact that was built for more: max_batch=…",
            param="n",
        )
    return n


def _check_texts(count: int, served: Served) -> None:
    """Raise ApiError where so many fit into no empty queue."""
    most = served.engine.max_waiting
    if count > most:
        raise ApiError(
            400,
            f"the request asks for {count} texts (prompts times n), and at most {most} may wait; send "
            "several requests",
            param="prompt",
        )


def _ended(prompt: Ints) -> Ticket:
    """What nothing is made of."""
    ticket = Ticket(int(prompt.size), lambda: None)
    ticket.put(Event(-1, "", finish="length"))
    return ticket


def _full_context(prompts: Sequence[Ints], served: Served) -> bool:
    return any(prompt.size >= served.model.facts.max_context for prompt in prompts)


def _constraint(asked: Generation) -> StructuredOutputsParams | None:
    """What the text must be. Raises ApiError."""
    try:
        return constraint(asked)
    except InputError as error:
        raise _in_their_words(error, asked) from None


def _in_their_words(error: InputError, asked: Generation) -> ApiError:
    """An error of the options, with the names of the request's fields."""
    text, tooled = str(error), isinstance(asked, ChatRequest) and asked.tools
    for own, theirs in (
        *(("structured_outputs", name) for name in FIELDS),
        *([("structured_outputs", "tools")] if tooled else []),
        ("max_tokens", "max_completion_tokens"),
        ("max_tokens", "n_predict"),
    ):
        if text.startswith(own) and getattr(asked, theirs, None) is not None:
            error = InputError(theirs + text.removeprefix(own))
            break
    return of_exception(error, type(asked).model_fields)


def _params(
    asked: Generation, served: Served, guide: StructuredOutputsParams | None, ends: Sequence[int]
) -> SamplingParams:
    """The options of each text. Raises InputError, ApiError."""
    limit = asked.max_tokens
    if isinstance(asked, ChatRequest):
        if asked.max_completion_tokens is not None:
            limit = asked.max_completion_tokens
        limit = served.model.facts.max_context if limit is None else limit
    elif limit is None:
        limit = COMPLETION_TOKENS
    return SamplingParams(
        max_tokens=limit or (0 if isinstance(asked, ChatRequest) else 1),  # `_ended`
        temperature=TEMPERATURE if asked.temperature is None else asked.temperature,
        top_k=None if asked.top_k in (0, -1) else asked.top_k,  # vLLM's for all tokens
        top_p=asked.top_p,
        min_p=asked.min_p,
        repetition_penalty=1.0 if asked.repetition_penalty is None else asked.repetition_penalty,
        presence_penalty=asked.presence_penalty or 0.0,
        frequency_penalty=asked.frequency_penalty or 0.0,
        sampler=served.sampler if asked.sampler is None else asked.sampler,
        seed=None if asked.seed is None else asked.seed % (1 << 64),  # OpenAI's may be negative
        stop=asked.stop or None,
        stop_token_ids=[*(asked.stop_token_ids or ()), *ends],
        ignore_eos=bool(asked.ignore_eos),
        logprobs=top(asked),
        logit_bias=_bias(asked.logit_bias),
        structured_outputs=guide,
    )


def _bias(bias: dict[str, Any] | None) -> dict[int, float] | None:
    """JSON has keys of text. Raises ApiError."""
    found: dict[int, float] = {}
    for token, value in (bias or {}).items():
        if not re.fullmatch("0|[1-9][0-9]{0,8}", token):
            told = f"logit_bias: {shown(token)} is no token id; its keys are token ids"
            raise ApiError(400, told, param="logit_bias")
        low = isinstance(value, int | float) and value <= _BAN
        found[int(token)] = -math.inf if low else value
    return found or None
