"""Medusa heads (arXiv:2401.10774) in the layouts of their authors and of vLLM."""

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
    fill,
    number,
    output_head,
    size_of,
    target_ids,
    tensors_of,
)
from accel.ir.capture.arch.medusa import Medusa
from accel.ir.errors import CaptureError

_HEADS, _BLOCKS = "medusa_num_heads", "medusa_num_layers"
_TENSOR = re.compile(r"^(\d+)\.(\d+)\.(?:linear\.)?(?:weight|bias)$")  # head, part
_BLOCK = re.compile(r"^blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$")  # of vLLM's layout
_WORDS = re.compile(r"^lm_heads\.(\d+)\.weight$")
_SHARED = "lm_head.weight"  # where all heads have one
_MAP = "token_map"  # the target's id of each token that heads say


def _is_head(path: Path, config: Config) -> bool:
    return _HEADS in config or _of_vllm(config)


def _of_vllm(config: Config) -> bool:
    return config.get("model_type") == "medusa" and "num_heads" in config


def _vocabulary(config: Config) -> int:
    return size_of(config, "vocab_size")


def _width(config: Config) -> int:
    return size_of(config, "hidden_size")


def _count(tensors: Mapping[str, Tensor]) -> int:
    """Heads of a file: published config.json files say fewer than there are."""
    return 1 + max((int(m[1]) for name in tensors if (m := _TENSOR.match(name))), default=-1)


def _missing(path: Path, config: Config) -> Config:
    """Sizes, which the authors' config.json lacks; of vLLM's by the authors' names."""
    if _of_vllm(config):
        return {_HEADS: config["num_heads"], _BLOCKS: config.get("num_hidden_layers", 1)}
    if "hidden_size" in config and "vocab_size" in config:
        return {}
    words = tensors_of(path).get(f"0.{size_of(config, _BLOCKS)}.weight")
    if words is None or words.dim() != 2:
        raise CaptureError(
            f"{path} lacks 0.{size_of(config, _BLOCKS)}.weight, by which its first head says its tokens, and its "
            "config.json says no vocab_size and hidden_size; fetch the head again"
        )
    return {"vocab_size": len(words), "hidden_size": words.shape[1]}


def _load(path: Path, config: Config, target: Target) -> Loaded:
    """The heads; where they have no words of their own, with the target's output head. Raises CaptureError."""
    width, vocabulary = number(path, config, "hidden_size"), number(path, config, "vocab_size")
    told, blocks = number(path, config, _HEADS), number(path, config, _BLOCKS, 0)
    tensors = dict(tensors_of(path))
    if _of_vllm(config):
        tensors = _renamed(tensors, told, blocks, bool(config.get("original_lm_head")))
    drafted, _ = tensors.pop("d2t", None), tensors.pop("t2d", None)
    shared = tensors.pop(_SHARED, None)
    heads = max(told, _count(tensors))
    words = [f"{i}.{blocks}.weight" for i in range(heads)]
    own = any(name in tensors for name in words)
    with torch.no_grad():
        size = None if drafted is None else len(drafted)
        head = Medusa(vocabulary, width, heads, blocks, size)
        if drafted is not None:
            called = _MAP if _of_vllm(config) else "d2t"
            ids = target_ids(path, drafted, len(drafted), vocabulary, called)
            head.words.set_ids(ids)
        fill(path, head.heads, tensors, () if own else tuple(words))
        if shared is not None:
            _set_shared(path, head, shared, (size or vocabulary, width))
    if own or shared is not None:
        return Loaded(head.eval(), {})
    weight, stored = output_head(path, target, vocabulary, width)
    head.set_words(weight)
    return Loaded(head.eval(), {weight: stored})


def _renamed(
    tensors: Mapping[str, Tensor], heads: int, blocks: int, one_for_all: bool
) -> dict[str, Tensor]:
    """Tensors of vLLM's layout by the authors' names: `token_map` as `d2t`, what all heads say tokens by as `_SHARED`,
    and a bias of 0 where blocks have none. Heads above `heads` are left out, as there; what has no place stays as it
    is, and is refused by its name.
    """
    named = {name.removeprefix("medusa_heads."): tensor for name, tensor in tensors.items()}
    ids, found = named.pop(_MAP, None), dict[str, Tensor]()
    for name, tensor in named.items():
        if match := _BLOCK.match(name):
            if int(match[1]) < heads:
                found[f"{match[1]}.{match[2]}.linear.{match[3]}"] = tensor
            continue
        match = _WORDS.match(name)
        if match is None and name != _SHARED:
            found[name] = tensor
            continue
        known = ids is not None and bool(((ids >= 0) & (ids < len(tensor))).all())
        if ids is not None and known and len(tensor) > len(ids):  # `target_ids` refuses others
            tensor = tensor[ids.long()]
        if match is None or (one_for_all and match[1] == "0"):
            found[_SHARED] = tensor
        elif not one_for_all and int(match[1]) < heads:
            found[f"{match[1]}.{blocks}.weight"] = tensor
    for name in [one for one in found if one.endswith("linear.weight")]:
        bias = name.removesuffix("weight") + "bias"
        found.setdefault(bias, found[name].new_zeros(len(found[name])))
    if ids is not None:
        found["d2t"] = ids.long() - torch.arange(len(ids))
    return found


def _set_shared(path: Path, head: Medusa, words: Tensor, size: tuple[int, int]) -> None:
    """Let all heads say their tokens by a matrix of their file. Raises CaptureError."""
    if tuple(words.shape) != size or not bool(torch.isfinite(words.float()).all()):
        raise CaptureError(
            f"{path}: {_SHARED} has size {list(words.shape)}, and {list(size)} by its config.json, or numbers that are "
            "not finite; fetch the head again"
        )
    head.set_words(torch.nn.Parameter(words.float(), requires_grad=False))


MEDUSA = HeadFormat("medusa", _is_head, _vocabulary, _width, _load, missing=_missing)
