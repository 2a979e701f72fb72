"""OpenAI's embeddings: vectors of texts."""

from __future__ import annotations

import base64
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from accel.ir.errors import InputError
from accel.runtime.model.embed import Vectors, check_dimensions
from accel.runtime.serve.embedder import Embedder, Late
from accel.serve import prompts
from accel.serve.errors import ApiError
from accel.serve.schemas import EmbeddingRequest
from accel.serve.serving import Serving
from accel.serve.stream import too_long


def add(app: FastAPI, serving: Serving) -> None:
    """POST /v1/embeddings."""

    def embed(asked: EmbeddingRequest) -> dict[str, Any]:
        served, adapter = serving.models.find(asked.model)
        how, engine = served.model.facts.embedding, served.engine
        if how is None or not isinstance(engine, Embedder):
            told = (
                f"{served.name} makes text, not vectors; ask an embedding model, as accel-compile build makes it of a "
                "directory with modules.json"
            )
            raise ApiError(400, told, param="model")
        if how.pairs is not None:
            told = f"{served.name} compares texts, and makes no vectors; ask /v1/rerank"
            raise ApiError(400, told, param="model")
        assert adapter is None, "a model of vectors has no adapters"
        clock = serving.metrics.clock(served.name)
        try:
            size = check_dimensions(asked.dimensions, how.width)
        except InputError as error:
            raise ApiError(400, str(error), param="dimensions") from None
        texts = prompts.of_texts(asked.input, served)
        try:
            vectors = engine.embed(texts, size, serving.limits.seconds)
        except Late:
            raise too_long(serving.limits.seconds) from None
        clock.token()
        clock.end()
        tokens = sum(one.size for one in texts)
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": i, "embedding": one}
                for i, one in enumerate(_told(vectors, asked.encoding_format == "base64"))
            ],
            "model": asked.model or served.name,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    @app.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        return await serving.at_once(request, EmbeddingRequest, embed)


def _told(vectors: Vectors, packed: bool) -> list[Any]:
    """Lists of numbers, or the bytes of little-endian floats in base64."""
    if not packed:
        found: list[Any] = vectors.tolist()
        return found
    return [base64.b64encode(one.astype("<f4").tobytes()).decode() for one in vectors]
