"""What a client sends as a prompt -> token ids: text, ids, or messages by the chat template of the model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from accel.ir.errors import InputError
from accel.runtime.inputs.ints import Ints
from accel.runtime.inputs.prompts import as_prompts, items_of
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.model.embed import pairs
from accel.serve.errors import ApiError
from accel.serve.history import developers
from accel.serve.models import Served
from accel.serve.schemas import ChatRequest
from accel.serve.tools import as_templates_want

PER_TOKEN = 16  # characters of a text that is looked at first, for each token of the context
MOST_TEXTS = 2048  # of a request that asks for vectors, as OpenAI's
_MARK = "\ue0a5\uf1c3\ue2d7"  # of no script: no text and no template has it
_TAKEN = {*inspect.signature(Tokenizer.apply_chat_template).parameters, "config"}
_VARIABLES = {"add_generation_prompt"}  # of a template's own names, those that a client may set


def count(prompt: Any) -> int:
    """How many prompts a completion has. Raises ApiError."""
    try:
        return len(items_of(prompt, "prompts"))
    except InputError as error:
        raise ApiError(400, str(error), param="prompt") from None


def of_texts(inputs: Any, served: Served) -> list[Ints]:
    """The texts [n] of what becomes vectors. Raises ApiError."""
    try:
        items = items_of(inputs, "texts")
    except InputError as error:
        raise ApiError(400, f"input: {error}", param="input") from None
    if len(items) > MOST_TEXTS:
        told = f"input has {len(items):,} texts; give at most {MOST_TEXTS:,} in a request"
        raise ApiError(400, told, param="input")
    for i, text in enumerate(items):
        if isinstance(text, str):
            check_length(text, served, "input", f"text {i}")
    return checked(inputs, served, "input", "text")


def of_pairs(query: str, texts: Sequence[str], served: Served) -> list[Ints]:
    """A query with each of the texts [n] that it is compared with. Raises ApiError."""
    if not 0 < len(texts) <= MOST_TEXTS:
        told = f"documents has {len(texts):,} texts; give 1 to {MOST_TEXTS:,} in a request"
        raise ApiError(400, told, param="documents")
    check_length(query, served, "query", "the query")
    for i, text in enumerate(texts):
        check_length(text, served, "documents", f"document {i}")
    try:
        found = pairs(query, texts, served.model.facts, served.model.tokenizer)
    except InputError as error:
        raise ApiError(400, str(error), param="documents") from None
    return checked(found, served, "documents", "document")


def of_completion(prompt: Any, served: Served) -> list[Ints]:
    """The prompts [n] of a completion. Raises ApiError."""
    for text in items_of(prompt, "prompts"):
        if isinstance(text, str):
            check_length(text, served, "prompt")
    return checked(prompt, served, "prompt")


def texts(prompt: Any, served: Served) -> list[str]:
    """The text of each prompt of a completion."""
    tokenizer = served.model.tokenizer
    assert tokenizer is not None, "the command refuses models without"
    found = items_of(prompt, "prompts")
    return [one if isinstance(one, str) else tokenizer.decode(one) for one in found]


def variables(asked: ChatRequest) -> Mapping[str, Any] | None:
    """What the template reads beside the messages. Raises ApiError."""
    opens = asked.add_generation_prompt
    if asked.continue_final_message:
        if opens:
            raise ApiError(
                400,
                "continue_final_message goes on with the last message, and add_generation_prompt opens another; give "
                "one",
                param="continue_final_message",
            )
        opens = False
    given = {} if opens is None else {"add_generation_prompt": opens}
    return {**(asked.chat_template_kwargs or {}), **given}


def of_chat(
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any] | None,
    served: Served,
    tools: Sequence[Mapping[str, Any]] | None = None,
    go_on: bool = False,
) -> str:
    """The prompt that the template makes of messages; `go_on`: it ends in the last one, which is the assistant's.
    Raises ApiError, AccelError.
    """
    if wrong := sorted((_TAKEN - _VARIABLES) & {*(variables or {})}):
        raise ApiError(
            400,
            f"chat_template_kwargs: {wrong[0]} is no variable of a template; leave it out",
            param="chat_template_kwargs",
        )
    plain = developers([_plain(message, i) for i, message in enumerate(messages)])
    if go_on:
        plain = _marked(plain)
    tokenizer = served.model.tokenizer
    assert tokenizer is not None, "the command refuses models without"
    try:
        given = {**(variables or {}), "chat_template": served.chat_template, "tools": tools}
        text = tokenizer.apply_chat_template(plain, tokenize=False, **given)
        text = _up_to_mark(text) if go_on else text
    except InputError as error:
        raise ApiError(400, str(error), param="messages") from None
    check_length(text, served, "messages")
    return text


def encoded(text: str, served: Served) -> Sequence[int]:
    """The tokens of a chat's prompt. Raises ApiError."""
    tokenizer = served.model.tokenizer
    assert tokenizer is not None, "the command refuses models without"
    try:
        return tokenizer.encode(text, special=False)
    except InputError as error:
        raise ApiError(400, str(error), param="messages") from None


def fitting(tokens: Sequence[int], served: Served) -> Ints:
    """The prompt [n] of a chat, which has to fit into the context. Raises ApiError."""
    (found,) = checked(tokens, served, "messages")
    return found


def _marked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """With a mark at the end of the last one. Raises ApiError."""
    last = messages[-1] if messages else {}
    content = last.get("content")
    if last.get("role") != "assistant" or not isinstance(content, str) or not content:
        told = "continue_final_message: the last message is not the assistant's, with text; give one that is"
        raise ApiError(400, told, param="continue_final_message")
    return [*messages[:-1], {**last, "content": content + _MARK}]


def _up_to_mark(text: str) -> str:
    """Raises ApiError."""
    before, mark, _ = text.rpartition(_MARK)
    if not mark:
        told = "continue_final_message: the model's chat template does not write the last message"
        raise ApiError(400, told, param="continue_final_message")
    return before


def check_length(text: str, served: Served, param: str, what: str = "the prompt") -> None:
    """Raise ApiError for a text far past the context, before all of it is encoded: tokens take a hundred times the
    memory of their text. A cut changes the last tokens of a part only, so twice the context is past any doubt.
    """
    tokenizer, most = served.model.tokenizer, served.model.facts.max_context
    assert tokenizer is not None, "the command refuses models without"
    size = PER_TOKEN * most
    while size < len(text):
        if len(tokenizer.encode(text[:size], special=False)) > 2 * most:
            raise ApiError(
                400,
                f"{what} has far more tokens than max_context = {most}; shorten it, or build with more: "
                "max_context=…",
                param=param,
                code="context_length_exceeded",
            )
        size *= 2


def _plain(message: Mapping[str, Any], i: int) -> dict[str, Any]:
    """A message whose parts of text are one text, as most templates want it. Raises ApiError."""
    message = as_templates_want(message, i)
    content = message.get("content")
    if not isinstance(content, list):
        if content is not None and not isinstance(content, str):
            raise ApiError(
                400, f"messages[{i}].content is no text and no list of parts", param="messages"
            )
        return message
    for part in content:
        if not (
            isinstance(part, dict)
            and part.get("type") == "text"
            and isinstance(part.get("text"), str)
        ):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ApiError(
                400,
                f'messages[{i}].content has a part of type {kind!r:.40}; this server takes {{"type": "text", '
                '"text": …}} only',
                param="messages",
            )
    return {**message, "content": "".join(part["text"] for part in content)}


def checked(prompts: Any, served: Served, param: str, what: str = "prompt") -> list[Ints]:
    """Prompts as token ids [n]; `what`: they are, in errors. Raises ApiError."""
    try:
        return as_prompts(prompts, served.model.facts, served.model.tokenizer, what=what)
    except InputError as error:
        code = "context_length_exceeded" if "max_context" in str(error) else None
        raise ApiError(400, str(error), param=param, code=code) from None
