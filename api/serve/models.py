"""The models that a server has: each with its engine, under its name, and under that of each adapter."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from accel.ir.errors import InputError, unknown
from accel.ir.version import VERSION
from accel.runtime.inputs.chat import check_template
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.serve.embedder import Embedder
from accel.runtime.serve.engine import Engine
from accel.runtime.serve.opening import opened
from accel.runtime.serve.phases import Phases
from accel.serve.errors import ApiError

FLOAT = 4  # bytes


@dataclass(frozen=True)
class Served:
    """A model that is served. `chat_template`: in place of the model's own, as `Tokenizer.apply_chat_template` takes
    it.
    """

    name: str
    model: CompiledModel
    engine: Engine | Phases | Embedder
    chat_template: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def chats(self) -> bool:
        """Whether there is a template for messages, and text comes of them."""
        if self.model.facts.embedding is not None:
            return False
        tokenizer = self.model.tokenizer
        return self.chat_template is not None or bool(tokenizer and tokenizer.config.templates)

    @cached_property
    def fingerprint(self) -> str:
        """What answers of other weights, another recipe or another version of accel do not share."""
        artifact = self.model.artifact
        digest = None if artifact is None else artifact.manifest.digest
        told = json.dumps([digest, self.model.recipe], sort_keys=True, default=str)
        return f"accel-{VERSION}-{hashlib.sha256(told.encode()).hexdigest()[:12]}"

    @property
    def names(self) -> dict[str, str | None]:
        """The ids that requests name it by -> the adapter that they choose so."""
        adapters = {f"{self.name}:{one}": one for one in self.model.adapters}
        return {self.name: None, **adapters}

    def entry(self, name: str) -> dict[str, Any]:
        """One of its ids, as GET /v1/models lists it: OpenAI's fields, and what the page shows."""
        facts, recipe = self.model.facts, self.model.recipe
        methods = {axis: t["use"] for axis, t in recipe.get("tables", {}).items() if "use" in t}
        plain = sum(2 * one.num_kv_heads * one.head_dim * FLOAT for one in facts.layers)
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "accel",
            "parent": None if name == self.name else self.name,
            "max_model_len": facts.max_context,
            "max_batch": self.engine.max_batch,
            "chat": self.chats,
            "embedding": None if facts.embedding is None else facts.embedding.width,
            "recipe": recipe.get("name"),
            "about": recipe.get("about"),
            "methods": methods,
            "grade": self.model.report.get("grade"),
            "sharing": self.engine.how,
            "kv_bytes_per_token": self.model.report.get("kv_bytes_per_token"),
            "plain_kv_bytes_per_token": plain,
        }


@contextmanager
def served(path: Path, chat_template: str | None = None, **options: Any) -> Iterator[Served]:
    """An artifact under the name of its folder; `options` of `opened`. Raises AccelError."""
    with opened(path, **options) as (model, engine):
        if chat_template is not None and model.tokenizer is not None:
            try:
                check_template(model.tokenizer.config, chat_template)
            except InputError as error:
                raise InputError(f"{path}: {error}") from None
        yield Served(path.resolve().name, model, engine, chat_template)


class Models:
    """All of them, by id."""

    def __init__(self, served: Sequence[Served]):
        """Raises InputError where two have one name."""
        self.served = tuple(served)
        names = [one.name for one in served]
        for name in names:
            if names.count(name) > 1:
                raise InputError(f"two artifacts are named {name}; rename the folder of one")

    def find(self, name: str | None) -> tuple[Served, str | None]:
        """A model and the adapter to use; None: the only model. Raises ApiError: 404; 400 for None of several."""
        if name is None:
            if len(self.served) == 1:
                return self.served[0], None
            ids = ", ".join(one.name for one in self.served)
            raise ApiError(400, f"model is missing; give one of {ids}", param="model")
        for one in self.served:
            if name in (names := one.names):
                return one, names[name]
        known = [name for one in self.served for name in one.names]
        raise ApiError(404, unknown("model", name, known), param="model", code="model_not_found")

    def entries(self) -> list[dict[str, Any]]:
        """What GET /v1/models lists."""
        return [one.entry(name) for one in self.served for name in one.names]
