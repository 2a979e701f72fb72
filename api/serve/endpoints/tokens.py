"""Text to token ids and back, as vLLM and llama.cpp answer."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from accel.ir.errors import InputError
from accel.runtime.inputs.text import Tokenizer
from accel.serve import prompts
from accel.serve.errors import ApiError
from accel.serve.models import Served
from accel.serve.requests import chat_tokens
from accel.serve.schemas import ChatRequest, DetokenizeRequest, TokenizeRequest
from accel.serve.serving import Serving

_KINDS = ("prompt", "messages", "content")


def add(app: FastAPI, serving: Serving) -> None:
    """POST /tokenize and /detokenize, GET /tokenizer_info."""

    def tokenize(asked: TokenizeRequest) -> dict[str, Any]:
        served, _ = serving.models.find(asked.model)
        tokenizer = _tokenizer(served)
        ids = _ids(asked, served)
        written = [tokenizer.token(token) for token in ids]
        if asked.content is not None and asked.with_pieces:
            pieces = zip(ids, written, strict=True)
            return {"tokens": [{"id": token, "piece": piece} for token, piece in pieces]}
        return {
            "count": len(ids),
            "max_model_len": served.model.facts.max_context,
            "tokens": ids,
            "token_strs": written if asked.return_token_strs else None,
        }

    def detokenize(asked: DetokenizeRequest) -> dict[str, Any]:
        served, _ = serving.models.find(asked.model)
        tokenizer, size = _tokenizer(served), served.model.facts.vocab_size
        for place, token in enumerate(asked.tokens):
            if not 0 <= token < size:
                told = f"tokens[{place}] = {token} is no token id of {served.name}; give 0 to {size - 1}"
                raise ApiError(400, told, param="tokens")
        text = tokenizer.decode(asked.tokens, special=True)
        return {"prompt": text, "content": text}

    @app.post("/tokenize")
    async def to_tokens(request: Request) -> Response:
        return await serving.at_once(request, TokenizeRequest, tokenize)

    @app.post("/detokenize")
    async def to_text(request: Request) -> Response:
        return await serving.at_once(request, DetokenizeRequest, detokenize)

    @app.get("/tokenizer_info")
    async def tokenizer_info(request: Request, model: str | None = None) -> dict[str, Any]:
        served, _ = await serving.model(request, model)
        tokenizer, facts = _tokenizer(served), served.model.facts
        eos = tokenizer.token(facts.eos[0]) if facts.eos else None
        special: dict[str, str | None] = {"bos_token": None, "eos_token": eos, "pad_token": None}
        templates = tokenizer.config.templates
        template = served.chat_template or templates.get("default")
        return {**special, **tokenizer.config.special, "chat_template": template}


def _ids(asked: TokenizeRequest, served: Served) -> list[int]:
    """Raises ApiError."""
    given = [kind for kind in _KINDS if getattr(asked, kind) is not None]
    if len(given) != 1:
        told = f"{' and '.join(given) or 'nothing'} to tokenize is given; give one of {', '.join(_KINDS)}"
        raise ApiError(400, told, param=given[0] if given else "prompt")
    if asked.messages is not None:
        names = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
        options = {name: getattr(asked, name) for name in names}
        chat = ChatRequest(messages=asked.messages, tools=asked.tools, **options)
        return [*chat_tokens(chat, served)]
    text = asked.prompt if asked.content is None else asked.content
    assert text is not None, "one is given"
    special = asked.add_special_tokens if asked.content is None else bool(asked.add_special)
    prompts.check_length(text, served, given[0])
    try:
        return _tokenizer(served).encode(text, special=special is not False)
    except InputError as error:
        raise ApiError(400, str(error), param=given[0]) from None


def _tokenizer(served: Served) -> Tokenizer:
    assert served.model.tokenizer is not None, "the command refuses models without"
    return served.model.tokenizer
