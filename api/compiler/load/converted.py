"""The tokenizer of a folder without tokenizer.json, as transformers makes one of the older files there."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accel.compiler.load.quiet import quiet
from accel.ir.errors import CaptureError, shown

_FILES = ("vocab.*", "merges.txt", "*.model", "*.tiktoken", "tekken.json")
_TEXT = 160  # characters of what transformers says
_NAMED = "name the right class in tokenizer_config.json (tokenizer_class)"
_INSTEAD = "or give tokenizer=… (a tokenizer.json), without which prompts are token ids"


def older_files(folder: Path) -> list[str]:
    """The files of a folder that hold a vocabulary in another form than tokenizer.json."""
    return sorted({path.name for form in _FILES for path in folder.glob(form) if path.is_file()})


def converted(folder: Path) -> Any:
    """A fast Hugging Face tokenizer of the older files of a folder. No code of its own runs.

    Raises CaptureError where there is none in it: in one line what is missing and what to do.
    """
    from transformers import AutoTokenizer

    files = older_files(folder)
    what = f"{folder} holds no tokenizer.json, but {', '.join(files)}"
    try:
        with quiet():
            found = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # transformers raises many kinds
        lacks = _lacks(files)
        said = f"{lacks} is not installed" if lacks else _line(error)
        first = f"pip install {lacks}" if lacks else f"correct the files, or {_NAMED}"
        raise CaptureError(
            f"{what}, of which transformers makes no tokenizer ({said}): {first}, {_INSTEAD}"
        ) from error
    kind = type(found).__name__
    if not hasattr(found, "backend_tokenizer"):
        raise CaptureError(
            f"{what}, which {kind} reads without a form as tokenizer.json: {_INSTEAD.removeprefix('or ')}"
        )
    held = found.get_vocab()
    if wrong := [
        token for token, index in _listed(folder).items() if held.get(token, index + 1) != index
    ]:
        raise CaptureError(
            f"{what}, which {kind} reads without {len(wrong)} of their tokens ({shown(wrong[0])}, …): "
            f"{_NAMED}, {_INSTEAD}"
        )
    return found


def _listed(folder: Path) -> dict[str, int]:
    """token -> id as a vocabulary's file has them; empty of other forms."""
    table, lines = folder / "vocab.json", folder / "vocab.txt"
    try:
        if table.is_file():
            told = json.loads(table.read_text(encoding="utf-8"))
            return {t: i for t, i in told.items() if type(i) is int}
        text = lines.read_text(encoding="utf-8") if lines.is_file() else ""
        return {token: i for i, token in enumerate(text.split("\n")[: text.count("\n")])}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise CaptureError(
            f"{folder} holds a vocabulary that cannot be read ({_line(error)}): fetch it again"
        ) from None


def _lacks(files: list[str]) -> str | None:
    """A package that is not installed, without which transformers does not read such files."""
    needs = {".model": ("sentencepiece", "protobuf"), ".tiktoken": ("tiktoken",)}
    wanted = [name for file in files for name in needs.get(Path(file).suffix, ())]
    modules = {"protobuf": "google.protobuf"}
    missing = [name for name in wanted if find_spec(modules.get(name, name)) is None]
    return " ".join(dict.fromkeys(missing)) or None


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:_TEXT]}"
