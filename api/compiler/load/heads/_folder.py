"""A folder of a published head: its configuration and its tensors."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from accel.compiler.load.checkpoint import Loaded
from accel.compiler.load.config import read_config
from accel.compiler.load.gguf import open_gguf
from accel.compiler.load.gguf._file import is_gguf, read_gguf
from accel.compiler.load.heads import BINS, Config, HeadFormat, Target, format_of
from accel.compiler.load.heads.mtp import COUNTS
from accel.compiler.load.source import Source
from accel.ir.embedding import Embedding
from accel.ir.errors import CaptureError
from accel.runtime.inputs.text import Tokenizer


class HeadFolder(Source):
    """A head that drafts for a target. method: as of `format_of`."""

    has_tokenizer, quantised = False, False

    def __init__(self, path: Path, method: str = "", target: Target | None = None):
        super().__init__(path)
        self.method, self.target = method, target or Target()

    @cached_property
    def json(self) -> Config:
        """What config.json says, or the metadata of a GGUF file as such. Raises CaptureError."""
        if not is_gguf(self.path):
            return read_config(self.path)
        file = open_gguf(read_gguf(self.path))
        drafts = int(file.architecture.metadata.number("nextn_predict_layers", 0))
        return {**file.config, COUNTS[0]: drafts}

    @cached_property
    def format(self) -> HeadFormat:
        """Raises CaptureError where it is of no head."""
        if (found := format_of(self.path, self.json, self.method)) is None:
            raise CaptureError(
                f"{self.path}: its config.json is of no head that accel knows; give a folder of an EAGLE, DFlash, "
                "DFlash2, DSpark or Medusa head, or of speculators' format"
            )
        return found

    @cached_property
    def sizes(self) -> Config:
        """The same, and what it leaves out. Raises CaptureError."""
        missing = self.format.missing
        return self.json if missing is None else {**missing(self.path, self.json), **self.json}

    def _load(self, trust_remote_code: bool, embedding: Embedding | None) -> Loaded:
        return self.format.load(self.path, self.sizes, self.target)

    def config(self, trust_remote_code: bool = False) -> Any:
        raise CaptureError(
            f"{self.path} holds a head that drafts for a model, not a model; give it beside one: "
            "accel-compile build MODEL --draft HEAD"
        )

    @property
    def vocab_size(self) -> int | None:
        return self.format.vocab_size(self.sizes) or None

    @property
    def has_weights(self) -> bool:
        files = any((self.path / name).is_file() for name in BINS)
        return files or any(self.path.glob("*.safetensors")) or is_gguf(self.path)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return None


def head_at(path: Path, method: str = "", target: Target | None = None) -> HeadFolder | None:
    """The head in a folder, or within a model's GGUF file; None where there is none. The rest as of `HeadFolder`."""
    if not (path / "config.json").is_file() and not is_gguf(path):
        return None
    found = HeadFolder(path, method, target)
    try:
        return None if format_of(path, found.json, method) is None else found
    except CaptureError:
        return None
