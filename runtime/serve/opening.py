"""An artifact and an engine over it, as servers and workers open them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from accel.ir.errors import InputError
from accel.lowering.onnx.threads import MOST_THREADS
from accel.runtime.artifact.artifact import Artifact, open_artifact
from accel.runtime.backends.onnx.tune import AUTO
from accel.runtime.inputs.prompts import as_count
from accel.runtime.inputs.tokenizer_config import TOKENIZER
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.model.load import draft_of, from_artifact
from accel.runtime.schedule import chosen
from accel.runtime.serve.embedder import Embedder
from accel.runtime.serve.engine import Engine
from accel.runtime.serve.phases import Phases, serving


@contextmanager
def opened(
    path: str | os.PathLike[str],
    *,
    max_batch: int | None = None,
    max_waiting: int = 64,
    threads: int | None = None,
    kernels: str = AUTO,
    public_key: str | os.PathLike[str] | None = None,
    mapped: bool = False,
) -> Iterator[tuple[CompiledModel, Engine | Phases | Embedder]]:
    """The model of an artifact and an engine over it (an `Embedder` where texts become vectors); arguments as of `load`
    and `serving`, a larger `max_batch` than the model's is the model's. `mapped`: weights are read where the file is
    mapped, which processes share, and no copy is packed. Requests that are not over when it closes are cancelled.
    Raises AccelError.
    """
    if threads is not None:
        as_count(threads, "threads", 1, MOST_THREADS)
    artifact = open_artifact(path, public_key=public_key)
    check_served(artifact)
    with from_artifact(artifact, threads=threads, kernels=kernels, mapped=mapped) as model:
        most = min(max_batch or model.facts.max_batch, model.facts.max_batch)
        engine: Engine | Phases | Embedder
        if model.facts.embedding is not None:
            engine = Embedder(model, max_batch=most, max_waiting=max_waiting)
        else:
            engine = serving(
                model,
                max_batch=most,
                max_waiting=max_waiting,
                threads=threads,
                kernels=kernels,
                public_key=public_key,
            )
        try:
            yield model, engine
        finally:
            engine.close(drain=False)


def check_served(artifact: Artifact) -> None:
    """Raise InputError where no text comes of an artifact by a prompt alone."""
    encoder = artifact.facts.encoder is not None
    if encoder or TOKENIZER not in artifact.files:
        lacks = "it is an encoder-decoder" if encoder else "it has no tokenizer"
        raise InputError(f"{artifact.path} cannot be served: {lacks}; build another, or use `run`")


def memory_of(artifact: Artifact, max_batch: int) -> int:
    """An estimate of the bytes that it takes to serve an artifact: its files, and the state of `max_batch` whole
    contexts, of its draft model too, in each process that its schedule asks for. What calls need while they run comes
    on top. Raises ArtifactError.
    """
    drafts = draft_of(artifact)
    models = [artifact] if drafts is None else [artifact, drafts]
    tokens = max_batch * artifact.facts.max_context
    held = sum(int(one.report.get("kv_bytes_per_token", 0)) for one in models)
    files = sum(file.bytes for file in artifact.files.values())
    return len(chosen(artifact.recipe).homes) * (files + tokens * held)
