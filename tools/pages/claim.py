"""A row of a claim's table, and what its control changes: a bundled part whose numbers are others."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from reference_data import REFERENCE
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

Tables = dict[str, dict[str, Any]]
Alter = Callable[[dict[str, Tensor], random.Random], dict[str, Tensor]]


@dataclass(frozen=True)
class Row:
    """A recipe. altered: an axis whose method gets its bundled part as this function changes it.

    question: whether sessions are told where it begins. units: the tokens of a line that are one unit; "lines", or
    "halves", as long but shifted by half a line. later: tokens between a prompt and its question.
    """

    told: str
    tables: Tables
    altered: tuple[str, Alter] | None = None
    question: bool = False
    units: str = ""
    later: int = 0


def evict(use: str, kept: int, *, more: Tables | None = None, **score: Any) -> Tables:
    """Tables of a score whose heads keep so many tokens, and of other axes."""
    budget = {"use": "uniform", "tokens_kept": kept}
    return {"kv.score": {"use": use, **score}, "kv.budget": budget, **(more or {})}


def dense(use: str, kept: int, **score: Any) -> Tables:
    """The same, with the first two layers whole."""
    budget = {"use": "uniform", "tokens_kept": kept, "dense_layers": 2}
    return evict(use, kept, more={"kv.budget": budget}, **score)


def select(use: str, read: int, **options: Any) -> Tables:
    return {"kv.select": {"use": use, "tokens_read": read, **options}}


def codec(use: str, **options: Any) -> Tables:
    return {"kv.codec": {"use": use, **options}}


def prune(use: str, **options: Any) -> Tables:
    return {"prefill.prune": {"use": use, **options}}


def _by_name(tensors: dict[str, Tensor], part: str) -> tuple[list[str], Tensor]:
    """The names of this part in every layer, and its numbers in a row."""
    names = sorted(
        (n for n in tensors if n.endswith(f".{part}")), key=lambda n: int(n.split(".")[0])
    )
    return names, torch.cat([tensors[n].flatten() for n in names])


def _put(tensors: dict[str, Tensor], names: list[str], numbers: Tensor) -> dict[str, Tensor]:
    parts = numbers.split([tensors[n].numel() for n in names])
    return tensors | {n: x.reshape(tensors[n].shape) for n, x in zip(names, parts, strict=True)}


def other_heads(part: str) -> Alter:
    """What each head has, in another order; where every layer knows the means of all of them, those follow."""

    def alter(tensors: dict[str, Tensor], rng: random.Random) -> dict[str, Tensor]:
        names, numbers = _by_name(tensors, part)
        order = rng.sample(range(len(numbers)), len(numbers))
        found = _put(tensors, names, numbers[order])
        means = torch.stack([found[n].mean() for n in names])
        return found | {f"{n}s": means.clone() for n in names if f"{n}s" in tensors}

    return alter


def other_half(part: str) -> Alter:
    """1 - what each head has."""

    def alter(tensors: dict[str, Tensor], rng: random.Random) -> dict[str, Tensor]:
        names, numbers = _by_name(tensors, part)
        return _put(tensors, names, 1 - numbers)

    return alter


def other_layers(part: str) -> Alter:
    """What each layer has, in another order."""

    def alter(tensors: dict[str, Tensor], rng: random.Random) -> dict[str, Tensor]:
        names, _ = _by_name(tensors, part)
        return tensors | dict(
            zip(names, (tensors[n] for n in rng.sample(names, len(names))), strict=True)
        )

    return alter


def other_numbers(tensors: dict[str, Tensor], rng: random.Random) -> dict[str, Tensor]:
    """The numbers of each row of each tensor in another order: it knows nothing, and they are as large."""
    torch.manual_seed(rng.randrange(1 << 30))
    return {n: x.gather(-1, torch.rand(x.shape).argsort(-1)) for n, x in tensors.items()}


def zeros(tensors: dict[str, Tensor], rng: random.Random) -> dict[str, Tensor]:
    return {n: torch.zeros_like(x) for n, x in tensors.items()}


def altered(name: str, alter: Alter, out: Path) -> Path:
    """The bundled part of a method, changed."""
    with safe_open(REFERENCE / f"{name}.safetensors", "pt") as file:
        tensors, about = {n: file.get_tensor(n) for n in file.keys()}, file.metadata()
    changed = alter(tensors, random.Random(0))
    save_file({n: t.contiguous() for n, t in changed.items()}, out, about)
    return out
