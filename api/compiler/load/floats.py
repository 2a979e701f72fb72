"""A GGUF file's model as the folder of floats that transformers and accel read.

It holds what transformers would save: config.json, generation_config.json, the tokenizer with its chat template, and
the weights by the model's names, each the floats that its blocks stand for, its rows in the model's order.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from accel.compiler.load.config import auto_class
from accel.compiler.load.gguf import Base, GgufModel
from accel.compiler.load.source import Gguf
from accel.compiler.load.tokenizer import write_tokenizer
from accel.ir.errors import CaptureError, InputError
from accel.ir.weights import Stored

SHARD = 1 << 30  # bytes of weights in memory at once
Watch = Callable[[int, int], None]  # bytes of weights that are written, and all


def write(
    file: Path,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    watch: Watch = lambda done, total: None,
) -> None:
    """Write the model of a GGUF file as a Hugging Face folder, whole or not at all.

    Raises:
        CaptureError: accel does not read the file, or a configuration cannot say what the file does.
        InputError: the folder is there and not empty.
        OSError: it cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} is there; name another folder, or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = folder.with_name(f".{folder.name}.new")  # one name: what a killed process left goes
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    try:
        _fill(file, new, dtype, watch)
        if folder.exists():
            folder.rmdir()
        new.rename(folder)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def _fill(file: Path, folder: Path, dtype: torch.dtype, watch: Watch) -> None:
    from transformers import GenerationConfig

    source = Gguf(file)
    given = source.model
    _sayable(given)
    config = source.config()
    with torch.device("meta"):
        config.architectures = [type(auto_class(given.config).from_config(config)).__name__]
    config.dtype = dtype
    config.save_pretrained(folder)
    ends = {name: given.config[f"{name}_token_id"] for name in ("bos", "eos", "pad")}
    GenerationConfig(**{f"{name}_token_id": i for name, i in ends.items()}).save_pretrained(folder)
    tokenizer = source.tokenizer
    if tokenizer is not None:
        write_tokenizer(tokenizer, folder)
    weights, _ = given.weights()
    _write_weights(weights, folder, dtype, watch)
    given.file.pages.release()


def _sayable(model: GgufModel) -> None:
    """Raise CaptureError where the file changes a model in what no config.json says."""
    own, tensors = model.architecture, model.file.tensors
    apart = [name for name in own.read_apart if name in tensors]
    if apart and type(own).adapt is not Base.adapt:
        raise CaptureError(
            f"{model.file.path}: no config.json says what {apart[0]} holds; compile the GGUF file itself"
        )


def _write_weights(
    weights: dict[str, Stored], folder: Path, dtype: torch.dtype, watch: Watch
) -> None:
    shards = list(_shards({n: w.blank.numel() * dtype.itemsize for n, w in weights.items()}))
    total = sum(weight.blank.numel() for weight in weights.values()) * dtype.itemsize
    place, done = dict[str, str](), 0
    for i, names in enumerate(shards, 1):
        file = (
            f"model-{i:05}-of-{len(shards):05}.safetensors"
            if len(shards) > 1
            else "model.safetensors"
        )
        part = dict[str, Tensor]()
        for name in names:
            part[name] = weights[name].read().to(dtype).contiguous().clone()
            if not part[name].isfinite().all():
                raise CaptureError(f"{name} has numbers that {dtype} cannot hold; take bfloat16")
            done += part[name].nbytes
            watch(done, total)
        save_file(part, folder / file, metadata={"format": "pt"})
        place |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": place}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _shards(sizes: dict[str, int]) -> Iterator[list[str]]:
    """Names, in runs of at most SHARD bytes where a weight alone is not larger."""
    run, held = list[str](), 0
    for name, size in sizes.items():
        if run and held + size > SHARD:
            yield run
            run, held = [], 0
        run.append(name)
        held += size
    yield run
