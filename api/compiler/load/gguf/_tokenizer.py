"""The tokenizer in a GGUF file -> tokenizer.json and what tokenizer_config.json would say, as llama.cpp splits text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel.compiler.load.gguf._file import GgufFile
from accel.compiler.load.gguf._scores import CONTROL, OWN, SPACE, UNKNOWN, by_scores
from accel.compiler.load.gguf._splits import BEGUN, WHOLE, patterns
from accel.ir.errors import CaptureError


def tokenizer_json(file: GgufFile) -> str | None:
    """The text of a tokenizer.json; None where the file has no tokenizer.

    Raises:
        CaptureError: it has one that accel cannot write so, or a damaged one.
    """
    kind = file.fields.get("tokenizer.ggml.model", "none")
    if kind in ("none", "no_vocab"):
        return None
    if kind not in _KINDS:
        raise _other(
            file, f"its tokenizer is of the kind {kind!r}, and accel reads {', '.join(_KINDS)}"
        )
    try:
        tokenizer = _KINDS[kind](file)
        tokenizer.add_tokens(_added(file))
        around = _around(file, kind)
        if around is not None:
            tokenizer.post_processor = around
        return str(tokenizer.to_str())
    except CaptureError:
        raise
    except Exception as error:  # tokenizers raises bare ones
        raise _other(file, f"its tokenizer does not fit together ({error})") from error


def tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """Special tokens and chat templates, with the keys of tokenizer_config.json."""
    tokens, config = _tokens(file), dict[str, Any]()
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    for name, short in names.items():
        index = file.fields.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(index, int) and 0 <= index < len(tokens):
            config[f"{short}_token"] = tokens[index]
    prefix = "tokenizer.chat_template"
    found = {
        k.removeprefix(prefix).strip("."): v for k, v in file.fields.items() if k.startswith(prefix)
    }
    texts = {name or "default": text for name, text in found.items() if isinstance(text, str)}
    if list(texts) == ["default"]:
        config["chat_template"] = texts["default"]
    elif texts:
        config["chat_template"] = [{"name": n, "template": t} for n, t in texts.items()]
    return config


def _other(file: GgufFile, what: str) -> CaptureError:
    return CaptureError(f"{file.path}: {what}; give the model's tokenizer.json with tokenizer=…")


def _list(file: GgufFile, key: str, kind: Any) -> list[Any]:
    found = file.fields.get(f"tokenizer.ggml.{key}", [])
    if not isinstance(found, list) or not all(isinstance(one, kind) for one in found):
        raise _other(file, f"tokenizer.ggml.{key} is no list of {kind}")
    return found


def _tokens(file: GgufFile) -> list[str]:
    return _list(file, "tokens", str)


def _types(file: GgufFile) -> list[int]:
    """The type of each token."""
    types, many = _list(file, "token_type", int), len(_tokens(file))
    return types[:many] + [1] * (many - len(types))


def _by_merges(file: GgufFile) -> Any:
    """Byte-level BPE."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    name = file.fields.get("tokenizer.ggml.pre", "default")
    try:
        splits_at = patterns(name)
    except ValueError as error:
        raise _other(file, str(error)) from None
    vocabulary = {token: i for i, token in enumerate(_tokens(file))}
    merges = _merges(file, vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=name in WHOLE))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splits_at]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges(file: GgufFile, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Those whose parts and whole are tokens."""
    merges = [_pair(merge) for merge in _list(file, "merges", str)]
    return [(a, b) for a, b in merges if {a, b, a + b} <= vocabulary.keys()]


def _by_letters(file: GgufFile) -> Any:
    """BPE of letters, lines by themselves; bytes of what has no token."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate(_tokens(file))}
    unknown = next(
        (t for t, kind in zip(vocabulary, _types(file), strict=False) if kind == UNKNOWN), None
    )
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            _merges(file, vocabulary),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    at = merge.find(" ", 1)
    return merge[:at], merge[at + 1 :]


def _by_scores(file: GgufFile) -> Any:
    """SentencePiece's BPE."""
    tokens, scores = _tokens(file), _list(file, "scores", (int, float))
    if len(scores) < len(tokens):
        raise _other(file, f"it has {len(scores)} scores for {len(tokens)} tokens")
    prefix = bool(file.fields.get("tokenizer.ggml.add_space_prefix", True))
    return by_scores(tokens, _types(file), scores, prefix)


def _added(file: GgufFile) -> list[Any]:
    """The tokens that are found in a text before it is split."""
    from tokenizers import AddedToken

    special = {UNKNOWN: True, CONTROL: True, OWN: False}
    pairs = zip(_tokens(file), _types(file), strict=True)
    name = str(file.fields.get("general.name", "")).lower()
    eager = "phi-3" in name or "phi3" in name  # the spaces behind its marks are part of them
    return [
        AddedToken(
            token,
            normalized=False,
            special=special[kind],
            rstrip=eager and token not in ("<unk>", "<s>", "<|endoftext|>"),
        )
        for token, kind in pairs
        if kind in special and token
    ]


def _around(file: GgufFile, kind: str) -> Any:
    """What puts bos and eos around a text; None where it puts none."""
    from tokenizers import processors

    tokens = _tokens(file)
    first = kind in ("llama", "gemma4") or file.fields.get("tokenizer.ggml.pre") in BEGUN
    defaults = {"bos": first, "eos": False}
    usual = {"bos": 1, "eos": 2} if kind == "llama" else {}
    found: dict[str, int] = {}
    for name, default in defaults.items():
        index = file.fields.get(f"tokenizer.ggml.{name}_token_id", usual.get(name))
        asked = file.fields.get(f"tokenizer.ggml.add_{name}_token", default)
        # published files of Gemma 4 say no, and the model needs it: llama.cpp adds it all the same
        if (asked or name == "bos" and kind == "gemma4") and index is not None:
            if not 0 <= index < len(tokens):
                raise _other(file, f"{name}_token_id is {index}, and the tokens are {len(tokens)}")
            found[name] = index
    if not found:
        return None
    begin = [tokens[found["bos"]]] if "bos" in found else []
    end = [tokens[found["eos"]]] if "eos" in found else []
    return processors.TemplateProcessing(
        single=[*begin, "$A", *end],
        pair=[*begin, "$A", *end, *begin, "$B", *end],
        special_tokens=[(tokens[i], i) for i in found.values()],
    )


_KINDS = {"gpt2": _by_merges, "llama": _by_scores, "gemma4": _by_letters}
