"""The language model within a model that also reads images or sounds: its configuration, and its tensors by its own
names. What reads the others is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel.compiler.load.config import auto_class, text_type
from accel.ir.weights import Stored

# what the names of its tensors begin with, beside the name that its own class gives its layers
_WITHIN = {"language_model", "text_model", "llm"}
_HEAD = "lm_head"
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def text_config(config: Any, json: Mapping[str, Any]) -> Any:
    """The configuration of the language model within, of transformers; where there is no other part, `config` itself.
    json: of config.json.
    """
    if text_type(dict(json)) is None:
        return config
    text = config.get_text_config()
    for name in _IDS:
        if getattr(text, name, None) is None and json.get(name) is not None:
            setattr(text, name, json[name])
    inner = json.get("text_config")
    if not (isinstance(inner, dict) and "tie_word_embeddings" in inner):
        usual = getattr(text, "tie_word_embeddings", False)
        text.tie_word_embeddings = bool(json.get("tie_word_embeddings", usual))
    return text


def text_tensors(stored: Mapping[str, Stored], config: Any) -> tuple[dict[str, Stored], list[str]]:
    """The tensors of the language model by its own names, and the names of the others. config: the language model's,
    which learns here whether its output head is its embedding.
    """
    import torch

    with torch.device("meta"):
        model = auto_class(config.to_dict()).from_config(config)
    base = str(model.base_model_prefix)
    parts = {name.partition(".")[0] for name in model.base_model.state_dict()}
    tops = {name.partition(".")[0] for name in model.state_dict()}
    found, others = dict[str, Stored](), list[str]()
    for name, one in stored.items():
        own = _own(name, base, parts, tops)
        if own is None:
            others.append(name)
        else:
            found[own] = one
    if _HEAD in tops and f"{_HEAD}.weight" not in found:
        config.tie_word_embeddings = True
    return found, others


def _own(name: str, base: str, parts: set[str], tops: set[str]) -> str | None:
    """A tensor's name in the language model; None: it is of another part."""
    words, within = name.split("."), False
    while words[0] in _WITHIN or words[0] == base and words[1:2] and words[1] in {*_WITHIN, *parts}:
        within |= words[0] in _WITHIN
        words = words[1:]
    if words[0] in parts:
        return ".".join([base, *words])
    return ".".join(words) if within or words[0] in tops - {base} else None
