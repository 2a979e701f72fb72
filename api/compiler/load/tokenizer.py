"""The tokenizer of a build: what the user gave or what lies beside the model, and its files in an artifact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from accel.compiler.load.added_tokens import with_added
from accel.compiler.load.converted import converted, older_files
from accel.compiler.load.gguf._file import GgufFile
from accel.compiler.load.gguf._tokenizer import tokenizer_config, tokenizer_json
from accel.compiler.load.pieces import pieces
from accel.compiler.load.ranked import ranked
from accel.ir.errors import CaptureError
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.inputs.tokenizer_config import TOKENIZER, TokenizerConfig, declared


def read_tokenizer(tokenizer: Any) -> Tokenizer:
    """That which a user gives: a `tokenizers.Tokenizer`, a fast Hugging Face tokenizer, the path of a tokenizer.json
    or of a folder with it, or with older files that transformers makes one of. Raises CaptureError.
    """
    if not isinstance(tokenizer, (str, Path)):
        return _of_object(tokenizer)
    file = Path(tokenizer)
    if file.is_dir():
        folder, file = file, file / TOKENIZER
        if not file.is_file() and older_files(folder):
            found = ranked(folder) or pieces(folder, _declared(folder))
            return _of_object(converted(folder)) if found is None else _made(folder, *found)
    if not file.is_file():
        raise CaptureError(f"{file}: no tokenizer there; give a tokenizer.json or its directory")
    return of_file(file)


def of_file(file: Path) -> Tokenizer:
    """A tokenizer.json, with the tokens, special tokens and chat templates that the files beside it tell of."""
    try:
        found = Tokenizer(file, TokenizerConfig.read(file.parent))
        data = with_added(found.json, file.parent)
        return found if data is found.json else Tokenizer(data, found.config)
    except ValueError as error:
        raise CaptureError(f"{error}; correct the file, or remove it") from error


def _declared(folder: Path) -> dict[str, Any]:
    """What tokenizer_config.json tells. Raises CaptureError."""
    try:
        return declared(folder)
    except ValueError as error:
        raise CaptureError(f"{error}; correct the file, or remove it") from error


def _made(folder: Path, text: str, special: dict[str, Any]) -> Tokenizer:
    """A tokenizer.json that was made of a folder's files, with tokens and templates that those beside it tell of."""
    config = {**special, **_declared(folder)}
    try:
        return Tokenizer(with_added(text.encode(), folder), TokenizerConfig.of(config))
    except ValueError as error:
        raise CaptureError(f"{folder}: {error}; correct the file, or remove it") from error


def of_gguf(file: GgufFile) -> Tokenizer | None:
    """What a GGUF file holds; None where it holds none."""
    text = tokenizer_json(file)
    if text is None:
        return None
    try:
        return Tokenizer(text.encode(), TokenizerConfig.of(tokenizer_config(file)))
    except ValueError as error:
        raise CaptureError(
            f"{file.path}: {error}; give the model's tokenizer.json with tokenizer=…"
        ) from error


def _of_object(tokenizer: Any) -> Tokenizer:
    inner = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(inner, "to_str"):
        raise CaptureError(
            f"tokenizer is a {type(tokenizer).__name__} without a tokenizer.json form; give a fast "
            "Hugging Face tokenizer, a tokenizers.Tokenizer or the path of a tokenizer.json"
        )
    special = getattr(tokenizer, "special_tokens_map", {})
    splits = getattr(tokenizer, "split_special_tokens", inner.encode_special_tokens)
    template = getattr(tokenizer, "chat_template", None)
    config = {**special, "chat_template": template, "split_special_tokens": splits}
    return Tokenizer(str(inner.to_str()).encode(), TokenizerConfig.of(config))


def end_note(tokenizer: Tokenizer, eos: Sequence[int]) -> str | None:
    """That the token by which a tokenizer ends a text is none of those that end a model's; None where it is one."""
    name = tokenizer.config.special.get("eos_token")
    index = None if name is None else tokenizer.index(name)
    if index is None or index in eos:
        return None
    own = f"tokens {list(eos)}" if eos else "none"
    return (
        f"the tokenizer ends a text by {name!r}, token {index}, and the model by {own} (eos_token_id): generate goes "
        f"on behind {name!r}, as transformers does; give eos=[{index}], or correct generation_config.json"
    )


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """As accel, transformers and onnxruntime-genai read it.

    onnxruntime-genai reads no post-processor: `add_bos_token` and `add_eos_token` tell it what goes around a text.
    """
    (folder / TOKENIZER).write_bytes(tokenizer.json)
    special = dict(tokenizer.config.special)
    bare = tokenizer.encode("a", special=False)
    marked = tokenizer.encode("a")
    at = next((i for i in range(len(marked)) if marked[i : i + len(bare)] == bare), 0)
    around = {"bos_token": marked[:at], "eos_token": marked[at + len(bare) :]}
    adds = {}
    for name, ids in around.items():
        token = tokenizer.token(ids[0]) if len(ids) == 1 else None
        if token is not None:
            special.setdefault(name, token)
        adds[f"add_{name}"] = token is not None and special[name] == token
    config = replace(tokenizer.config, special=special)
    config.write(folder, tokenizer_class="PreTrainedTokenizerFast", **adds)
