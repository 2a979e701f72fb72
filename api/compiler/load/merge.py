"""An adapter merged into a model's weights, each of which is updated when it is read; the model stays as it is."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accel.ir.capture.inspect import unwrapped
from accel.ir.errors import InputError
from accel.ir.peft import PeftAdapter, Update
from accel.ir.weights import Change, Stored, stand_in


def merged(
    model: Any, stored: Mapping[Tensor, Stored], adapter: PeftAdapter
) -> tuple[nn.Module, dict[Tensor, Stored]]:
    """The model, and where the values of its tensors lie once the adapter is merged. `stored`: where they lie without
    it. Where the adapter changes one of tied tensors, the model is a copy in which that one is a tensor of its own.

    Raises:
        InputError: the adapter is of another model, with the tensor and both shapes, or `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"merge_adapter: {adapter.path} goes by the names of modules, which a {type(model).__name__} does not "
            "keep; give the module, or its model directory"
        )
    model, params = unwrapped(model), dict(stored)
    tensors = dict(model.named_parameters(remove_duplicate=False))
    shared = _shared(tensors)
    for name, array in adapter.replaced.items():
        if name not in tensors:
            raise InputError(_missing(adapter, name, name, tensors))
        _same(adapter, name, torch.Size(array.shape), name, tensors[name].shape)
    changes = [(update, *_change(model, tensors, adapter, update)) for update in adapter.updates]
    alone = _alone(adapter, tensors, shared, [name for _, name, _ in changes])
    for name, array in adapter.replaced.items():
        if name not in alone:
            params[tensors[name]] = Stored(torch.from_numpy(array))
    if alone:
        model = _untied(model, params, alone)
        tensors = dict(model.named_parameters(remove_duplicate=False))
    for name in alone & adapter.replaced.keys():
        params[tensors[name]] = Stored(torch.from_numpy(adapter.replaced[name]))
    done: set[tuple[Tensor, int]] = set()
    for update, name, change in changes:
        if (key := (tensors[name], update.nested)) not in done:  # tied adapters change it once
            _set(params, tensors[name], change)
        done.add(key)
    return model, params


def _alone(
    adapter: PeftAdapter,
    tensors: Mapping[str, Tensor],
    shared: Mapping[Tensor, list[str]],
    updated: Sequence[str],
) -> set[str]:
    """Names of tied tensors that the adapter changes apart from the others: peft keeps a copy of what it trains
    (modules_to_save), and adds an update to the output of one module. The others keep the base model's values.

    Raises InputError where it loads two different values into one tensor.
    """
    found: set[str] = set()
    for name, array in adapter.replaced.items():
        others = [adapter.replaced.get(n) for n in shared[tensors[name]]]
        if all(other is not None and (other == array).all() for other in others):
            continue
        if adapter.own_copy(name):
            found.add(name)
        elif any(
            (adapter.replaced[n] != array).any()
            for n in shared[tensors[name]]
            if n in adapter.replaced and not adapter.own_copy(n)
        ):
            raise InputError(
                f"adapter {adapter.path}: {', '.join(shared[tensors[name]])} are one tensor in the model, and the "
                "adapter saves two different ones; untie them in the base model (tie_word_embeddings) and compile that"
            )
    if not adapter.config.get("ensure_weight_tying"):
        found |= {name for name in updated if len(shared[tensors[name]]) > 1}
    return found


def _untied(model: nn.Module, params: dict[Tensor, Stored], names: set[str]) -> nn.Module:
    """A copy of the model over the same tensors, but those of `names` are tensors of their own with the same values."""
    same = {id(t): t for t in (*model.parameters(), *model.buffers())}
    copied: nn.Module = copy.deepcopy(model, dict(same))
    for name in sorted(names):
        path, _, last = name.rpartition(".")
        parent, _, module = path.rpartition(".")
        tied = copied.get_parameter(name)
        own = nn.Parameter(stand_in(tied.shape), requires_grad=False)
        params[own] = params.get(tied) or Stored(tied.detach())
        single = copy.deepcopy(copied.get_submodule(path), dict(same))
        setattr(single, last, own)
        setattr(copied.get_submodule(parent), module, single)
    return copied


def _shared(tensors: Mapping[str, Tensor]) -> dict[Tensor, list[str]]:
    names: dict[Tensor, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(tensor, []).append(name)
    return names


def _set(stored: dict[Tensor, Stored], tensor: Tensor, change: Change) -> None:
    """One more change of a tensor, in float32."""
    before = stored.get(tensor) or Stored(tensor.detach())
    wide = before if before.blank.dtype is torch.float32 else before.changed(Tensor.float)
    stored[tensor] = wide.changed(change)


def _change(
    model: nn.Module, tensors: Mapping[str, Tensor], adapter: PeftAdapter, update: Update
) -> tuple[str, _Merge | _Experts]:
    """The parameter that an update changes, and how."""
    a, b = torch.from_numpy(update.a), torch.from_numpy(update.b)
    name = f"{update.module}.weight"
    bare = _bare(adapter, update, tensors)
    if bare is not None:
        rank = adapter.rank(bare)
        experts, left = divmod(update.a.shape[0], rank)
        if left:
            raise InputError(
                f"adapter {adapter.path}: {update.tensor} is {list(update.a.shape)}, which holds no whole number of "
                f"experts of rank {rank}; save the adapter again"
            )
        turned = not getattr(model.get_submodule(update.module), "is_transposed", False)
        change: _Merge | _Experts = _Experts(a, b, adapter.scale(bare, rank), experts, turned)
        name = bare
    elif name not in tensors:
        raise InputError(_missing(adapter, update.tensor, name, tensors))
    else:
        kind = type(model.get_submodule(update.module)).__name__
        norms = None if update.magnitude is None else torch.from_numpy(update.magnitude)
        flipped = update.embedding or kind == "Conv1D"
        scale = adapter.scale(update.module, update.a.shape[0])
        change = _Merge(a, b, scale, norms, flipped)
    weight = tensors[name].shape
    if weight != change.shape(weight):
        _same(adapter, update.tensor, change.shape(weight), name, weight)
    return name, change


def _bare(adapter: PeftAdapter, update: Update, tensors: Mapping[str, Tensor]) -> str | None:
    """The parameter of a module that an update is of, where the configuration names parameters. peft wraps a module
    once for each of those, in the order of the module.
    """
    own = [n for n in tensors if n.rpartition(".")[0] == update.module]
    named = [n for n in own if any(n.endswith(f".{t}") or n == t for t in adapter.parameters)]
    return named[-1 - update.nested] if update.nested < len(named) else None


@dataclass(frozen=True)
class _Merge:
    """W + s B A; with `norms`, each row scaled to its norm. `flipped`: the weight lies as [K,N]."""

    a: Tensor
    b: Tensor
    scale: float
    norms: Tensor | None
    flipped: bool

    def shape(self, weight: torch.Size) -> torch.Size:
        """The size that a weight must have."""
        size = torch.Size([self.b.shape[0], self.a.shape[1]])
        return size[::-1] if self.flipped else size

    def __call__(self, weight: Tensor) -> Tensor:
        if weight.is_meta:
            return torch.empty_like(weight)
        b, a = (self.a.T, self.b.T) if self.flipped else (self.b, self.a)
        sum_ = torch.addmm(weight, b, a, alpha=self.scale)
        if self.norms is None:
            return sum_
        axis = 0 if self.flipped else 1
        found = self.norms.unsqueeze(axis) / torch.linalg.norm(sum_, dim=axis, keepdim=True)
        scaled: Tensor = sum_ * found
        return scaled


@dataclass(frozen=True)
class _Experts:
    """W[e] + s B[e] A[e] of each expert e; `turned`: W is [experts,N,K], and not [experts,K,N]."""

    a: Tensor
    b: Tensor
    scale: float
    experts: int
    turned: bool

    def shape(self, weight: torch.Size) -> torch.Size:
        """The size that a weight must have."""
        last = [self.b.shape[0], self.a.shape[1]]
        if len(weight) == 2:
            return torch.Size(last)
        return torch.Size([self.experts, *(last if self.turned else last[::-1])])

    def __call__(self, weight: Tensor) -> Tensor:
        if weight.is_meta:
            return torch.empty_like(weight)
        if weight.dim() == 2:
            return torch.addmm(weight, self.b, self.a, alpha=self.scale)
        a = self.a.reshape(self.experts, -1, self.a.shape[1])
        b = self.b.reshape(self.b.shape[0], -1, self.experts).permute(2, 0, 1)
        left, right = (b, a) if self.turned else (a.transpose(1, 2), b.transpose(1, 2))
        return torch.baddbmm(weight, left, right, alpha=self.scale)


def _missing(adapter: PeftAdapter, tensor: str, name: str, known: Mapping[str, Tensor]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" (the nearest is {near[0]})" if near else ""
    return f"adapter {adapter.path}: {tensor} is for {name}, which the model does not have{hint}; {adapter.another}"


def _same(
    adapter: PeftAdapter, tensor: str, size: torch.Size, name: str, expected: torch.Size
) -> None:
    if size != expected:
        raise InputError(
            f"adapter {adapter.path}: {tensor} is for a weight {list(size)}, and the model's {name} is "
            f"{list(expected)}; {adapter.another}"
        )
