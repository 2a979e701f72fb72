"""What a Hugging Face folder says of its tokenizer beside tokenizer.json: special tokens, whether a text may hold
them, and chat templates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
SPECIAL = "special_tokens_map.json"  # of older checkpoints
ADDED = "added_tokens.json"  # of older checkpoints
_SPLITS = "split_special_tokens"
TEMPLATE = "chat_template.jinja"
TEMPLATES = "additional_chat_templates"
DEFAULT = "default"  # the name of a template that has none
_PLAIN = re.compile(r"\w[\w .+-]*")


@dataclass(frozen=True)
class TokenizerConfig:
    """special: "bos_token" -> its text, as templates name it; templates: name -> Jinja source; splits_special: special
    tokens in a text are text like any other.
    """

    special: dict[str, str] = field(default_factory=dict)
    templates: dict[str, str] = field(default_factory=dict)
    splits_special: bool = False

    @classmethod
    def of(cls, config: dict[str, Any], templates: dict[str, str] | None = None) -> TokenizerConfig:
        """From the JSON of tokenizer_config.json; `templates`: from files, in place of those in it.

        Raises ValueError with what is wrong.
        """
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
        named = config.get("extra_special_tokens")
        config = {**(named if isinstance(named, dict) else {}), **config}
        texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in config.items()}
        special = {k: v for k, v in texts.items() if k.endswith("_token") and isinstance(v, str)}
        templates = templates or _templates(config.get("chat_template"))
        return cls(special, templates, bool(config.get(_SPLITS)))

    @classmethod
    def read(cls, folder: Path, files: Collection[str] | None = None) -> TokenizerConfig:
        """From the files of a folder, as transformers reads them; `files`: only these of them.

        Raises ValueError with the file and what is wrong with it.
        """

        config = declared(folder, files)
        more = sorted(path.name for path in (folder / TEMPLATES).glob("*.jinja"))
        named = {name.removesuffix(".jinja"): f"{TEMPLATES}/{name}" for name in more}
        named = {DEFAULT: TEMPLATE, **named}
        try:
            templates = {
                name: (folder / file).read_text(encoding="utf-8")
                for name, file in named.items()
                if _there(folder, file, files)
            }
            return cls.of(config, templates)
        except ValueError as error:
            raise ValueError(f"{folder / CONFIG} or a chat template beside it: {error}") from None

    def write(self, folder: Path, **more: Any) -> None:
        """As transformers and onnxruntime-genai read it; `more` goes into tokenizer_config.json."""
        splits = {_SPLITS: True} if self.splits_special else {}
        text = json.dumps({**self.special, **splits, **more}, indent=1, ensure_ascii=False)
        (folder / CONFIG).write_text(text, encoding="utf-8")
        for name, template in self.templates.items():
            file = folder / (TEMPLATE if name == DEFAULT else f"{TEMPLATES}/{name}.jinja")
            file.parent.mkdir(exist_ok=True)
            file.write_text(template, encoding="utf-8", newline="")


def declared(folder: Path, files: Collection[str] | None = None) -> dict[str, Any]:
    """The JSON of a folder's tokenizer_config.json, with that of special_tokens_map.json where transformers reads it;
    `files`: only these of them.

    Raises ValueError with the file and what is wrong with it.
    """
    config = read_json(folder / CONFIG) if _there(folder, CONFIG, files) else {}
    if _there(folder, SPECIAL, files) and "added_tokens_decoder" not in config:
        config |= read_json(folder / SPECIAL)
    return config


def _there(folder: Path, name: str, files: Collection[str] | None) -> bool:
    return (folder / name).is_file() and (files is None or name in files)


def _templates(value: Any) -> dict[str, str]:
    """A template, or a list of named ones, by name."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: value}
    if isinstance(value, list):
        value = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
    if not isinstance(value, dict) or not all(isinstance(t, str) for p in value.items() for t in p):
        raise ValueError("chat_template is neither text nor a list of named templates")
    if wrong := [name for name in value if not _PLAIN.fullmatch(name)]:
        raise ValueError(f"the chat template's name {wrong[0]!r} cannot be a file's name")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """A file's JSON object. Raises ValueError with the file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a JSON object")
    return found
