"""A model on the disk: what its configuration, tokenizer and weights are, each read once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any

from accel.compiler.load.checkpoint import Loaded, load_streamed, load_whole, stored_tensors
from accel.compiler.load.config import (
    auto_class,
    check_type,
    own_code_note,
    quantisation,
    read_config,
    refuse,
    runs_own_code,
    text_type,
)
from accel.compiler.load.converted import older_files
from accel.compiler.load.gguf import GgufModel, open_gguf
from accel.compiler.load.gguf._file import GgufFile, is_gguf, read_gguf
from accel.compiler.load.quantised import dequantised
from accel.compiler.load.quiet import quiet
from accel.compiler.load.sentence import SentenceRecipe, cross_encoder, sentence_recipe
from accel.compiler.load.shards import read_shards
from accel.compiler.load.text_part import text_config, text_tensors
from accel.compiler.load.tokenizer import of_file, of_gguf, read_tokenizer
from accel.ir.embedding import Embedding
from accel.ir.errors import AccelError, CaptureError
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.inputs.tokenizer_config import TOKENIZER


class Source(ABC):
    """A model directory or a GGUF file. Nothing is read before it is asked for, and no code of its own runs."""

    def __init__(self, path: Path):
        self.path = path

    def load(self, trust_remote_code: bool = False, embedding: Embedding | None = None) -> Loaded:
        """The decoder or encoder-decoder, or what `embedding` takes; its weights stay in the files until they are read.

        Raises:
            CaptureError: not a model, no such architecture, missing or damaged weights, or a
                model that brings its own code without `trust_remote_code`.
        """
        try:
            with quiet():
                return self._load(trust_remote_code, embedding)
        except AccelError:
            raise
        except Exception as error:  # transformers raises many kinds
            raise CaptureError(
                f"{self.path} cannot be loaded: {type(error).__name__}: {error}"
            ) from error

    @abstractmethod
    def _load(self, trust_remote_code: bool, embedding: Embedding | None) -> Loaded: ...

    @property
    def sentence_recipe(self) -> SentenceRecipe | None:
        """How the files say that texts become vectors; None: they say nothing of it. Raises CaptureError."""
        return None

    @abstractmethod
    def config(self, trust_remote_code: bool = False) -> Any:
        """The configuration, as transformers takes it. Raises CaptureError."""

    @property
    @abstractmethod
    def vocab_size(self) -> int | None:
        """How many tokens it says that it has, before its weights are read; None where it does not say."""

    @property
    @abstractmethod
    def has_weights(self) -> bool:
        """Whether there is more than a configuration."""

    @property
    @abstractmethod
    def quantised(self) -> bool:
        """Whether its weights are in few bits."""

    @property
    @abstractmethod
    def has_tokenizer(self) -> bool:
        """Whether its files say how text is cut into tokens."""

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer | None:
        """With the tokens and templates that the files tell of. Raises CaptureError."""

    @property
    def no_tokenizer(self) -> str | None:
        """Why none comes of files that hold a vocabulary, and what to do; None where one does, or they hold none."""
        return None


class Folder(Source):
    """A Hugging Face directory, or a config.json by itself."""

    @cached_property
    def _json(self) -> dict[str, Any]:
        """What config.json says. Raises CaptureError."""
        return read_config(self.path)

    @property
    def sentence_recipe(self) -> SentenceRecipe | None:
        if not self.path.is_dir():
            return None
        if found := sentence_recipe(self.path):
            return found
        try:
            config = self._json
        except CaptureError:
            return None  # loading it will say why
        return cross_encoder(self.path, config)

    def _load(self, trust_remote_code: bool, embedding: Embedding | None) -> Loaded:
        path, config = self.path, self._json
        refuse(path, config, trust_remote_code, embedding)
        told = quantisation(path, config, trust_remote_code)
        if not self.has_weights:
            raise CaptureError(
                f"{path} holds no *.safetensors; save the model with model.save_pretrained(...), which writes them"
            )
        notes = own_code_note(path, config, trust_remote_code)
        if runs_own_code(config, trust_remote_code) or config.get("transformers_weights"):
            return Loaded(
                load_whole(path, auto_class(config, embedding), trust_remote_code), {}, notes
            )
        shards = read_shards(path)
        stored = stored_tensors(shards)
        if told:
            try:
                stored, said = dequantised(told, shards.tensors, stored, shards.pages)
            except CaptureError as error:
                raise CaptureError(f"{path}: {error}") from None
            notes += said
        found = self.config(trust_remote_code, embedding)
        if embedding is None and text_type(config) is not None:
            stored, others = text_tensors(stored, found)
            notes.append(
                f"the language model of a {config['model_type']} alone: {len(others)} tensors of the other parts are "
                "left out, so it reads text, and no images or sounds"
            )
        return load_streamed(path, found, stored, shards.pages, notes, embedding=embedding)

    def config(self, trust_remote_code: bool = False, embedding: Embedding | None = None) -> Any:
        from transformers import AutoConfig

        refuse(self.path, self._json, trust_remote_code, embedding)
        try:
            found = AutoConfig.from_pretrained(
                self.path, local_files_only=True, trust_remote_code=trust_remote_code
            )
        except Exception as error:  # transformers raises many kinds
            raise CaptureError(
                f"{self.path}: config.json is rejected by transformers: {type(error).__name__}: {error}"
            ) from error
        if hasattr(found, "quantization_config"):
            del found.quantization_config  # its weights are floats to transformers
        return found if embedding is not None else text_config(found, self._json)

    @property
    def vocab_size(self) -> int | None:
        try:
            config = self._json
        except CaptureError:
            return None  # loading it will say why
        inner = config.get("text_config")
        size = config.get(
            "vocab_size", inner.get("vocab_size") if isinstance(inner, dict) else None
        )
        return size if isinstance(size, int) else None

    @property
    def has_weights(self) -> bool:
        return self.path.is_dir() and any(self.path.glob("*.safetensors"))

    @property
    def quantised(self) -> bool:
        return bool(self._json.get("quantization_config"))

    @property
    def has_tokenizer(self) -> bool:
        return (self.path / TOKENIZER).is_file() or self._converted[0] is not None

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        file = self.path / TOKENIZER
        return of_file(file) if file.is_file() else self._converted[0]

    @property
    def no_tokenizer(self) -> str | None:
        return None if (self.path / TOKENIZER).is_file() else self._converted[1]

    @cached_property
    def _converted(self) -> tuple[Tokenizer | None, str | None]:
        """What comes of older files than tokenizer.json, or else why nothing does."""
        if not self.path.is_dir() or not older_files(self.path):
            return None, None
        try:
            return read_tokenizer(self.path), None
        except CaptureError as error:
            return None, str(error)


class Gguf(Source):
    """A GGUF file, or the first part of one that is split."""

    has_weights, quantised = True, True

    @cached_property
    def file(self) -> GgufFile:
        return read_gguf(self.path)

    @cached_property
    def model(self) -> GgufModel:
        return open_gguf(self.file)

    def _load(self, trust_remote_code: bool, embedding: Embedding | None) -> Loaded:
        if embedding is not None:
            raise CaptureError(
                f"{self.path} is a GGUF file, of which accel makes no embedding model; give the Hugging Face directory"
            )
        stored, notes = self.model.weights()
        pages = self.file.pages
        loaded = load_streamed(self.path, self.config(), stored, pages, notes, every=True)
        self.model.adapt(loaded.model)
        return loaded

    def config(self, trust_remote_code: bool = False) -> Any:
        from transformers import AutoConfig

        told = self.model.config
        check_type(told["model_type"], f"{self.path} ({self.file.fields['general.architecture']})")
        return AutoConfig.for_model(**told)

    @property
    def vocab_size(self) -> int | None:
        size: int = self.model.config["vocab_size"]
        return size

    @property
    def has_tokenizer(self) -> bool:
        return self.file.fields.get("tokenizer.ggml.model") not in (None, "none", "no_vocab")

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        return of_gguf(self.file)


def open_source(path: Path) -> Source:
    """What lies at a path."""
    return Gguf(path) if is_gguf(path) else Folder(path)


def tokenizer_of(tokenizer: Any, source: Source | None) -> Tokenizer | None:
    """The tokenizer that a user gives (`read_tokenizer`), or else that of the model. Raises CaptureError."""
    if tokenizer is not None:
        return read_tokenizer(tokenizer)
    return None if source is None else source.tokenizer
