"""Trained parts (small modules beside a frozen model) and tables, in a safetensors file that a recipe names.

`accel-compile train METHOD MODEL` makes such a file, and keeps it where builds find it (`ir/trained.py`).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor, fx

from accel.ir.entries.step import LOGITS
from accel.ir.errors import PassError
from accel.ir.ops.attention import Form
from accel.ir.parts import part
from accel.ir.program import Program
from accel.ir.region import Entry, sizes
from accel.ir.tables import Example, Rows, Sizes, Tables
from accel.ir.trained import Likeness, digest, located, opened

Parts = dict[int, dict[str, Tensor]]  # layer, or ALL -> name -> tensor
ALL = -1  # of what all layers share
INNER = -2  # in sizes: any, but one for all tensors of a layer's target
_SAMPLES = 64  # numbers of a weight that tell one model from another
_NEAR = 0.3  # of the numbers' norm
_LINEAR = torch.ops.aten.linear.default


@dataclass(frozen=True)
class Lesson:
    """What one layer computes of a text and its repeat, 2T tokens, for a method that learns what to note (`aim`).

    hidden: [B,2T,E], that keys are made of. queries: [B,H,2T,D], keys, values: [B,G,2T,D], after RoPE. output: [H,D,E],
    the output projection. form: what makes attention of them.
    """

    hidden: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor
    output: Tensor
    form: Form


@dataclass(frozen=True)
class Trained(ABC):
    """A method with trained tensors. `trained`: their file; empty: the one that is kept for the model.

    `accel-compile train` trains what the method `start`s with: a score with `soften` and `excess` softly in the model,
    one with `aim` by what its `note` of each token of a text shall be ([B,T,G], out of a `Lesson`).
    """

    trained: str = ""
    key: ClassVar[str]  # the method's name
    more: ClassVar[str] = ""  # what names of tensors of a layer begin with that `sizes` lacks

    @abstractmethod
    def sizes(self, width: int, heads: int) -> dict[str, tuple[int, ...]]:
        """Name -> size of what a layer has, whose input is `width` wide, over so many KV heads."""

    def shared(self, width: int) -> dict[str, tuple[int, ...]]:
        """Name -> size of what all layers share; `width`: of the hidden state behind the first layer's keys."""
        return {}

    def tensors(self, program: Program, keys: Mapping[int, fx.Node]) -> Parts:
        """What was trained for this model. `keys`: what each layer appends to its cache of keys.

        Raises PassError: there is none, it is damaged, or it is another method's or model's.
        """
        widths = {layer: int(sizes(source(node))[-1]) for layer, node in keys.items()}
        want: dict[int, Sizes] = {
            layer: self.sizes(widths[layer], int(sizes(node)[1])) for layer, node in keys.items()
        }
        if common := self.shared(widths[min(widths)]):
            want[ALL] = common
        return read(self, program.facts.name, sample(program, keys), want)


@dataclass(frozen=True)
class Fitted(Trained):
    """A part that foretells what attention does, or changes it. It learns from rows of a text that the model reads as
    it is (`ir/tables.py`), so no gradient goes through the model. `inside`: it learns in the model, by `Rows.last`;
    then rows have no layers.
    """

    inside: ClassVar[bool] = False

    @abstractmethod
    def start(self, rows: Rows, inner: int, generator: torch.Generator) -> Parts:
        """Tensors that have learnt nothing, for a model that reads such rows. inner: the width of hidden layers."""

    @abstractmethod
    def loss(self, parts: Parts, rows: Rows, progress: float) -> Tensor:
        """How wrong the parts are about rows []. progress: the share of the training that is over, from 0 to 1."""

    def examples(self, seed: int) -> Iterator[Example] | None:
        """What it learns from, for ever, where nobody gives a text; None: a text, too."""
        return None


def constants(method: Tables, program: Program, keys: Mapping[int, fx.Node]) -> Parts:
    """What was measured of this model. `keys`: what each layer appends to its cache of keys.

    Raises PassError: there is none, it is damaged, or it is another method's or model's.
    """
    want = {
        layer: method.sizes(int(sizes(node)[3]), int(sizes(node)[1]))
        for layer, node in keys.items()
    }
    return read(method, program.facts.name, measured_for(method, program, keys), want)


def measured_for(method: Tables, program: Program, keys: Mapping[int, fx.Node]) -> str:
    """What tells the model of a table from others, as `sample`; and the model beside it, where the method has one."""
    own = sample(program, keys)
    if program.second_model is None or not getattr(method, "second_model_folder", ""):
        return own
    weight = next(n.args[1] for n in program.second_model.nodes(_LINEAR))
    assert isinstance(weight, fx.Node)
    return json.dumps(
        json.loads(own) + json.loads(some_of(program.second_model.params[str(weight.target)]))
    )


def read(method: Any, model: str, numbers: str, want: Mapping[int, Sizes]) -> Parts:
    """The tensors of a method's file, checked. `model`, `numbers`: its name, and some of its weights; `want`: sizes,
    below 0: any, `INNER` one and the same. Raises PassError, as `Trained.tensors`.
    """
    key, one = method.key, part(method.key, isinstance(method, Tables))
    named = ("table", method.table) if isinstance(method, Tables) else ("trained", method.trained)
    file = located(one, named, model, numbers, options_of(method), like_weights, PassError)
    arrays, _ = opened(one, file, PassError)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    more = getattr(method, "more", "")
    parts: Parts = {}
    for layer, shapes in want.items():
        parts[layer] = {name: tensors.get(_named(layer, name), torch.empty(0)) for name in shapes}
        for name, size in shapes.items():
            has = tuple(parts[layer][name].shape)
            if len(has) != len(size) or any(
                w >= 0 and w != h for h, w in zip(has, size, strict=True)
            ):
                raise PassError(
                    f"{key}: {file} has {_named(layer, name)} of size {list(has)}, this model needs "
                    f"{[max(w, -1) for w in size]} (-1: any); {one.verb[0]} it again for this model"
                )
        for target, widths in _inner(parts[layer], shapes).items():
            if len(set(widths.values())) > 1:
                raise PassError(
                    f"{key}: {file} has {_named(layer, target)} with {', '.join(widths)} of the widths "
                    f"{list(widths.values())}, which have to be one; {one.verb[0]} it again for this model"
                )
        start = _named(layer, more)
        if more:
            found = {n: t for n, t in tensors.items() if n.startswith(start)}
            parts[layer] |= {n.removeprefix(_named(layer, "")): t for n, t in found.items()}
    return parts


def _inner(tensors: Mapping[str, Tensor], shapes: Sizes) -> dict[str, dict[str, int]]:
    """What tensors have where their size is `INNER`: by target, and name."""
    found: dict[str, dict[str, int]] = {}
    for name, size in shapes.items():
        if INNER in size:
            target, _, last = name.rpartition(".")
            found.setdefault(target, {})[last] = tensors[name].shape[size.index(INNER)]
    return found


def options_of(method: Any) -> dict[str, Any]:
    """A method's options but the file of its part."""
    found = {f.name: getattr(method, f.name) for f in fields(method) if f.init}
    return {n: v for n, v in found.items() if n not in ("table", "trained")}


def write(
    method: Any,
    file: Path,
    parts: Parts,
    model: str,
    settings: Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
) -> None:
    """A file that `tensors` or `constants` reads; whole or not at all. `options`: of the method, by which it was
    made.
    """
    half = isinstance(method, Trained)
    flat = {
        _named(layer, n): (t.detach().half() if half else t.detach()).contiguous()
        for layer, ts in parts.items()
        for n, t in ts.items()
    }
    new = file.with_name(file.name + ".new")
    about = {"method": method.key, "model": model, "told": json.dumps(dict(settings))}
    about |= {"options": json.dumps(dict(options or {}))}
    about |= {"digest": digest({n: t.cpu().numpy() for n, t in flat.items()})}
    try:
        save_file(flat, new, about)
        new.chmod(new.stat().st_mode & ~0o022)  # kept ones are read only so
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)


def _named(layer: int, name: str) -> str:
    """What a file calls a tensor."""
    return f"{'all' if layer == ALL else layer}.{name}"


def source(keys: fx.Node) -> fx.Node:
    """The input of the product that makes a layer's keys [B,G,T,D]: its hidden state [B,T,E]. Raises PassError."""
    found = {p.args[0] for p in _products(keys)}
    one = next(iter(found), None)
    if len(found) != 1 or not isinstance(one, fx.Node):
        raise PassError(
            f"{keys.name}: these keys are computed from {len(found)} values, but a trained gate "
            "reads the one hidden state behind them; use another method for this model"
        )
    return one


def last_hidden(entry: Entry) -> fx.Node | None:
    """The last hidden state [B,N,E] of a step, which its output head reads; None where no linear head is found."""
    node = entry.output_nodes()[LOGITS]
    while node.target is not _LINEAR:
        data = [n for n in node.all_input_nodes if n.op == "call_function"]
        if len(data) != 1:
            return None
        node = data[0]
    hidden = node.args[0]
    return hidden if isinstance(hidden, fx.Node) else None


def product(keys: fx.Node) -> fx.Node | None:
    """A product that makes a layer's keys [B,G,T,D] of one hidden state; None where there are more."""
    found = _products(keys)
    return next(iter(found)) if len({p.args[0] for p in found}) == 1 else None


def _products(keys: fx.Node) -> set[fx.Node]:
    """The last products on the paths to keys."""
    found, todo, seen = set(), [keys], set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.target is _LINEAR:
            found.add(node)
            continue
        todo += [n for n in node.all_input_nodes if n.op == "call_function" and _floats(n)]
    return {p for p in found if p.args[0] not in seen}


def sample(program: Program, keys: Mapping[int, fx.Node]) -> str:
    """A few numbers of the weights of the first of these keys, as JSON: which model this is. Of products that a pass
    merged, the keys' part.
    """
    node, start, stop = keys[min(keys)], 0.0, 1.0
    while node.target is not _LINEAR:
        before = next(n for n in node.all_input_nodes if n.op == "call_function" and _floats(n))
        if before.target is torch.ops.aten.split_with_sizes.default:
            cuts, index = before.args[1], node.args[1]
            start, stop = (sum(cuts[:i]) / sum(cuts) for i in (index, index + 1))  # type: ignore
        node = before
    weight = node.args[1]
    while isinstance(weight, fx.Node) and weight.op != "get_attr":
        weight = weight.args[0]
    assert isinstance(weight, fx.Node)
    found = program.params[str(weight.target)].float()
    if "{" in str(weight.target):  # else it was so when it was trained
        found = found[round(start * len(found)) : round(stop * len(found))]
    return some_of(found)


def first_product(program: Program, entry: Entry) -> str:
    """A few numbers of the weight of an entry's first product, as JSON: which model this is, also of one without keys.
    Raises PassError.
    """
    weights = (node.args[1] for node in program.nodes(_LINEAR, entry=entry))
    found = next((w for w in weights if isinstance(w, fx.Node) and w.op == "get_attr"), None)
    if found is None:
        raise PassError(f"{program.facts.name} has no product by which its trained parts are known")
    return some_of(program.params[str(found.target)])


def some_of(weight: Tensor) -> str:
    """A few numbers of a weight, as JSON."""
    flat = weight.float().flatten()
    step = max(1, flat.numel() // _SAMPLES)
    return json.dumps([round(float(x), 6) for x in flat[::step][:_SAMPLES]])


def like_weights(saved: str, current: str) -> Likeness:
    """How two samples are: of one model, or near. Rounding to 8 bits or more keeps them the same; rounding to 3 or 4
    and further training leave them near, at a distance of 0.3 at most (of two models it is some 1.4).
    """
    try:
        a, b = (torch.tensor(json.loads(text), dtype=torch.float32) for text in (saved, current))
    except (ValueError, TypeError):
        return Likeness.OTHER
    if a.shape != b.shape:
        return Likeness.OTHER
    if torch.allclose(a, b, rtol=0.02, atol=float(b.abs().max()) / 100):
        return Likeness.SAME
    return Likeness.NEAR if float((a - b).norm()) < _NEAR * float(b.norm()) else Likeness.OTHER


def _floats(node: fx.Node) -> bool:
    value = node.meta.get("val")
    one = value[0] if isinstance(value, (tuple, list)) and value else value
    return isinstance(one, Tensor) and one.is_floating_point()
