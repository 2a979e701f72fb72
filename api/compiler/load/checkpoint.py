"""The tensors of a checkpoint -> a module whose weights stay where they lie until they are read."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accel.compiler.load.config import auto_class
from accel.compiler.load.shards import Shards
from accel.ir.embedding import Embedding
from accel.ir.errors import CaptureError
from accel.ir.weights import Experts, Pages, Stored, stand_in

aten = torch.ops.aten


@dataclass(frozen=True)
class Loaded:
    """A language model in float32 on the CPU. `stored` says where the values of its tensors
    lie: those that it does not list hold their own, and stand-ins hold none. `notes`: of a quantised checkpoint,
    what becomes of it.
    """

    model: Any
    stored: dict[Tensor, Stored]
    notes: list[str] = field(default_factory=list)


def load_whole(path: Path, auto: Any, trust_remote_code: bool) -> Any:
    """As transformers loads it, in memory."""
    model, info = auto.from_pretrained(
        path,
        dtype=torch.float32,
        local_files_only=True,
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
    )
    return _complete(path, model, info)


def stored_tensors(shards: Shards) -> dict[str, Stored]:
    """Each tensor of a checkpoint as a module holds it: floats are float32."""
    found = {}
    for name, tensor in shards.tensors.items():
        narrow = tensor.is_floating_point() and tensor.dtype is not torch.float32
        found[name] = Stored(tensor, (Tensor.float,) if narrow else (), shards.pages)
    return found


def load_streamed(
    path: Path,
    config: Any,
    sources: Mapping[str, Stored],
    pages: Pages,
    notes: list[str],
    every: bool = False,
    embedding: Embedding | None = None,
) -> Loaded:
    """Let transformers place the tensors (names, ties, buffers) without reading them. `every`: none may be left over.
    `embedding`: the model has no head, nor a layer over its first token, or those of a cross-encoder.

    Those that are not float32 are represented by stand-ins, and so are experts that it stacks. Where
    transformers computes otherwise with some, or writes to some, it gets these in memory, in a second round.
    """
    model, stored, touched, left = _place(path, config, sources, set(), embedding)
    if left and every:
        raise CaptureError(
            f"{path} has {_some(left)}, for which {type(model).__name__} has no place as the metadata describes it; "
            "give the Hugging Face checkpoint that it was made from"
        )
    if left:
        notes = [*notes, f"the model does not use {_some(left)} of the checkpoint"]
    if touched:
        del model, stored
        pages.release()  # with what was written
        model, stored, *_ = _place(path, config, sources, touched, embedding)
    return Loaded(model, stored, notes)


@dataclass(frozen=True)
class _Copied:
    """A checkpoint's tensor that transformers gets in float32 when it asks for it, by `[...]`."""

    stored: Stored

    def __getitem__(self, part: Any) -> Tensor:
        value = self.stored.read()
        return value[part].to(torch.float32, copy=value is self.stored.source)


def _place(
    path: Path,
    config: Any,
    sources: Mapping[str, Stored],
    copied: set[str],
    embedding: Embedding | None,
) -> tuple[Any, dict[Tensor, Stored], set[str], list[str]]:
    """The model; where those of its tensors lie that are a checkpoint's as they are; the tensors that cannot be had
    so, since transformers made something of them; and those that it did not use.
    """
    from transformers import GenerationConfig

    given: dict[str, Any] = {}
    stand_ins = set()
    for name, source in sources.items():
        as_is = type(source) is Stored and not source.changes
        given[name] = source.source if as_is else stand_in(source.blank.shape)
        if name in copied:
            given[name] = _Copied(source)
        elif not as_is:
            stand_ins.add(name)
    with torch.device("meta"):
        empty = auto_class(config.to_dict(), embedding).from_config(deepcopy(config))
        options = {"add_pooling_layer": False} if embedding is not None and _pools(empty) else {}
        if options:
            empty = type(empty)(deepcopy(config), **options)
    _check_shapes(path, empty, sources)  # before transformers takes memory for them
    plain = {n: t for n, t in given.items() if n not in copied}
    with _Watch(plain, dict(sources), stand_ins) as watch:
        model, info = type(empty).from_pretrained(
            None,
            config=empty.config,
            state_dict=given,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,  # and refused here, by name
            output_loading_info=True,
            **options,
        )
    _complete(path, model, info)
    if (path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    stored = {}
    tensors = model.state_dict(keep_vars=True).values()
    for tensor in tensors:
        name = watch.name(tensor)
        if name is not None and _same_layout(tensor, watch.tensors[name]):
            stored[tensor] = watch.sources[name]
    for tensor in tensors:  # a part of a stand-in
        if tensor not in stored and (name := watch.name(tensor)) is not None:
            watch.touched |= watch.made_of(name)
    return model, stored, watch.touched, sorted(info["unexpected_keys"])


def _pools(model: Any) -> bool:
    """Whether its class has a layer over the first token, which may be left out."""
    return "add_pooling_layer" in signature(type(model).__init__).parameters


def _check_shapes(path: Path, empty: Any, sources: Mapping[str, Stored]) -> None:
    """Raise CaptureError where the tensors of a model that was made of nothing are others than a checkpoint's."""
    kind, apart = type(empty).__name__, dict[int, tuple[int, str, Tensor]]()
    for name, wanted in empty.state_dict(keep_vars=True).items():
        if name not in sources:  # transformers makes it of others
            apart[id(wanted)] = (wanted.numel(), name, wanted)
            continue
        blank = sources[name].blank
        if blank.shape != wanted.shape:
            raise _mismatch(path, empty, name, blank.shape, wanted.shape)
        if wanted.is_floating_point() and not blank.is_floating_point():
            raise CaptureError(
                f"{path}: {name} holds {str(blank.dtype).removeprefix('torch.')} numbers in the checkpoint, and {kind} "
                "has floats there: checkpoint and configuration do not match"
            )
    held = sum(source.blank.numel() for source in sources.values())
    if sum(size for size, *_ in apart.values()) > 2 * held:
        _, name, wanted = max(apart.values(), key=lambda one: one[0])
        raise CaptureError(
            f"{path}: its configuration describes a {kind} whose {name} is {list(wanted.shape)}, and the checkpoint "
            f"has {held} numbers in all: checkpoint and configuration do not match"
        )


def _same_layout(a: Tensor, b: Tensor) -> bool:
    return (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride())


class _Watch(TorchDispatchMode):
    """Within it, notes which stand-ins are read, and which tensors are written to. Views may pass; what stacks
    experts gives another stand-in.
    """

    def __init__(self, tensors: dict[str, Tensor], sources: dict[str, Stored], stand_ins: set[str]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors, self.sources = tensors, sources  # by name, what was stacked included
        self._spans = sorted(_span(t, n) for n, t in tensors.items() if t.nbytes)
        self._stand_ins = stand_ins
        self._parts: dict[str, set[str]] = {}
        self.touched: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (aten.stack.default, aten.cat.default):
            made = self._stacked(func is aten.cat.default, *args, **(kwargs or {}))
            if made is not None:
                return made
        if not func.is_view:
            for value in tree_leaves((args, kwargs)):
                name = self.name(value) if isinstance(value, Tensor) else None
                if name is not None and (name in self._stand_ins or func._schema.is_mutable):
                    self.touched |= self.made_of(name)
        return func(*args, **(kwargs or {}))

    def _stacked(self, rows: bool, parts: list[Tensor], dim: int = 0) -> Tensor | None:
        """A stand-in for experts [N,K] side by side, or (`rows`) for such stacks one below the other."""
        names = [self.name(part) for part in parts]
        known = [n for n in names if n is not None]
        if len(known) < len(parts) or not all(
            _same_layout(part, self.tensors[n]) for n, part in zip(known, parts, strict=True)
        ):
            return None
        sources = [self.sources[n] for n in known]
        stacks = [s for s in sources if isinstance(s, Experts)]
        if rows and dim in (1, -2) and len(stacks) == len(sources):
            if len({len(s.experts) for s in stacks}) > 1:
                return None
            stored = Experts.rows(stacks)
        elif not rows and dim == 0 and not stacks and parts[0].dim() == 2:
            stored = Experts.stack(sources)
        else:
            return None
        name, tensor = f"{known[0]}, {len(self._parts)}", stand_in(stored.blank.shape)
        self.tensors[name], self.sources[name] = tensor, stored
        self._parts[name] = set().union(*(self.made_of(n) for n in known))
        self._stand_ins.add(name)
        insort(self._spans, _span(tensor, name))
        return tensor

    def made_of(self, name: str) -> set[str]:
        """The checkpoint's tensors that one is a stack of; of another, itself."""
        return self._parts.get(name, {name})

    def name(self, tensor: Tensor) -> str | None:
        """The tensor in which this one begins."""
        place = 0 if tensor.is_meta else tensor.data_ptr()
        index = bisect_right(self._spans, place, key=lambda span: span[0]) - 1
        if index < 0 or place >= self._spans[index][1]:
            return None
        return self._spans[index][2]


def _span(tensor: Tensor, name: str) -> tuple[int, int, str]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name


def _complete(path: Path, model: Any, info: Mapping[str, Any]) -> Any:
    """The model, unless the checkpoint left some of it to chance. Raises CaptureError."""
    kind = type(model).__name__
    for name, found, wanted in sorted(info["mismatched_keys"], key=str):
        raise _mismatch(path, model, name, found, wanted)
    if missing := sorted(info["missing_keys"]):
        raise CaptureError(
            f"{path} lacks {len(missing)} of {kind}'s tensors: {', '.join(missing[:3])}"
            f"{', …' if len(missing) > 3 else ''}; the checkpoint is incomplete or belongs to another model"
        )
    return model


def _some(names: list[str]) -> str:
    """How many tensors, and the first names."""
    many = f"{len(names)} tensor{'s' if len(names) > 1 else ''}"
    return f"{many} ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"


def _mismatch(path: Path, model: Any, name: str, shape: Any, expected: Any) -> CaptureError:
    return CaptureError(
        f"{path}: {name} is {list(shape)} in the checkpoint and {list(expected)} in {type(model).__name__} as its "
        "configuration describes it: checkpoint and configuration do not match"
    )
