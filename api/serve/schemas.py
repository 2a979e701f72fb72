"""What the API takes, with OpenAI's names. A field that no class names is ignored, and told or refused (`body`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from accel.serve.scores import MOST

T = TypeVar("T")
Listed = Annotated[
    list[T], Field(fail_fast=True)
]  # one error is enough, however many entries are wrong
REFUSED = "refused"
Refused = Annotated[
    Any, REFUSED
]  # what a text cannot be held to: an error where it asks for something
Unused = Annotated[Any, "of no effect on a text"]


class Schema(BaseModel):
    """Types are as JSON has them: no text for a number."""

    model_config = ConfigDict(strict=True, extra="allow")


class StreamOptions(Schema):
    """`include_usage`: one more chunk, with the tokens of the whole request."""

    include_usage: bool | None = None


class JsonSchema(Schema):
    """A schema that the text must follow, whatever `strict` says."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    json_schema: dict[str, Any] | bool = Field(alias="schema")


class ResponseFormat(Schema):
    """What the text must be. `schema`: of `json_object`, as llama.cpp takes it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    object_schema: dict[str, Any] | bool | None = Field(None, alias="schema")


class StructuredOutputs(Schema):
    """vLLM's, of which one of the first five is given."""

    json_value: dict[str, Any] | str | bool | None = Field(None, alias="json")
    regex: str | None = None
    choice: Listed[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None


class ForReply(Schema):
    """What every request for texts has; None: not given. Those after `top_p` are vLLM's, but for
    `sampler`, as `accel.SamplingParams` has it.
    """

    model: str | None = None  # the one that is served
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    sampler: dict[str, Any] | None = None
    seed: int | None = None
    stop_token_ids: Listed[int] | None = None
    ignore_eos: bool | None = None
    service_tier: Unused = None


class Generation(ForReply):
    """The options of both kinds of OpenAI's older requests; None: not given. Those after `response_format` are vLLM's,
    `grammar` and `json_schema` llama.cpp's.
    """

    max_tokens: int | None = None
    n: int | None = None
    stop: str | Listed[str] | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: Listed[str] | None = None
    guided_grammar: str | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MOST)] | None = None
    min_tokens: Refused = None
    bad_words: Refused = None
    allowed_token_ids: Refused = None
    guided_whitespace_pattern: Refused = None
    structural_tag: Refused = None
    use_beam_search: Refused = None
    user: Unused = None
    metadata: Unused = None
    store: Unused = None
    safety_identifier: Unused = None
    prompt_cache_key: Unused = None


class CompletionRequest(Generation):
    """POST /v1/completions. `prompt`: text, token ids, or a list of either."""

    prompt: Any
    logprobs: Annotated[int, Field(ge=0, le=MOST)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class ExtraFile(Schema):
    """Another file, of `input_extra`."""

    text: str
    filename: str | None = None


class InfillRequest(CompletionRequest):
    """POST /infill, llama.cpp's. `prompt`: what of the gap is written already."""

    prompt: str = ""
    input_prefix: str
    input_suffix: str
    input_extra: Listed[ExtraFile] | None = None
    n_predict: int | None = None
    n_indent: Unused = None
    id_slot: Unused = None
    cache_prompt: Unused = None
    samplers: Unused = None
    response_fields: Unused = None
    t_max_prompt_ms: Unused = None
    t_max_predict_ms: Unused = None


class TokenizeRequest(Schema):
    """POST /tokenize: vLLM's, of a `prompt` or of `messages`, or llama.cpp's, of `content`."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: Listed[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Listed[Any] | None = None
    content: str | None = None
    add_special: bool | None = None
    with_pieces: bool | None = None
    parse_special: Refused = None


class DetokenizeRequest(Schema):
    """POST /detokenize."""

    model: str | None = None
    tokens: Listed[int]


class EmbeddingRequest(Schema):
    """POST /v1/embeddings. `input`: text, token ids, or a list of either."""

    model: str | None = None
    input: Any
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: Unused = None


class RerankRequest(Schema):
    """POST /v1/rerank. `documents`: texts, or objects with a `text`."""

    model: str | None = None
    query: str
    documents: Listed[Any]
    top_n: int | None = None
    return_documents: bool | None = None
    user: Unused = None


class ChatRequest(Generation):
    """POST /v1/chat/completions. The last three are vLLM's: variables of the template, whether it opens an
    answer, and whether the last message goes on.
    """

    messages: Listed[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST)] | None = None
    tools: Listed[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class Adapter(Schema):
    """Of a model, which may be missing where one is served; vLLM's numbers of adapters say nothing here."""

    model: str | None = None
    lora_name: str
    lora_int_id: Unused = None


class AdapterFolder(Adapter):
    """What `peft` saved, at a path of the server."""

    lora_path: str
