"""The models that a server has: what is known of each by its artifact, and what it is once it is loaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from accel.ir.errors import ArtifactError, InputError
from accel.ir.facts import Facts
from accel.ir.version import VERSION
from accel.runtime.artifact.artifact import open_artifact
from accel.runtime.inputs.chat import check_template
from accel.runtime.inputs.tokenizer_config import TokenizerConfig
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.serve.embedder import Embedder
from accel.runtime.serve.engine import Engine
from accel.runtime.serve.opening import check_served, memory_of, opened
from accel.runtime.serve.phases import Phases

FLOAT = 4  # bytes


@dataclass(frozen=True)
class Served:
    """A model that is loaded. `chat_template`: in place of the model's own, as `Tokenizer.apply_chat_template` takes
    it; `sampler`: of requests that name none, as `SamplingParams` takes it.
    """

    name: str
    model: CompiledModel
    engine: Engine | Phases | Embedder
    chat_template: str | None = None
    sampler: Mapping[str, Any] | None = None

    @property
    def about(self) -> About:
        """What is known of it."""
        tokenizer = self.model.tokenizer
        chats = self.chat_template is not None or bool(tokenizer and tokenizer.config.templates)
        model, most = self.model, self.engine.max_batch
        return About(model.facts, model.recipe, model.report, chats, most)

    @cached_property
    def fingerprint(self) -> str:
        """What answers of other weights, another recipe or another version of accel do not share."""
        artifact = self.model.artifact
        digest = None if artifact is None else artifact.manifest.digest
        told = json.dumps([digest, self.model.recipe], sort_keys=True, default=str)
        return f"accel-{VERSION}-{hashlib.sha256(told.encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class About:
    """What is known of a model without its weights. `templates`: whether there is one for messages; `max_batch`: the
    most texts that run at once.
    """

    facts: Facts
    recipe: Mapping[str, Any]
    report: Mapping[str, Any]
    templates: bool
    max_batch: int

    @property
    def chats(self) -> bool:
        """Whether text comes of messages."""
        return self.templates and self.facts.embedding is None

    @property
    def adapters(self) -> list[str]:
        """Those that it was built with."""
        return [] if self.facts.adapters is None else sorted(self.facts.adapters.ranks)

    @property
    def entry(self) -> dict[str, Any]:
        """What GET /v1/models tells of it, and the page shows."""
        facts, recipe = self.facts, self.recipe
        methods = {axis: t["use"] for axis, t in recipe.get("tables", {}).items() if "use" in t}
        plain = sum(2 * one.num_kv_heads * one.head_dim * FLOAT for one in facts.layers)
        return {
            "max_model_len": facts.max_context,
            "max_batch": self.max_batch,
            "chat": self.chats,
            "embedding": None if facts.embedding is None else facts.embedding.width,
            "rerank": facts.embedding is not None and facts.embedding.pairs is not None,
            "recipe": recipe.get("name"),
            "about": recipe.get("about"),
            "methods": methods,
            "grade": self.report.get("grade"),
            "kv_bytes_per_token": self.report.get("kv_bytes_per_token"),
            "plain_kv_bytes_per_token": plain,
        }


@dataclass(frozen=True)
class Source:
    """An artifact that was checked, to be served under a name. `options`: of `opened`; `bytes`: what it may take in
    memory, as `memory_of` estimates it.
    """

    name: str
    path: Path
    about: About
    bytes: int
    chat_template: str | None
    sampler: Mapping[str, Any] | None
    options: Mapping[str, Any]

    def again(self) -> Source:
        """It as its folder is now. Raises AccelError."""
        found = source(self.path, self.chat_template, self.sampler, **self.options)
        return replace(found, name=self.name)

    @contextmanager
    def open(self) -> Iterator[Served]:
        """Loaded. Raises AccelError."""
        with opened(self.path, **self.options) as (model, engine):
            yield Served(self.name, model, engine, self.chat_template, self.sampler)


def source(
    path: Path,
    chat_template: str | None = None,
    sampler: Mapping[str, Any] | None = None,
    **options: Any,
) -> Source:
    """An artifact under the name of its folder, checked but for what only its weights can tell; `options` of `opened`.
    Raises AccelError.
    """
    artifact = open_artifact(path, public_key=options.get("public_key"))
    check_served(artifact)
    try:
        config = TokenizerConfig.read(artifact.path, artifact.files)
    except ValueError as error:
        raise ArtifactError(f"{error}; build the artifact again") from error
    if chat_template is not None:
        try:
            check_template(config, chat_template)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
    facts = artifact.facts
    most = min(options.get("max_batch") or facts.max_batch, facts.max_batch)
    chats = chat_template is not None or bool(config.templates)
    about = About(facts, artifact.recipe, artifact.report, chats, most)
    size = memory_of(artifact, most)
    return Source(artifact.path.name, path, about, size, chat_template, sampler, options)
