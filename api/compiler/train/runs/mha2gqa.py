"""A model with fewer KV heads, made of its weights by what a text activates (Effectively Compress KV Heads for LLM,
arXiv:2406.07056).

Values of t neighbouring heads become one head in the D directions that lose least behind the output projection: W_V is
multiplied by them, and W_O by their inverse. Keys that RoPE turns go in pairs of channels, each of which is one complex
number, and RoPE a factor of it. So each pair of t heads becomes one pair by t complex factors, which commute with RoPE:
W_K is multiplied by them, and W_Q by their inverses. Factors are those that lose least of what queries ask. Nothing is
left to compute at a step, and the model is one with fewer KV heads to whoever loads it.

It is tuned as any model is: by the loss against the one that it was (`distillspec`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from accel.compiler.part_text import Batch
from accel.compiler.train.kind import Kind, Made, Tuning
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.source import Source
from accel.compiler.train.tuned import Tuned
from accel.compiler.train.whole import Whole
from accel.ir.axis import option
from accel.ir.errors import InputError
from accel.ir.ops.attention import operands_of
from accel.ir.ops.op import operand_of
from accel.ir.ops.rope import rope
from accel.ir.program import Program
from accel.ir.region import sizes
from accel.ir.state import Part
from accel.ir.tables import Observed
from accel.passes.kv._shared.tables import appended, attentions, observed

aten = torch.ops.aten
HELD_OUT = 2  # batches that the loss is measured on
_LEAST = 1e-6  # of the largest: a direction of the output projection that counts
_VIEWS = {
    aten.transpose.int, aten.permute.default, aten.reshape.default, aten.view.default, aten.flatten.using_ints,
    aten.contiguous.default, aten.clone.default, aten.unflatten.int,
}  # fmt: skip
Moments = dict[str, Tensor]


@dataclass(frozen=True)
class Mha2gqa(Tuning):
    """heads: so many neighbouring KV heads become one."""

    heads: int = option(2, least=2, most=64)

    key: ClassVar[str] = "mha2gqa"


@dataclass(frozen=True)
class Weights:
    """The names of a layer's parameters, and of their biases (None: it has none). interleaved: as `rope` says."""

    q: str
    k: str
    v: str
    o: str
    biases: Mapping[str, str | None]
    interleaved: bool


class Converted(Kind):
    """Nothing is learnt."""

    folder = True
    tunes = Mha2gqa
    usual: ClassVar[Mapping[str, Any]] = {"samples": 16, "length": 512}

    @classmethod
    def takes(cls, method: type[Any]) -> bool:
        """See Kind."""
        return method is cls.tunes

    @classmethod
    def lacks(cls, options: TrainOptions) -> str | None:
        """See Kind."""
        return (
            None
            if options.out
            else "a model with fewer KV heads is a folder of its own; give out=DIR"
        )

    @classmethod
    def make(cls, method: Any, source: Source, options: TrainOptions) -> Made:
        """See Kind. Measured on `samples` batches; the loss is of others. Raises InputError."""
        program, out = source.program, options.out
        assert out is not None
        tuned = Tuned(program, source.path)
        weights = tuned.start()
        _check_config(source.path)
        layers = layers_of(program, method.heads, source.path)
        options = replace(options, length=min(options.length, program.facts.max_context))
        rows = source.rows(options.length, options.rows, options.seed)
        held, text = list(islice(rows, HELD_OUT)), islice(rows, options.samples)
        moments = measured(program, watched(text, options.samples, source), method.heads)
        for layer, names in layers.items():
            weights |= fewer(names, weights, moments[layer], method.heads)
        left = next(iter(moments.values()))["v"].shape[0]
        told = options.as_text("samples", "length", "rows", "seed")
        told |= {"method": method.key, "heads": str(method.heads)}
        tuned.save(out, weights, told, {"num_key_value_heads": left})
        before, after = (loss(Whole(model), held) for model in (program, source.captured(out)))
        again = f"accel-compile train distillspec {out} --target {source.path} --out DIR"
        return Made(
            out,
            f"KV heads: {left} in place of {left * method.heads}; {before:.4f} nats a token before, {after:.4f} after. "
            f"Tune it: {again}",
        )


def watched(text: Iterator[Batch], count: int, source: Source) -> Iterator[Batch]:
    for number, batch in enumerate(text):
        source.progress(f"{Mha2gqa.key}: batch {number + 1} of {count}", number / count)
        yield batch


@torch.no_grad()
def loss(model: Whole, text: list[Batch]) -> float:
    """Nats a token."""
    total, count = 0.0, 0.0
    for ids, known in text:
        each = F.cross_entropy(model.logits(ids[:, :-1]).mT, ids[:, 1:], reduction="none")
        where = known > 0
        total, count = total + float(each[where].sum()), count + int(where.sum())
    return total / max(1.0, count)


def layers_of(program: Program, heads: int, path: Path) -> dict[int, Weights]:
    """Of each layer. Raises InputError: heads do not divide, or keys are not what RoPE makes of a product alone."""
    sites = attentions(program)
    found: dict[int, Weights] = {}
    counts = {int(sizes(operands_of(node).k)[1]) for node in sites.values()}
    if len(sites) < len(program.facts.layers) or len(counts) != 1:
        raise InputError(
            f"{path}: its layers do not all have a cache of one number of KV heads; use kv.codec = 'mha2gqa-svd' or "
            "'kv-int8' for this model"
        )
    (count,) = counts
    if count % heads:
        ways = [n for n in range(2, count + 1) if count % n == 0]
        give = f"give heads={' or '.join(map(str, ways))}" if ways else "it has no fewer"
        raise InputError(f"{path} has {count} KV heads, and {heads} do not divide them; {give}")
    for layer, node in sites.items():
        x = operands_of(node)
        keys = appended(node)
        if keys.target is not rope.default or x.q.target is not rope.default:
            raise _other(path, layer, "its keys are not turned by RoPE last")
        width = int(sizes(x.k)[3])
        if 2 * int(sizes(operand_of(keys, "cos"))[1]) != width or int(sizes(x.v)[3]) != width:
            raise _other(path, layer, f"RoPE turns some of the {width} channels of a head alone")
        values = operand_of(operand_of(node, Part.VALUES), "new")
        made: dict[str, Any] = {
            "q": _product(x.q.args[0], path, layer),
            "k": _product(keys.args[0], path, layer),
            "v": _product(values, path, layer),
            "o": _behind(node, path, layer),
        }
        names = {role: str(linear.args[1].target) for role, linear in made.items()}
        biases = {role: _bias(linear) for role, linear in made.items()}
        turned = bool(operand_of(keys, "interleaved"))
        found[layer] = Weights(names["q"], names["k"], names["v"], names["o"], biases, turned)
    return found


@torch.no_grad()
def measured(program: Program, text: Iterator[Batch], heads: int) -> dict[int, Moments]:
    """Layer -> `k` [G/t,D/2,t,t] complex, the sum of the outer products of a pair of channels over t heads, keys before
    RoPE; `q` [G/t,D/2,t], of queries to each; `v` [G/t,tD,tD].
    """
    found: dict[int, Moments] = {}
    sites = attentions(program)
    turned = {i: bool(operand_of(appended(n), "interleaved")) for i, n in sites.items()}
    for row in observed(program, text):
        for layer, x in row.layers.items():
            told = found.setdefault(layer, {})
            for name, value in _moments(x, heads, turned[layer]).items():
                told[name] = told[name] + value if name in told else value
    return found


def _moments(x: Observed, heads: int, interleaved: bool) -> Moments:
    groups = x.keys.shape[1]

    def of_groups(by_head: Tensor) -> Tensor:
        """[B,H,T,D] -> [G/t,t,N,D]: the query heads of a KV head lie in N, too."""
        grouped: Tensor = by_head.unflatten(1, (groups // heads, heads, -1))
        return grouped.permute(1, 2, 0, 3, 4, 5).flatten(2, 4).double()

    keys = complex_of(of_groups(x.unrotated), interleaved)
    queries = complex_of(of_groups(x.unrotated_queries), interleaved)
    values = of_groups(x.values).transpose(1, 2).flatten(2)  # [G/t,N,t D]
    return {
        "k": torch.einsum("gind,gjnd->gdij", keys, keys.conj()),
        "q": queries.abs().square().sum(2).transpose(1, 2),
        "v": values.mT @ values,
    }


def fewer(
    names: Weights, weights: Mapping[str, Tensor], moments: Moments, heads: int
) -> dict[str, Tensor]:
    """A layer's parameters with t = `heads` KV heads in one."""
    groups, width = moments["v"].shape[0], moments["v"].shape[1] // heads
    found: dict[str, Tensor] = {}

    def taken(role: str) -> Tensor:
        """[G/t,t,n,D,E], and a column more where there is a bias."""
        rows, bias = weights[getattr(names, role)].double(), names.biases[role]
        if bias is not None:
            rows = torch.cat((rows, weights[bias].double()[:, None]), 1)
        grouped: Tensor = rows.unflatten(0, (groups, heads, -1, width))
        return grouped

    def put(role: str, rows: Tensor) -> None:
        flat, bias = rows.flatten(0, -2).float(), names.biases[role]
        if bias is not None:
            flat, found[bias] = flat[:, :-1], flat[:, -1].contiguous()
        found[getattr(names, role)] = flat.contiguous()

    into, back = factors(moments["k"], moments["q"])
    keys = complex_of(taken("k").transpose(-1, -2), names.interleaved)  # [G/t,t,1,E,D/2]
    put("k", real_of((keys * into[:, :, None, None]).sum(1), names.interleaved).mT)
    queries = complex_of(taken("q").transpose(-1, -2), names.interleaved)
    put("q", real_of(queries * back[:, :, None, None].conj(), names.interleaved).mT)
    out = weights[names.o].double()  # [E,H D]
    parts = out.unflatten(1, (groups, heads, -1, width))  # [E,G/t,t,n,D]
    into_values, from_values = directions(
        moments["v"], torch.einsum("egind,eginf->gidf", parts, parts)
    )
    put("v", torch.einsum("gifd,gindx->gnfx", into_values, taken("v")))
    found[names.o] = torch.einsum("eginf,gifd->egind", parts, from_values).flatten(1).float()
    return found


def factors(keys: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
    """What t heads' pairs of channels are multiplied by and summed [G/t,t,D/2], and what gives each back: the least of
    error · weight of the queries that ask for it.
    """
    weight = queries.sqrt()
    weight = weight / weight.amax(-1, keepdim=True).clamp(min=1e-30)
    weight = weight.clamp(min=1e-3)  # [G/t,D/2,t]
    best = torch.linalg.eigh(keys * weight[..., None] * weight[..., None, :]).eigenvectors[..., -1]
    return (best.conj() * weight).transpose(1, 2), (best / weight).transpose(1, 2)


def directions(values: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
    """The maps [G/t,t,D,D] of t heads' values, which are added up, and of what comes of it back to each head: the least
    error behind the output projection, whose outer products are [G/t,t,D,D].
    """
    heads, width = output.shape[1], output.shape[2]
    size, axes = torch.linalg.eigh(output)
    size = size.clamp(min=_LEAST * float(size.max())).sqrt()[..., None, :]
    root, inverse = (axes * size) @ axes.mT, (axes / size) @ axes.mT
    joined = values.unflatten(2, (heads, width)).unflatten(1, (heads, width))  # [g,i,d,j,e]
    seen = torch.einsum("gifd,gidje,gjeh->gifjh", root, joined, root).flatten(3, 4).flatten(1, 2)
    best = (
        torch.linalg.eigh(seen).eigenvectors[..., -width:].unflatten(1, (heads, width))
    )  # [g,i,d,D]
    return best.mT @ root, inverse @ best


def complex_of(x: Tensor, interleaved: bool) -> Tensor:
    """Channels [..,D] that RoPE turns in pairs -> [..,D/2]."""
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    return torch.complex(a.contiguous(), b.contiguous())


def real_of(x: Tensor, interleaved: bool) -> Tensor:
    """The inverse of `complex_of`."""
    if interleaved:
        return torch.stack((x.real, x.imag), -1).flatten(-2)
    return torch.cat((x.real, x.imag), -1)


def _check_config(path: Path) -> None:
    """Raise InputError where a configuration does not say its KV heads."""
    stated = json.loads((path / "config.json").read_text(encoding="utf-8"))
    if "num_key_value_heads" not in stated:
        raise InputError(
            f"{path}/config.json names no num_key_value_heads, so its class knows of no other number; use "
            "kv.codec = 'mha2gqa-svd' for this model"
        )


def _other(path: Path, layer: int, why: str) -> InputError:
    return InputError(
        f"{path}, layer {layer}: {why}; use kv.codec = 'mha2gqa-svd' or 'kv-int8' for this model"
    )


def _bias(linear: fx.Node) -> str | None:
    """Its name, where there is one."""
    bias = operand_of(linear, "bias")
    return None if bias is None else str(bias.target)


def _product(node: Any, path: Path, layer: int) -> fx.Node:
    """The linear layer that a node is a view of."""
    while isinstance(node, fx.Node) and node.target in _VIEWS:
        node = node.args[0]
    if isinstance(node, fx.Node) and node.target is aten.linear.default:
        return node
    raise _other(
        path,
        layer,
        "something stands between a product and RoPE or the cache (a norm, a merged product)",
    )


def _behind(node: fx.Node, path: Path, layer: int) -> fx.Node:
    """The linear layer that reads an attention."""
    while True:
        users = list(node.users)
        if len(users) == 1 and users[0].target in _VIEWS:
            (node,) = users
        elif len(users) == 1 and users[0].target is aten.linear.default:
            return users[0]
        else:
            raise _other(
                path, layer, "something stands between attention and its output projection"
            )
