"""How a model directory says that its texts become vectors: the files of sentence-transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel.ir.embedding import Embedding, Pairs
from accel.ir.errors import CaptureError

MODULES, LIMITS, POOLING = "modules.json", "sentence_bert_config.json", "config.json"
_MODES = {"mean_tokens": "mean", "mean": "mean", "cls_token": "cls", "cls": "cls", "lasttoken": "last"}  # fmt: skip
_MODE = "pooling_mode"
_CROSS = "BertForSequenceClassification"
_OTHERWISE = "; pooling=mean (or cls, or last) pools otherwise than the model was trained for"


@dataclass(frozen=True)
class SentenceRecipe:
    """How vectors are pooled, and the most tokens of a text; None: it says none."""

    embedding: Embedding
    max_length: int | None


def sentence_recipe(folder: Path) -> SentenceRecipe | None:
    """What a directory says; None: it has no such files. Raises CaptureError for what is not computed so."""
    if not (folder / MODULES).is_file():
        return None
    modules = _read(folder / MODULES)
    if not isinstance(modules, list) or not all(isinstance(one, Mapping) for one in modules):
        raise CaptureError(f"{folder / MODULES} is no list of modules{_OTHERWISE}")
    kinds = [str(one.get("type", "")).rpartition(".")[2] for one in modules]
    wanted = ["Transformer", "Pooling", "Normalize"]
    if kinds not in (wanted, wanted[:2]) or modules[0].get("path"):
        raise CaptureError(
            f"{folder / MODULES} names {', '.join(kinds) or 'no modules'}; accel computes a Transformer in the folder "
            f"itself, then Pooling and maybe Normalize{_OTHERWISE}"
        )
    file = folder / str(modules[1].get("path", "")) / POOLING
    if not file.parent.resolve().is_relative_to(folder.resolve()):
        raise CaptureError(f"{folder / MODULES} names a place outside of the directory{_OTHERWISE}")
    told = _read(file)
    modes = [
        name.removeprefix(f"{_MODE}_") for name, on in told.items() if name.startswith(f"{_MODE}_") and on is True
    ] + ([told[_MODE]] if isinstance(told.get(_MODE), str) else [])  # fmt: skip
    if len(modes) != 1 or modes[0] not in _MODES:
        raise CaptureError(
            f"{file} pools by {', '.join(map(str, modes)) or 'nothing'}; accel pools by one of mean_tokens, "
            f"cls_token, lasttoken{_OTHERWISE}"
        )
    limits = _read(folder / LIMITS) if (folder / LIMITS).is_file() else {}
    if limits.get("do_lower_case"):
        raise CaptureError(
            f"{folder / LIMITS} sets do_lower_case, which accel leaves to the tokenizer{_OTHERWISE}"
        )
    longest = limits.get("max_seq_length")
    found = Embedding(_MODES[modes[0]], normalize=len(kinds) == len(wanted))
    return SentenceRecipe(found, longest if isinstance(longest, int) and longest > 0 else None)


def cross_encoder(folder: Path, config: Mapping[str, Any]) -> SentenceRecipe | None:
    """Of a directory of a BERT that gives one number for two texts; None: it is none. Raises CaptureError."""
    named, labels = config.get("architectures"), config.get("id2label")
    one = isinstance(labels, Mapping) and len(labels) == 1 or config.get("num_labels") == 1
    if not one or named != [_CROSS]:
        return None
    size = config.get("vocab_size")
    if not isinstance(size, int) or size < 1 or config.get("type_vocab_size", 2) != 2:
        raise CaptureError(
            f"{folder}: config.json has vocab_size {size!r} and type_vocab_size {config.get('type_vocab_size')!r}; a "
            "cross-encoder has a vocabulary, and two types of tokens"
        )
    told = config.get("sentence_transformers")
    told = told.get("activation_fn") if isinstance(told, Mapping) else None
    activation = told or config.get("sbert_ce_default_activation_function") or "Sigmoid"
    kind = str(activation).rpartition(".")[2]
    if kind not in ("Identity", "Sigmoid"):
        raise CaptureError(
            f"{folder}: config.json brings scores through {kind}; accel knows Identity and Sigmoid"
        )
    pairs = Pairs(size, kind == "Sigmoid")
    return SentenceRecipe(Embedding("cls", normalize=False, pairs=pairs), None)


def _read(file: Path) -> Any:
    """Raises CaptureError."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CaptureError(f"{file} cannot be read: {error}{_OTHERWISE}") from None
    if file.name != MODULES and not isinstance(found, dict):
        raise CaptureError(f"{file} is no JSON object{_OTHERWISE}")
    return found
