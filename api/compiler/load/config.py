"""What a model directory's config.json says, and what cannot work by it: asked before any weight is read."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel.compiler.load.quantised import FORMATS
from accel.ir.capture.arch.text_with_head import text_with_head
from accel.ir.embedding import Embedding
from accel.ir.errors import CaptureError

_HEADLESS = re.compile(r"For(?!CausalLM|ConditionalGeneration|MaskedLM|PreTraining)\w+$")


def read_config(path: Path) -> dict[str, Any]:
    """The configuration in a model directory, or in the file itself.

    Raises:
        CaptureError: there is none, or it is not one.
    """
    if not path.exists():
        raise CaptureError(
            f"{path} does not exist; give a model directory (with config.json and *.safetensors)"
        )
    file = path if path.is_file() else path / "config.json"
    if not file.is_file():
        whole = next((p for p in sorted(path.glob("*.gguf"))), None)
        hint = (
            "it is an accel artifact: open it with accel.load or accel-compile run"
            if (path / "accel.json").is_file()
            else f"give the GGUF file itself: {whole}"
            if whole
            else "a Hugging Face model directory holds one"
        )
        raise CaptureError(f"{path} holds no config.json; {hint}")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CaptureError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise CaptureError(f"{file} is not a configuration: it holds a {type(config).__name__}")
    return config


def refuse(
    path: Path,
    config: dict[str, Any],
    trust_remote_code: bool = False,
    embedding: Embedding | None = None,
) -> None:
    """Refuse a configuration of what is no language model, or needs code that is not trusted; a directory with code of
    its own needs none where transformers has a class of its model type. `embedding`: it is loaded for that, so that it
    may be an encoder.

    Raises:
        CaptureError: with the field of config.json, the reason, and the nearest thing that would work.
    """
    if runs_own_code(config, trust_remote_code):
        return  # what it is only its code knows
    kind = config.get("model_type")
    known = kind in _types(embedding) or embedding is None and text_type(config) is not None
    if config.get("auto_map") and not known:
        raise CaptureError(
            f"{path} contains its own Python code (auto_map in config.json), which accel does not run, and "
            f"transformers has no class for its model type {kind!r}; review that code, then allow it with "
            "trust_remote_code=True"
        )
    if not isinstance(kind, str):
        raise CaptureError(
            f"{path}: config.json has no model_type, so transformers cannot tell what it is; add it, "
            'as in "model_type": "llama"'
        )
    if embedding is not None:
        return
    check_type(kind, f"{path}: model_type of config.json", config)
    named = config.get("architectures") or []
    if not isinstance(named, list):
        raise CaptureError(
            f"{path}: architectures of config.json is {named!r}, not a list of class names; correct it, as in "
            '"architectures": ["LlamaForCausalLM"]'
        )
    for name in named:
        if _HEADLESS.search(str(name)):
            nearest = language_types().get(kind, "one with an output head")
            raise CaptureError(
                f"{path}: architectures of config.json is {name}, whose head gives no logits "
                f"over a vocabulary; the nearest class that works is {nearest}: save the weights of that"
            )


def runs_own_code(config: dict[str, Any], trust_remote_code: bool) -> bool:
    """Whether a model directory's own Python code makes the model, and not transformers' class of its type."""
    return trust_remote_code and bool(config.get("auto_map"))


def own_code_note(path: Path, config: dict[str, Any], trust_remote_code: bool) -> list[str]:
    """That a directory's own code did not run, where it has some."""
    if not config.get("auto_map") or runs_own_code(config, trust_remote_code):
        return []
    return [
        f"{path} contains its own Python code, which was not run: transformers' own {config['model_type']} is used"
    ]


def quantisation(
    path: Path, config: dict[str, Any], trust_remote_code: bool = False
) -> dict[str, Any]:
    """What a configuration says of quantised weights; nothing where they are not quantised.

    Raises:
        CaptureError: a format that is not read, with those that are.
    """
    told = config.get("quantization_config") or config.get("compression_config")
    if not told:
        return {}
    method = str(told.get("quant_method", "")) if isinstance(told, dict) else ""
    known, base = FORMATS.names(), config.get("_name_or_path")
    unquantised = f"the unquantised checkpoint{f' ({base})' if base else ''}"
    if method.replace("_", "-") not in known:
        raise CaptureError(
            f"{path}: quantization_config of config.json means that the weights are stored in "
            f"{method or 'a quantised form'}, which accel does not read (it reads {', '.join(known)}); give "
            f"{unquantised}, and quantise it with a recipe (accel-compile recipes)"
        )
    if runs_own_code(config, trust_remote_code):
        raise CaptureError(
            f"{path}: its weights are stored in {method}, which accel reads for transformers' own models only, and "
            f"this one runs its own code (auto_map); give {unquantised}, or leave out trust_remote_code=True"
        )
    return {**told, "quant_method": method}


def check_type(kind: str, where: str, config: dict[str, Any] | None = None) -> None:
    """Refuse a model type that transformers does not know, or not as a language model that decodes.

    Raises:
        CaptureError: with the near name.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    causal = causal_types()
    if kind in language_types() or text_type(config or {}) is not None:
        return
    near = _near(kind, causal)
    if kind not in CONFIG_MAPPING_NAMES:
        hint = f"did you mean '{near}'? If not, " if near else ""
        raise CaptureError(
            f"{where}: transformers knows no '{kind}'; {hint}a model type newer than this "
            "transformers needs an upgrade (pip install -U transformers), one with Python code of its own "
            "needs auto_map in its config.json and trust_remote_code=True"
        )
    nearest = (
        f"the nearest causal type is '{near}'"
        if near
        else f"any of the {len(causal)} causal types works, for example 'llama'"
    )
    raise CaptureError(
        f"{where}: '{kind}' is {_what(kind)}, not a causal language model; {nearest}"
    )


def text_type(config: Mapping[str, Any]) -> str | None:
    """The type of the language model within a model that also reads images or sounds; None where there is no other
    part, or what is within decodes no text by itself.
    """
    from transformers import AutoConfig
    from transformers.models.auto import modeling_auto as auto

    kind, inner = config.get("model_type"), config.get("text_config")
    several = (
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )
    if kind in language_types() or not any(kind in some for some in several):
        return None
    try:
        whole = AutoConfig.for_model(kind, **({"text_config": inner} if inner else {}))
        text = whole.get_text_config()
    except Exception:  # transformers raises many kinds; loading it will say why
        return None
    if text is whole or text.is_encoder_decoder:
        return None
    found: str = text.model_type
    return found if found in causal_types() or found in auto.MODEL_MAPPING_NAMES else None


def causal_types() -> dict[str, str]:
    """Every model type that transformers has a causal language model of -> the class of that."""
    from transformers.models.auto import modeling_auto

    return dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def language_types() -> dict[str, str]:
    """Every model type that accel may take -> its class; a causal one where there are both."""
    return {**encoder_decoder_types(), **causal_types()}


def _types(embedding: Embedding | None) -> Mapping[str, Any]:
    """Every model type that transformers has a class for, of what is asked for."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return MODEL_MAPPING_NAMES if embedding is not None else language_types()


def encoder_decoder_types() -> dict[str, str]:
    """Every model type that transformers has an encoder-decoder with an output head of -> its class."""
    from transformers.models.auto import modeling_auto as auto

    text = auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    return {**auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES, **text}


def auto_class(config: dict[str, Any], embedding: Embedding | None = None) -> Any:
    """The class that loads a configuration's model with its output head, of transformers where it has one; `embedding`:
    without a head, or with that over pairs.
    """
    import transformers
    from transformers.models.auto import modeling_auto as auto

    if embedding is not None:
        pairs = embedding.pairs is not None
        return transformers.AutoModelForSequenceClassification if pairs else transformers.AutoModel

    kind, named = config.get("model_type"), (config.get("architectures") or [""])[0]
    if kind not in language_types() and kind in auto.MODEL_MAPPING_NAMES:
        return text_with_head(str(kind))
    decoder_only = named in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    if decoder_only or not config.get("is_encoder_decoder"):
        return transformers.AutoModelForCausalLM
    if kind in auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES:
        return transformers.AutoModelForSpeechSeq2Seq
    return transformers.AutoModelForSeq2SeqLM


def _near(kind: str, known: dict[str, str]) -> str:
    """The near name, or else the longest that is part of it; "" where there is none."""
    near = difflib.get_close_matches(kind, known, n=1)
    return near[0] if near else max((n for n in known if n in kind), key=len, default="")


def _what(kind: str) -> str:
    """What a model type is to transformers, by the first of its uses."""
    from transformers.models.auto import modeling_auto

    uses = {
        "IMAGE_TEXT_TO_TEXT": "a model of images and text", "MULTIMODAL_LM": "a model of several inputs",
        "MASKED_LM": "a bidirectional encoder", "IMAGE_CLASSIFICATION": "a vision model",
        "OBJECT_DETECTION": "a vision model", "AUDIO_CLASSIFICATION": "an audio model",
        "SEQUENCE_CLASSIFICATION": "a classifier",
    }  # fmt: skip
    for use, words in uses.items():
        if kind in getattr(modeling_auto, f"MODEL_FOR_{use}_MAPPING_NAMES", ()):
            return words
    return "another kind of model"
