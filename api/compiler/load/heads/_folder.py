"""A folder of a published head: its configuration and its tensors."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from accel.compiler.load.checkpoint import Loaded
from accel.compiler.load.config import read_config
from accel.compiler.load.heads import BINS, Config, HeadFormat, format_of
from accel.compiler.load.source import Source
from accel.ir.embedding import Embedding
from accel.ir.errors import CaptureError
from accel.runtime.inputs.text import Tokenizer


class HeadFolder(Source):
    """A head that drafts for a target of `layers` layers, whose directory is `home`. method: as of `format_of`."""

    has_tokenizer, quantised = False, False

    def __init__(self, path: Path, layers: int = 0, method: str = "", home: Path | None = None):
        super().__init__(path)
        self.layers, self.method, self.home = layers, method, home

    @cached_property
    def json(self) -> Config:
        """What config.json says. Raises CaptureError."""
        return read_config(self.path)

    @cached_property
    def format(self) -> HeadFormat:
        """Raises CaptureError where it is of no head."""
        if (found := format_of(self.json, self.method)) is None:
            raise CaptureError(
                f"{self.path}: its config.json is of no head that accel knows; give a folder of an EAGLE-3, DFlash or "
                "Medusa head, or of speculators' format"
            )
        return found

    @cached_property
    def sizes(self) -> Config:
        """The same, and what it leaves out. Raises CaptureError."""
        missing = self.format.missing
        return self.json if missing is None else {**missing(self.path, self.json), **self.json}

    def _load(self, trust_remote_code: bool, embedding: Embedding | None) -> Loaded:
        return self.format.load(self.path, self.sizes, self.layers, self.home)

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
        return any((self.path / name).is_file() for name in BINS) or any(
            self.path.glob("*.safetensors")
        )

    @property
    def tokenizer(self) -> Tokenizer | None:
        return None


def head_at(
    path: Path, layers: int = 0, method: str = "", home: Path | None = None
) -> HeadFolder | None:
    """The head in a folder; None where there is none. The rest as of `HeadFolder`."""
    if not (path / "config.json").is_file():
        return None
    found = HeadFolder(path, layers, method, home)
    try:
        return None if format_of(found.json, method) is None else found
    except CaptureError:
        return None
