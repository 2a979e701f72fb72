"""Vocabularies of byte strings by rank, as tokenizer.json: Mistral's tekken.json, and the files of tiktoken, which are
lines of a string in base64 and its rank. Of two neighbours those are joined first whose string has the lowest rank.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel.ir.errors import CaptureError, shown

TEKKEN = "tekken.json"
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_DIGITS3 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_DIGITS1 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_HEAD = r"[^\r\n\p{L}\p{N}]?"
_O200K = (
    rf"{_HEAD}{_UPPER}*{_LOWER}+{_ENDINGS}?|{_HEAD}{_UPPER}+{_LOWER}*{_ENDINGS}?|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_R50K = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_NAMED = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
    "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip


@dataclass(frozen=True)
class _Kind:
    """How a vocabulary of tiktoken splits text, and its special tokens: those that follow its last one, or others by
    number; which of them begins a text and which ends one.
    """

    pattern: str
    special: Callable[[int], Mapping[str, int]]
    begins: str | None
    ends: str


def _after(names: Sequence[str]) -> Callable[[int], Mapping[str, int]]:
    return lambda count: {name: count + i for i, name in enumerate(names)}


def _llama3() -> list[str]:
    """256 tokens, of which six have names."""
    names = ["<|begin_of_text|>", "<|end_of_text|>", *["reserved"] * 4, "<|start_header_id|>"]
    names += ["<|end_header_id|>", "reserved", "<|eot_id|>", *["reserved"] * 246]
    numbers = iter(range(256))
    return [
        f"<|reserved_special_token_{next(numbers)}|>" if name == "reserved" else name
        for name in names
    ]


_QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))]
_FILL = {"<|endoftext|>": 100257, "<|endofprompt|>": 100276}
_FILL |= {f"<|fim_{name}|>": 100258 + i for i, name in enumerate(("prefix", "middle", "suffix"))}
# the name of a file, or the type of the model beside it -> how its vocabulary is used
_KINDS = {
    "qwen": _Kind(_DIGITS1, _after(_QWEN), None, "<|endoftext|>"),
    "llama": _Kind(_DIGITS3, _after(_llama3()), "<|begin_of_text|>", "<|end_of_text|>"),
    "cl100k_base": _Kind(_DIGITS3, lambda _: _FILL, None, "<|endoftext|>"),
    "o200k_base": _Kind(
        _O200K, lambda _: {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}, None, "<|endoftext|>"
    ),
    "r50k_base": _Kind(_R50K, _after(["<|endoftext|>"]), None, "<|endoftext|>"),
}  # fmt: skip


def ranked(folder: Path) -> tuple[str, dict[str, Any]] | None:
    """The text of a tokenizer.json of a folder's ranked vocabulary, and its special tokens as tokenizer_config.json
    would name them; None where the folder holds no such file.

    Raises CaptureError: the file is damaged, or how it splits text is not known.
    """
    if (folder / TEKKEN).is_file():
        return _tekken(folder / TEKKEN)
    files = [*sorted(folder.glob("*.tiktoken")), *sorted(folder.glob("*.model"))]
    file = next((file for file in files if file.is_file() and _is_ranked(file)), None)
    return None if file is None else _tiktoken(file)


def _tekken(file: Path) -> tuple[str, dict[str, Any]]:
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
        config, words = told["config"], told["vocab"]
        size, special = config["default_vocab_size"], config["default_num_special_tokens"]
        named = told.get("special_tokens")
        given = _NAMED if named is None else [one["token_str"] for one in named]
        ranks = {base64.b64decode(word["token_bytes"]): word["rank"] for word in words}
        pattern = str(config["pattern"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(file, f"{type(error).__name__}: {error}") from error
    if not (type(size) is type(special) is int and 0 <= special < size):
        raise _damaged(file, f"it has {shown(size)} tokens, {shown(special)} of them special")
    if len(given) > special or not all(isinstance(name, str) for name in given):
        raise _damaged(file, f"it names {len(given)} special tokens, and has {special}")
    names = [*given, *(f"<SPECIAL_{i}>" for i in range(len(given), special))]
    kept = {word: special + rank for word, rank in ranks.items() if rank < size - special}
    text = _json(file, pattern, kept, {name: i for i, name in enumerate(names)}, "<s>")
    usual = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "<pad>"}
    return text, {f"{key}_token": name for key, name in usual.items() if name in names}


def _is_ranked(file: Path) -> bool:
    """Whether its first line is a string in base64 and a number."""
    with file.open("rb") as opened:
        word, _, rank = opened.readline(4096).strip().partition(b" ")
    try:
        return bool(base64.b64decode(word, validate=True)) and rank.isdigit()
    except binascii.Error:
        return False


def _tiktoken(file: Path) -> tuple[str, dict[str, Any]]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        word, _, rank = line.partition(b" ")
        try:
            if line:
                ranks[base64.b64decode(word, validate=True)] = int(rank)
        except ValueError as error:
            raise _damaged(file, f"line {number}: {error}") from None
    kind = _kind(file)
    special = _listed(file.parent) or kind.special(len(ranks))
    text = _json(file, kind.pattern, ranks, special, kind.begins)
    usual = {"bos": kind.begins, "eos": kind.ends}
    return text, {f"{key}_token": name for key, name in usual.items() if name in special}


def _kind(file: Path) -> _Kind:
    """By the file's name, or else by the type of the model."""
    config = _read(file.parent / "config.json")
    told: tuple[str, ...] = (file.stem.lower(), str(config.get("model_type", "")))
    if (file.parent / "params.json").is_file():
        told = (*told, "llama")  # as Meta publishes its models
    for name in told:
        if found := next((kind for key, kind in _KINDS.items() if name.startswith(key)), None):
            return found
    raise CaptureError(
        f"{file} is a vocabulary of tiktoken, and does not say how it splits text: accel knows it by the names "
        f"{', '.join(_KINDS)}, of the file or of model_type in config.json; give tokenizer=… (a tokenizer.json)"
    )


def _listed(folder: Path) -> dict[str, int]:
    """The added tokens that tokenizer_config.json lists."""
    found = _read(folder / "tokenizer_config.json").get("added_tokens_decoder")
    pairs = found.items() if isinstance(found, dict) else ()
    return {
        str(token["content"]): int(index)
        for index, token in pairs
        if isinstance(token, dict) and "content" in token and str(index).isdigit()
    }


def _read(file: Path) -> dict[str, Any]:
    """A JSON object; nothing where there is none, of which whoever needs the file tells."""
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _json(
    file: Path,
    pattern: str,
    ranks: Mapping[bytes, int],
    special: Mapping[str, int],
    begins: str | None,
) -> str:
    """The text of a tokenizer.json. ranks: strings -> their numbers; special: tokens that are found in a text before
    it is split.
    """
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        processors,
    )

    letters = _letters()
    words = {word: "".join(letters[byte] for byte in word) for word in ranks}
    if lacks := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise _damaged(file, f"it lacks the byte {lacks[0]}")
    vocabulary = {words[word]: number for word, number in ranks.items()}
    held = sorted([*vocabulary.values(), *special.values()])
    if len({*held}) < len(held):
        raise _damaged(file, "two of its tokens have one number")
    merges = []
    for word in sorted(ranks, key=ranks.__getitem__):
        halves = [(word[:at], word[at:]) for at in range(1, len(word))]
        pairs = [(a, b) for a, b in halves if a in ranks and b in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(words[a], words[b]) for a, b in pairs]
    tokenizer = Tokenizer(models.BPE({**vocabulary, **special}, merges, ignore_merges=True))
    try:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
    except Exception as error:  # tokenizers raises bare ones
        raise _damaged(file, f"its pattern: {error}") from error
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    tokens = sorted(special, key=special.__getitem__)
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=True) for name in tokens])
    if begins is not None and begins in special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[begins, "$A"],
            pair=[begins, "$A", begins, "$B"],
            special_tokens=[(begins, special[begins])],
        )
    return str(tokenizer.to_str())


def _letters() -> list[str]:
    """The letter that byte-level BPE has for each byte: those that are seen stand for themselves."""
    seen = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in seen else next(others)) for byte in range(256)]


def _damaged(file: Path, what: str) -> CaptureError:
    return CaptureError(f"{file} cannot be read ({what}): fetch it again")
