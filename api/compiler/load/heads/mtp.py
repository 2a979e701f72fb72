"""Next-token layers (multi-token prediction, arXiv:2412.19437), in the checkpoint of their target or as speculators has
them by themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel.compiler.load.checkpoint import Loaded
from accel.compiler.load.gguf import open_gguf
from accel.compiler.load.gguf._file import is_gguf, read_gguf
from accel.compiler.load.heads import (
    Config,
    HeadFormat,
    Target,
    number,
    output_head,
    size_of,
    stored_of,
)
from accel.compiler.load.shards import read_shards
from accel.ir.capture.arch.mtp import Mtp
from accel.ir.errors import CaptureError, shown
from accel.ir.weights import Stored

COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
_PREFIX = "mtp."  # of layers with numbers of their own; others go on behind the target's
_TYPE = "speculators_model_type"
_ALONE = re.compile(r"^mtp_layers\.0\.(\w+)\.(.+)$")  # by itself: of speculators
_ALONE_NAMES = {
    "input_proj": "fc",
    "token_layernorm": "pre_fc_norm_embedding",
    "hidden_layernorm": "pre_fc_norm_hidden",
    "final_layernorm": "norm",
}
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_OF_TARGET = re.compile(r"(?:shared_head\.head|embed_tokens)\.weight$")
_FULL = "full_attention"
_TYPES = {"layer_types": _FULL, "mlp_layer_types": "sparse"}


def _text(config: Config) -> Config:
    inner = config.get("transformer_layer_config", config.get("text_config"))
    return inner if isinstance(inner, Mapping) else config


def _vocabulary(config: Config) -> int:
    return size_of(_text(config), "vocab_size")


def _width(config: Config) -> int:
    return size_of(_text(config), "hidden_size")


def _first(config: Config, names: Iterable[str]) -> dict[str, str]:
    """The tensors of the first layer: name -> name in a model's checkpoint."""
    count = _text(config).get("num_hidden_layers")
    found = {}
    for name in names:
        layer = _LAYER.search(name)
        if (alone := _ALONE.match(name)) is not None:
            first, rest = alone.groups()
            found[name] = _PREFIX + f"{_ALONE_NAMES.get(first, f'layers.0.{first}')}.{rest}"
        elif name.startswith(_PREFIX):
            if layer is None or int(layer[1]) == 0:
                found[name] = name
        elif layer is not None and int(layer[1]) == count:
            found[name] = name
    return found


def _check(path: Path, config: Config) -> None:
    """Raises CaptureError where a folder says that it has no such layers, or its files lack them."""
    told = next((k for k in COUNTS if _text(config).get(k) is not None), None)
    if told is not None and _text(config)[told] == 0:
        raise CaptureError(
            f"{path}: config.json says {told} = 0, so the model has no next-token layers; leave draft = mtp out, or "
            "set `path` to a directory of the model that has them"
        )
    if told is not None:
        number(path, _text(config), told)
    if not _has_layer(path, config):
        says = "names none (num_nextn_predict_layers, mtp_num_hidden_layers)"
        if told is not None:
            says = f"says {told} = {_text(config)[told]}"
        raise CaptureError(
            f"{path}: its files hold no next-token layer (mtp.*, or layers behind the model's last), and config.json "
            f"{says}; leave draft = mtp out, or set `path` to a directory of the model that has them"
        )
    if _text(config).get("mtp_use_dedicated_embeddings"):
        raise CaptureError(
            f"{path}: config.json says mtp_use_dedicated_embeddings, and accel gives next-token layers the embedding "
            "of the target; use another drafter"
        )


def _has_layer(path: Path, config: Config) -> bool:
    if is_gguf(path):
        return bool(open_gguf(read_gguf(path)).architecture.next_token_layer())
    return bool(_first(config, read_shards(path).tensors))


def _load(path: Path, config: Config, target: Target) -> Loaded:
    """The first layer and the output head, which is the target's. Raises CaptureError."""
    if is_gguf(path):
        layer = open_gguf(read_gguf(path)).architecture.next_token_layer()
    else:
        stored = stored_of(path, config)
        names = {n: to for n, to in _first(config, stored).items() if not _OF_TARGET.search(n)}
        layer = {to: stored[n] for n, to in names.items()}
    model = _filled(path, config, layer)
    weight, head = output_head(path, target, _vocabulary(config), _width(config))
    model.shared_head = nn.Linear(_width(config), _vocabulary(config), bias=False, device="meta")
    model.shared_head.weight = weight
    return Loaded(Mtp(model).eval(), {weight: head})


def _filled(path: Path, config: Config, stored: Mapping[str, Stored]) -> Any:
    """transformers' module with one layer, and no embedding."""
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_layers import MtpModel
    from transformers.modeling_utils import LoadStateDictConfig

    target = _target(path, config)
    with torch.device("meta"):
        model = MtpModel(target, 1)
    target.config.num_hidden_layers = _text(config)["num_hidden_layers"]
    info, _ = convert_and_load_state_dict_in_model(
        model=model,
        state_dict={name: one.read() for name, one in stored.items()},
        load_config=LoadStateDictConfig(
            weight_mapping=model.get_weight_conversions(target),
            dtype=torch.float32,
            ignore_mismatched_sizes=True,  # and refused here, by name
        ),
    )
    for name, found, wanted in sorted(info.mismatched_keys, key=str):
        raise CaptureError(
            f"{path}: of the next-token layer {name} has size {list(found)}, and {list(wanted)} by its config.json"
        )
    model.embed_tokens = model.shared_head = None
    if more := sorted(info.unexpected_keys):
        raise CaptureError(
            f"{path}: of its next-token layer {more[0]} ({len(more)} of {len(stored)} tensors) has no place in "
            f"transformers' {type(model.layers[0].mtp_block).__name__}; accel knows no such layer"
        )
    model.rotary_emb = type(model.rotary_emb)(model.config)
    for name, tensor in model.state_dict().items():
        if tensor.is_meta:
            raise CaptureError(
                f"{path} lacks {name} (transformers' name) of its next-token layer; fetch the whole checkpoint again"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise CaptureError(
                f"{path}: {name} (transformers' name) of its next-token layer holds numbers that are not finite; fetch "
                "it again"
            )
    model.set_attn_implementation("sdpa")
    if model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")
    return model


def _target(path: Path, config: Config) -> Any:
    """A model of no weights whose only layer is of the kind of the next-token layer. Raises CaptureError."""
    from transformers import AutoModelForCausalLM

    kind = shown(str(_text(config).get("model_type")))
    try:
        layer = _layer_config(path, config)
        types = getattr(layer, "layer_types", None) or [_FULL]
        if types[0] == _FULL:
            with torch.device("meta"):
                found = AutoModelForCausalLM.from_config(layer)
    except Exception as error:  # transformers raises many kinds
        raise CaptureError(
            f"{path}: transformers has no next-token layer of model_type {kind}: {type(error).__name__}: {error}"
        ) from error
    if types[0] != _FULL:
        raise CaptureError(
            f"{path}: its next-token layer has {types[0]}, and accel reads those of full attention"
        )
    if getattr(found.get_decoder(), "rotary_emb", None) is None:
        raise CaptureError(
            f"{path}: model_type {kind} has no rotary positions, which its next-token layer would share"
        )
    return found


def _layer_config(path: Path, config: Config) -> Any:
    """That of one next-token layer, from which transformers can make another such."""
    from transformers import AutoConfig

    if _is_head(path, config) or is_gguf(path):
        whole = AutoConfig.for_model(**_text(config))
    else:
        whole = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    text = deepcopy(whole.get_text_config())
    text.num_mtp_layers, text.dtype = 1, torch.float32
    names = [name for name in _TYPES if getattr(text, name, None) is not None]
    for name in names:
        own = getattr(text, f"mtp_{name}", None) or [_TYPES[name]]
        setattr(text, f"mtp_{name}", own[:1])
    layer = text.get_mtp_config()
    for name in names:
        setattr(layer, f"mtp_{name}", getattr(layer, name))
    return layer


def _is_head(path: Path, config: Config) -> bool:
    """Whether one is by itself; else a model has it within."""
    return bool(config.get(_TYPE) == "mtp")


MTP = HeadFormat("mtp", _is_head, _vocabulary, _width, _load, within=True, check=_check)
