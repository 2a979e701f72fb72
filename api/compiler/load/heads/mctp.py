"""MCTP modules (VITA-Audio, arXiv:2505.03739) in the layout of their authors: a checkpoint whose last layers are those
of the modules. What else it holds is not read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from accel.compiler.load.checkpoint import Loaded
from accel.compiler.load.heads import (
    Config,
    HeadFormat,
    Target,
    class_names,
    fill,
    layer_config,
    number,
    output_head,
    size_of,
    tensors_of,
)
from accel.ir.capture.arch.mctp import Mctp
from accel.ir.errors import CaptureError

_COUNT, _LAYERS = "num_nextn_predict_layers", "num_hidden_layers"
_OWN = re.compile(r"mtp_(projs|embed_norms|hidden_norms)\.\d+\.|norm\.weight$")
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_BIAS = "layers.0.self_attn.q_proj.bias"


def _is_head(path: Path, config: Config) -> bool:
    named = any(name.endswith("MTPForCausalLM") for name in class_names(config))
    return named and size_of(config, _COUNT) > 0


def _vocabulary(config: Config) -> int:
    return size_of(config, "vocab_size")


def _width(config: Config) -> int:
    return size_of(config, "hidden_size")


def _load(path: Path, config: Config, target: Target) -> Loaded:
    """The modules, with the target's output head. Raises CaptureError."""
    count, layers = number(path, config, _COUNT), number(path, config, _LAYERS)
    if count > layers:
        raise CaptureError(
            f"{path}: config.json says {_COUNT} = {count} and {_LAYERS} = {layers}, and the last layers are those of "
            "the modules; fetch the checkpoint again"
        )
    tensors = _of_modules(tensors_of(path), layers - count)
    told = {**config, "attention_bias": True} if _BIAS in tensors else config
    with torch.no_grad():
        head = Mctp(layer_config(path, told), count)
        fill(path, head, tensors, ("stand_ins.", "lm_head."))
        weight, stored = output_head(path, target, _vocabulary(config), _width(config))
        head.lm_head.weight = weight
    return Loaded(head.float().eval(), {weight: stored})


def _of_modules(tensors: Mapping[str, Tensor], before: int) -> dict[str, Tensor]:
    """The tensors of modules by the names of `Mctp`; `before`: the layers of the model, which lie before theirs."""
    found = dict[str, Tensor]()
    for full, tensor in tensors.items():
        name = full.removeprefix("model.")
        layer = _LAYER.match(name)
        if layer and int(layer[1]) >= before:
            found[f"layers.{int(layer[1]) - before}.{layer[2]}"] = tensor
        elif _OWN.match(name):
            found[name.removeprefix("mtp_")] = tensor
    return found


MCTP = HeadFormat("mctp", _is_head, _vocabulary, _width, _load, unscaled=True)
