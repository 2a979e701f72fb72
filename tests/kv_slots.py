"""The slots of a layer, as `compress` finds them: kept ones, empty ones, recent ones, what is left of others."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from accel.ir.axis import Axis
from accel.ir.ops.attention import Form
from accel.ir.tables import Observed, Rows, Tables
from accel.ir.ties import FirstOfTies
from accel.passes.kv.chooser import chooser
from accel.passes.kv.compress import Compress
from accel.passes.kv.inputs import every_input
from accel.passes.kv.inputs.attends import attention_over
from accel.passes.kv.keep.drop import Drop
from accel.passes.trained import Trained
from accel.runtime.kv.budget.uniform import Uniform

B, G, R, D, P, C, W, E, SCALE = 3, 2, 2, 6, 9, 16, 4, 5, 0.4
FORM = Form("causal", scale=SCALE)
WHOLE = ("output", "layer", "back_halves_cos", "back_halves_sin")  # of a layer, not of rows
AXES = {
    "score": Axis("kv.score", "accel.passes.kv.score"),
    "refine": Axis("kv.refine", "accel.passes.kv.refine"),
    "keep": Axis("kv.keep", "accel.passes.kv.keep"),
    "budget": Axis("kv.budget", "accel.runtime.kv.budget"),
    "when": Axis("kv.when", "accel.runtime.kv.when"),
}


def build(axis: str, name: str, **options: Any) -> Any:
    """A method with options that fit a few slots."""
    small = AXES[axis].small(name)
    if "compression_ratio" in options:
        small.pop("tokens_kept", None)
    return AXES[axis].build(name, **{**small, **options})


def slots(
    seed: int, base: tuple[int, ...] = (20, 5, 0), recent: tuple[int, ...] = (11, 3, 14)
) -> dict[str, Tensor]:
    """What a layer's `chooser` is given: rows whose tokens before `base` were compressed, each head its
    own, and that have seen so many since. Some slots hold what was forgotten, or padding.
    """
    r = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=r)

    seen = torch.tensor(base) + torch.tensor(recent)
    kept_pos = torch.full((B, G, P), -1)
    for row, n in enumerate(base):
        for head in range(G):
            count = min(n, P - 2 * head - row)
            kept_pos[row, head, :count] = torch.randperm(n, generator=r)[:count].sort().values
    recent_pos = torch.tensor(base)[:, None] + torch.arange(C)
    recent_pos[1, -2:] = -1
    last = seen[:, None] - W + torch.arange(W)
    angles = torch.arange(64)[:, None] * torch.tensor([1.0, 0.3, 0.1])
    return {
        "seen": seen,
        "recent_pos": recent_pos,
        "recent_k": randn(B, G, C, D),
        "recent_v": randn(B, G, C, D),
        "kept_k": randn(B, G, P, D),
        "kept_v": randn(B, G, P, D),
        "kept_pos": kept_pos,
        "kept_mass": randn(B, G, P).abs(),
        "kept_mass.recent": randn(B, G, C).abs(),
        "kept_decode_mass": randn(B, G, P).abs(),
        "kept_decode_mass.recent": randn(B, G, C).abs(),
        "kept_entropy": randn(B, G, P).abs(),
        "kept_entropy.recent": randn(B, G, C).abs(),
        "kept_notes": -randn(B, G, P).abs(),
        "kept_notes.recent": -randn(B, G, C).abs(),
        "queries": randn(B, W, G * R, D),
        "query_positions": last.clamp(min=-1),
        "output": randn(E, G * R * D),
        "layer": torch.tensor(1),
        "query_mean": randn(B, G * R, D),
        "query_covariance": (wide := randn(B, G * R, D, D)) @ wide.transpose(2, 3) / D,
        "mean_rotation": torch.linalg.qr(randn(B, D, D)).Q,
        "back_halves_cos": angles.cos(),
        "back_halves_sin": -angles.sin(),
        "prompt": seen.clone(),  # all of it
        "units": torch.full((B, 40), -1),
        "question": torch.full((B,), -1),
    }


def constants(*methods: Any, seed: int = 0) -> dict[str, Tensor]:
    """What methods with a table measure on a layer of random numbers, by name."""
    r, found = torch.Generator().manual_seed(seed), {}
    for method in methods:
        if isinstance(method, Tables):
            q, k, v = (torch.randn(2, n, C, D, generator=r) + 0.2 for n in (G * R, G, G))
            tokens = torch.randint(3, 9, (2, C + 1), generator=r)
            rows = Rows(tokens, torch.ones(2, C), {0: Observed(q, k, v, FORM)})
            found |= method.measure([rows])[0]
    return found


def absorbing(keep: Any, seed: int = 0, inner: int = 4) -> dict[str, Tensor]:
    """What a keep that absorbs reads beside the slots: its state of a layer that evicted nothing yet, and trained
    tensors of random numbers.
    """
    sizes = keep.absorbed(D, D)
    found = {f"kept_absorbed.{n}": torch.zeros(B, G, *size) for n, size in sizes.items()}
    if isinstance(keep, Trained):
        shape, r = {"heads": G * R, "groups": G, "width": D}, torch.Generator().manual_seed(seed)
        found |= {f"table.{n}": t for n, t in keep.start(shape, inner, r).items()}
    return found


def turns(width: int, most: int = 64) -> dict[str, Tensor]:
    """Tables of rotations by 1 - `most` to `most` - 1 positions."""
    angles = torch.arange(1 - most, most)[:, None] * 100.0 ** -torch.linspace(0, 1, width // 2)
    return {"turn.cos": angles.cos(), "turn.sin": angles.sin()}


def named(x: dict[str, Tensor], kept: int = 7, form: Form = FORM) -> dict[str, Any]:
    """All parameters that a score may name, where a layer's heads keep `kept` tokens."""
    groups = x["kept_k"].shape[1]
    where = torch.cat((x["kept_pos"], x["recent_pos"][:, None].expand(-1, groups, -1)), dim=2)
    where = where.masked_fill(where >= x["seen"][:, None, None], -1)
    keys = torch.cat((x["kept_k"], x["recent_k"]), dim=2)
    found = {
        **attention_over(form, x, keys, where),
        "keys": keys,
        "values": torch.cat((x["kept_v"], x["recent_v"]), dim=2),
        "positions": where,
        "seen": x["seen"],
        "keep": torch.full_like(x["seen"], kept),
    }
    for one in every_input():
        found |= one.read(x)
    for name in (name.removesuffix(".recent") for name in x if name.endswith(".recent")):
        found[name.removeprefix("kept_")] = torch.cat((x[name], x[f"{name}.recent"]), dim=2)
    return found


def taken(x: dict[str, Tensor], rows: Any) -> dict[str, Tensor]:
    """The same of other rows."""
    return {name: value if name in WHOLE else value[rows] for name, value in x.items()}


def choose(
    x: dict[str, Tensor],
    kept: Any,
    score: Any,
    budget: Any = None,
    keep: Any = None,
    most: int = 0,
    form: Form = FORM,
    refine: Any = None,
) -> dict[str, Tensor]:
    """What `compress` keeps where a layer's heads keep `kept` tokens (or so many per row) on average."""
    step = Compress(score, budget or Uniform(), keep or Drop(), refine)
    tables = constants(score, step.budget, step.keep)
    given = {f"table.{n}": t for n, t in tables.items()} | x
    if step.keep.absorbs:
        given = absorbing(step.keep) | given
    if step.keep.moves:
        given = {**turns(x["kept_k"].shape[3]), **given}
    rows = x["seen"].shape[0]
    given["keep"] = torch.as_tensor(kept).expand(rows)
    slots = x["kept_pos"].shape[2] + x["recent_pos"].shape[1]
    given["ranks"] = torch.arange(min(most or slots, slots))
    with FirstOfTies():
        return chooser(step, list(given), form)(*given.values())


def sets(found: dict[str, Tensor]) -> list[list[set[int]]]:
    """Positions that each row and head keeps."""
    return [[set(h[h >= 0].tolist()) for h in row] for row in found["pos"]]


def real(x: dict[str, Tensor]) -> list[list[set[int]]]:
    """Positions that each row and head has."""
    groups = x["kept_pos"].shape[1]
    where = torch.cat((x["kept_pos"], x["recent_pos"][:, None].expand(-1, groups, -1)), dim=2)
    where = where.masked_fill(where >= x["seen"][:, None, None], -1)
    return sets({"pos": where})


def parameters(method: Any) -> list[str]:
    """What a method asks for."""
    return list(inspect.signature(method).parameters)
