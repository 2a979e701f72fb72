"""What the API takes, with OpenAI's names. A field that no class names is ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

T = TypeVar("T")
Listed = Annotated[
    list[T], Field(fail_fast=True)
]  # one error is enough, however many entries are wrong


class Schema(BaseModel):
    """Types are as JSON has them: no text for a number."""

    model_config = ConfigDict(strict=True, extra="ignore")


class StreamOptions(Schema):
    """`include_usage`: one more chunk, with the tokens of the whole request."""

    include_usage: bool | None = None


class JsonSchema(Schema):
    """A schema that the text must follow, whatever `strict` says."""

    name: str | None = None
    json_schema: dict[str, Any] | bool = Field(alias="schema")


class ResponseFormat(Schema):
    """What the text must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Generation(Schema):
    """The options of both kinds of request; None: not given. Those after `response_format` are vLLM's."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | Listed[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Listed[int] | None = None
    ignore_eos: bool | None = None


class CompletionRequest(Generation):
    """POST /v1/completions. `prompt`: text, token ids, or a list of either."""

    prompt: Any
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class ChatRequest(Generation):
    """POST /v1/chat/completions. `chat_template_kwargs` is vLLM's: variables of the template."""

    messages: Listed[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
