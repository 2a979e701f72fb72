"""Tokens that the files beside a tokenizer.json add to it or change: tokenizer_config.json, added_tokens.json,
special_tokens_map.json. They come in transformers' order, which gives new ones their ids.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from accel.ir.errors import shown
from accel.runtime.inputs.tokenizer_config import ADDED, CONFIG, SPECIAL, declared, read_json

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_DECODER, _EXTRA = "added_tokens_decoder", "extra_special_tokens"


def with_added(data: bytes, folder: Path) -> bytes:
    """A tokenizer.json with what the files of its folder say of added tokens; the same bytes where they say nothing
    new. The ids that they name must be those that the tokens get.

    Raises ValueError with the file and what is wrong with it.
    """
    config = declared(folder)
    inner = tokenizers.Tokenizer.from_str(data.decode("utf-8"))
    held = inner.get_added_tokens_decoder()
    where = folder / CONFIG
    try:
        named, extra = _named(config), _extra(config)
        told = listed = _decoder(config.get(_DECODER, {}))
    except ValueError as error:
        raise ValueError(f"{where}, or {SPECIAL} beside it: {error}") from None
    if _DECODER not in config:
        where, told = folder / ADDED, _old(folder / ADDED, {text for text, _ in (*named, *extra)})
        listed = {**told, **held}
    tokens = [listed[i] for i in sorted(listed)]
    known = {token.content for token in (*held.values(), *tokens)}
    for text, token in (*named, *extra):
        if text not in known:
            tokens.append(token)
            known.add(text)
    special = {text for text, _ in named} | {t.content for t in held.values() if t.special}
    for token in tokens:
        token.special |= token.content in special  # a tokenizer does not forget those that it had
    before = {token.content: _state(token) for token in held.values()}
    changed = [t for t in tokens if t.content and before.get(t.content) != _state(t)]
    if changed:
        inner.add_tokens(changed)
    for index, token in sorted(told.items()):
        if token.content and (found := inner.token_to_id(token.content)) != index:
            raise ValueError(
                f"{where} says that {shown(token.content)} is token {index}, and by tokenizer.json it is {found}: "
                "the two files are not of one tokenizer"
            )
    return str(inner.to_str()).encode() if changed else data


def _state(token: AddedToken) -> tuple[Any, ...]:
    return tuple(getattr(token, flag) for flag in _FLAGS)


def _old(path: Path, special: Collection[str]) -> dict[int, AddedToken]:
    """Of added_tokens.json, which older checkpoints have: text -> id."""
    found = {}
    for text, index in (read_json(path) if path.is_file() else {}).items():
        if type(index) is not int or index < 0 or index in found:
            raise ValueError(
                f"{path} says that {shown(text)} is token {shown(index)}, which is no number of its own"
            )
        found[index] = AddedToken(text, normalized=text not in special, special=text in special)
    return found


def _decoder(value: Any) -> dict[int, AddedToken]:
    if not isinstance(value, dict):
        raise ValueError(f"{_DECODER} is {shown(value)}, not an object of tokens by id")
    found = {}
    for index, token in value.items():
        if not (index.isascii() and index.isdigit()) or not isinstance(token, dict):
            raise ValueError(
                f"{_DECODER} has {shown(index)}: {shown(token)}, not a token by its id"
            )
        found[int(index)] = _token(token, f"{_DECODER} {index}")
    return found


def _named(config: Mapping[str, Any]) -> list[tuple[str, AddedToken]]:
    """Special tokens that have names: those that transformers knows, then a model's own."""
    extra = config.get(_EXTRA, config.get("additional_special_tokens"))
    own = {k: v for k, v in config.items() if k.endswith("_token") and k not in _NAMED}
    own |= extra if isinstance(extra, dict) else {}
    values = {**{k: config.get(k) for k in _NAMED}, **own}
    found = [(k, v) for k, v in values.items() if isinstance(v, (str, dict))]
    return [_special(value, name) for name, value in found]


def _extra(config: Mapping[str, Any]) -> list[tuple[str, AddedToken]]:
    """Special tokens without names."""
    value = config.get(_EXTRA, config.get("additional_special_tokens"))
    if value is None or isinstance(value, dict):
        return []
    if not isinstance(value, list):
        raise ValueError(f"{_EXTRA} is {shown(value)}, not a list of tokens")
    return [_special(one, _EXTRA) for one in value]


def _special(value: Any, where: str) -> tuple[str, AddedToken]:
    token = (
        AddedToken(value, special=True) if isinstance(value, str) else _token(value, where, True)
    )
    return token.content, token


def _token(value: Any, where: str, special: bool | None = None) -> AddedToken:
    """A token as JSON has it. `special`: in place of what it says."""
    text = value.get("content") if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise ValueError(f"{where} is {shown(value)}, which has no text (content)")
    flags = {k: v for k, v in value.items() if k in _FLAGS and v is not None}
    if wrong := next((k for k, v in flags.items() if not isinstance(v, bool)), None):
        raise ValueError(f"{where} has {wrong} = {shown(flags[wrong])}, not true or false")
    return AddedToken(text, **flags | ({} if special is None else {"special": special}))
