"""Published heads: a file is a format; which one a folder has is read from its config.json."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accel.compiler.load.checkpoint import Loaded, stored_tensors
from accel.compiler.load.config import quantisation
from accel.compiler.load.quantised import dequantised
from accel.compiler.load.shards import read_shards
from accel.ir.errors import CaptureError, shown
from accel.ir.weights import Stored, stand_in

Config = Mapping[str, Any]  # of config.json
BINS = ("pytorch_model.bin", "medusa_lm_head.pt")


@dataclass(frozen=True)
class Target:
    """What a head is told of its target: how many layers it has, and where its output head [V,H] lies; None: it is not
    known, or no product with one matrix. caches: of each layer the KV heads and their size; 0 where nothing attends.
    windows: the tokens that each sees; 0: all. shares: the layer before whose keys each reads; None: its own.
    """

    layers: int = 0
    output_head: Stored | None = None
    caches: tuple[tuple[int, int], ...] = ()
    windows: tuple[int, ...] = ()
    shares: tuple[int | None, ...] = ()


@dataclass(frozen=True)
class HeadFormat:
    """A format of published heads.

    method: the drafter that drafts with such a head. is_head: whether a folder is of this format, by its config.json.
    vocab_size: of the target. target_width: of the target's hidden states, as far as it is said. load: the head in a
    folder, for a target. within: it lies in the folder of a model, which it drafts for. missing: what a config.json
    leaves out, by the tensors. check: raises CaptureError where a folder has none, before any weight is read. unscaled:
    it reads the target's embedding as it is stored.
    """

    method: str
    is_head: Callable[[Path, Config], bool]
    vocab_size: Callable[[Config], int]
    target_width: Callable[[Config], int]
    load: Callable[[Path, Config, Target], Loaded]
    within: bool = False
    check: Callable[[Path, Config], None] | None = None
    unscaled: bool = False
    missing: Callable[[Path, Config], Config] | None = None


@cache
def formats() -> tuple[HeadFormat, ...]:
    """All formats, in the order of their files."""
    found = list[HeadFormat]()
    for file in sorted(pkgutil.iter_modules(__path__), key=lambda one: one.name):
        if not file.name.startswith("_"):
            module = importlib.import_module(f"{__name__}.{file.name}")
            found += [one for one in vars(module).values() if isinstance(one, HeadFormat)]
    return tuple(found)


def size_of(config: Config, name: str) -> int:
    """A size that a config.json says; 0 where it says no whole number, which `number` refuses with the reason."""
    value = config.get(name)
    return value if isinstance(value, int) else 0


def class_names(config: Config) -> list[str]:
    """What a config.json says of its architectures; of anything but names nothing."""
    found = config.get("architectures")
    return [one for one in found if isinstance(one, str)] if isinstance(found, list) else []


def format_of(path: Path, config: Config, method: str = "") -> HeadFormat | None:
    """That of a folder and its config.json; None: it is of no head. method: a drafter, whose heads may lie within
    models.
    """
    own = (one for one in formats() if one.within and one.method == method)
    return next((one for one in formats() if one.is_head(path, config)), next(own, None))


def number(path: Path, config: Config, name: str, least: int = 1) -> int:
    """A number of a config.json. Raises CaptureError."""
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise CaptureError(
            f"{path}: config.json says {name} = {value!r}; a head needs a whole number of {least} or more there"
        )
    return value


def layer_config(path: Path, config: Config) -> Any:
    """What transformers configures one decoder layer by. Raises CaptureError."""
    from transformers import AutoConfig

    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
        number(path, config, name)
    kind = str(config.get("model_type", "llama"))
    left = ("model_type", "architectures", "quantization_config", "num_hidden_layers")
    told = {n: v for n, v in config.items() if n not in left}
    try:
        return AutoConfig.for_model(kind, **told, num_hidden_layers=1)
    except Exception as error:  # transformers raises many kinds
        raise CaptureError(
            f"{path}: transformers has no layer of model_type {shown(kind)} by this config.json: "
            f"{type(error).__name__}: {error}"
        ) from error


def names_of(path: Path) -> set[str]:
    """The names of a folder's tensors; of one without, or with a damaged file, none."""
    try:
        return set(tensors_of(path))
    except CaptureError:
        return set()


def tensors_of(path: Path) -> dict[str, Tensor]:
    """All tensors of a head by name. Raises CaptureError where a file is missing or damaged."""
    file = next((path / name for name in BINS if (path / name).is_file()), None)
    if file is None or any(path.glob("*.safetensors")):
        return read_shards(path).tensors
    try:
        found: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
        if not all(isinstance(one, Tensor) for one in found.values()):
            raise ValueError("values that are no tensors")
    except Exception as error:  # torch raises many kinds
        raise CaptureError(
            f"{file} is no file of tensors, or damaged ({type(error).__name__}); fetch it again"
        ) from error
    return found


def fill(
    path: Path, head: nn.Module, tensors: Mapping[str, Tensor], others: tuple[str, ...]
) -> None:
    """A head's parameters from tensors, all of both, but for `others`, by how names begin. Raises CaptureError."""
    wanted = {
        name: tensor for name, tensor in head.named_parameters() if not name.startswith(others)
    }
    if lacks := sorted(wanted.keys() - tensors.keys()):
        raise CaptureError(
            f"{path} lacks {lacks[0]} ({len(lacks)} of {len(wanted)} tensors), which its config.json asks for; fetch "
            "the head again"
        )
    if more := sorted(tensors.keys() - wanted.keys()):
        raise CaptureError(
            f"{path} has {more[0]} ({len(more)} tensors more than its config.json tells of); accel knows no such head"
        )
    for name, parameter in wanted.items():
        if parameter.shape != tensors[name].shape:
            raise CaptureError(
                f"{path}: {name} has size {list(tensors[name].shape)}, and {list(parameter.shape)} by its config.json"
            )
        if not bool(torch.isfinite(tensors[name].float()).all()):
            raise CaptureError(f"{path}: {name} holds numbers that are not finite; fetch it again")
        parameter.data = tensors[name].float()


def target_ids(
    path: Path, drafted: Tensor, count: int, vocabulary: int, name: str = "d2t"
) -> Tensor:
    """The target's id of each draft token, from how far they are apart. name: what the file calls it."""
    found = drafted.long().flatten() + torch.arange(len(drafted.flatten()))
    if len(found) != count:
        raise CaptureError(
            f"{path}: {name} names {len(found)} tokens, and the draft vocabulary has {count}; fetch the head again"
        )
    if wrong := found[(found < 0) | (found >= vocabulary)].tolist():
        raise CaptureError(
            f"{path}: {name} names token {wrong[0]}, and the target has {vocabulary} tokens; fetch the head again, or "
            "give one that was trained for this model"
        )
    if len(found.unique()) != count:
        raise CaptureError(
            f"{path}: {name} names a token of the target twice; fetch the head again"
        )
    return found


def stored_of(path: Path, config: Config) -> dict[str, Stored]:
    """All tensors of a folder as parameters. Raises CaptureError."""
    shards = read_shards(path)
    stored, told = stored_tensors(shards), quantisation(path, dict(config))
    return dequantised(told, shards.tensors, stored, shards.pages)[0] if told else stored


def output_head(
    path: Path, target: Target, vocabulary: int, width: int
) -> tuple[nn.Parameter, Stored]:
    """That of the target [V,H], as a stand-in and where it lies. path: of the head that says its tokens by it. Raises
    CaptureError.
    """
    stored = target.output_head
    if stored is None:
        raise CaptureError(
            f"{path} says its tokens by the output head of its target, and that of this model is no product with one "
            "matrix; use another drafter"
        )
    if tuple(stored.blank.shape) != (vocabulary, width):
        raise CaptureError(
            f"{path}: the model's output head has size {list(stored.blank.shape)}, and {[vocabulary, width]} by the "
            "config.json of the draft head; give a head that was trained for this model"
        )
    return nn.Parameter(stand_in(stored.blank.shape), requires_grad=False), stored
