"""Open an artifact as a compiled model."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from accel.ir.errors import ArtifactError
from accel.ir.fields import MANIFEST
from accel.lowering.onnx.threads import MOST_THREADS
from accel.runtime import schedule
from accel.runtime.artifact.artifact import Artifact, open_artifact, own_draft
from accel.runtime.artifact.manifest import DRAFT_FOLDER
from accel.runtime.backends.onnx.backend import OrtBackend
from accel.runtime.backends.onnx.tune import AUTO
from accel.runtime.inputs.prompts import as_count
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.inputs.tokenizer_config import TOKENIZER, TokenizerConfig
from accel.runtime.loop import HOST
from accel.runtime.model.adapters import Adapters
from accel.runtime.model.compiled import CompiledModel

ALONE = 32 << 20  # bytes that one thread reads sooner than others would wake up


def load(
    path: str | os.PathLike[str],
    *,
    threads: int | None = None,
    kernels: str = AUTO,
    public_key: str | os.PathLike[str] | None = None,
) -> CompiledModel:
    """Open an artifact. Its files are checked first. Imports neither torch nor transformers.

    Args:
        path: the artifact's folder.
        threads: compute threads per call. Default: `OMP_NUM_THREADS`, or the number of physical cores.
        kernels: a kernel variant (`accel-compile inspect` lists them), or "auto": the fastest on this
            machine, measured on first use in under two seconds and then cached.
        public_key: path of a public Ed25519 key (OpenSSH or PEM). The artifact must be signed with it
            (`accel-compile sign`); this is checked first. Default: signatures are not looked at.

    Raises:
        ArtifactError: the artifact is missing, damaged, newer than this version, unsafe, or not signed
            with the key.
        InputError: an argument is wrong, such as a key that is not Ed25519.
    """
    if threads is not None:
        as_count(threads, "threads", 1, MOST_THREADS)
    artifact = open_artifact(path, public_key=public_key)
    return from_artifact(artifact, threads=threads, kernels=kernels)


def from_artifact(
    artifact: Artifact,
    *,
    threads: int | None = None,
    kernels: str = AUTO,
    program: Any = None,
    on_close: Callable[[], None] | None = None,
    in_turns: bool = False,
    mapped: bool = False,
    plain: bool = False,
) -> CompiledModel:
    """A model over an artifact that is already checked. `in_turns`, `mapped`: as in `OrtBackend`; `plain`: decode one
    token per call, whatever the recipe. Raises ArtifactError.

    A small draft model gets one thread, so that the target's threads need not stop while it computes. One over the
    weights of the artifact itself reads them where the file is mapped, so that no second copy is packed.
    """
    draft_model, recipe, facts = None, artifact.recipe, artifact.facts
    if schedule.chosen(
        recipe
    ).splits_cores:  # calls of several numbers of threads share weights, and make room
        in_turns = mapped = True
    if plain:
        recipe = {
            **recipe,
            "tables": {n: t for n, t in recipe.get("tables", {}).items() if n not in HOST},
        }
    elif (draft := draft_of(artifact)) is not None:
        alone = sum(file.bytes for file in draft.files.values()) < ALONE
        in_turns = in_turns or not alone
        draft_model = from_artifact(
            draft,
            threads=1 if alone else threads,
            in_turns=in_turns,
            mapped=draft.path == artifact.path,
        )
    return CompiledModel(
        OrtBackend(artifact, threads=threads, in_turns=in_turns, kernels=kernels, mapped=mapped),
        facts,
        tokenizer=_tokenizer(artifact) if TOKENIZER in artifact.files else None,
        recipe=recipe,
        report=artifact.report,
        program=program,
        artifact=artifact,
        draft_model=draft_model,
        on_close=on_close,
        adapters=None if facts.adapters is None else Adapters(facts.adapters, artifact.path),
    )


def draft_of(artifact: Artifact) -> Artifact | None:
    """The model that drafts: a smaller one, or itself over the same weights. Its checksums are among the artifact's.
    Raises ArtifactError.
    """
    if f"{DRAFT_FOLDER}/{MANIFEST}" in artifact.files:
        return open_artifact(artifact.path / DRAFT_FOLDER, hashes=False)
    return own_draft(artifact)


def _tokenizer(artifact: Artifact) -> Tokenizer:
    """The one that the artifact holds. Raises ArtifactError."""
    try:
        config = TokenizerConfig.read(artifact.path, artifact.files)
    except ValueError as error:
        raise ArtifactError(f"{error}; build the artifact again") from error
    return Tokenizer(artifact.path / TOKENIZER, config)
