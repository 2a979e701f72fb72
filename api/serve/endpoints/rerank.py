"""Cohere's, Jina's and vLLM's way to order texts by how well they answer a query."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from accel.runtime.serve.embedder import Embedder, Late
from accel.serve import prompts
from accel.serve.errors import ApiError
from accel.serve.schemas import RerankRequest
from accel.serve.serving import Serving
from accel.serve.stream import too_long


def add(app: FastAPI, serving: Serving) -> None:
    """POST /v1/rerank and /rerank."""

    def rerank(asked: RerankRequest) -> dict[str, Any]:
        served, _ = serving.models.find(asked.model)
        how, engine = served.model.facts.embedding, served.engine
        if how is None or how.pairs is None or not isinstance(engine, Embedder):
            told = (
                f"{served.name} compares no texts; ask a cross-encoder, as accel-compile build makes it of a "
                "BertForSequenceClassification with one label"
            )
            raise ApiError(400, told, param="model")
        if asked.top_n is not None and asked.top_n < 1:
            raise ApiError(400, f"top_n is {asked.top_n}; give 1 or more", param="top_n")
        clock = serving.metrics.clock(served.name)
        texts = [_text(one, i) for i, one in enumerate(asked.documents)]
        pairs = prompts.of_pairs(asked.query, texts, served)
        try:
            scores = engine.embed(pairs, None, serving.limits.seconds)[:, 0].tolist()
        except Late:
            raise too_long(serving.limits.seconds) from None
        clock.token()
        clock.end()
        order = sorted(range(len(texts)), key=lambda i: -scores[i])[: asked.top_n]
        tokens = sum(one.size for one in pairs)
        return {
            "id": f"rerank-{uuid.uuid4().hex}",
            "model": asked.model or served.name,
            "results": [
                {
                    "index": i,
                    **({} if asked.return_documents is False else {"document": {"text": texts[i]}}),
                    "relevance_score": scores[i],
                }
                for i in order
            ],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    @app.post("/v1/rerank")
    @app.post("/rerank")
    async def reranked(request: Request) -> Response:
        return await serving.at_once(request, RerankRequest, rerank)


def _text(document: Any, i: int) -> str:
    """Raises ApiError."""
    found = document.get("text") if isinstance(document, dict) else document
    if not isinstance(found, str):
        told = f'documents[{i}] is no text; give text, or {{"text": …}}'
        raise ApiError(400, told, param="documents")
    return found
