"""The model that is explained: captured whole where it is small, else a sketch of few heads and few layers.

A sketch has the architecture's own pattern of layers and size of heads, so that a recipe does to it what it
does to the model; what is counted of it (heads, layers, weights) is counted again for the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accel.compiler.load.config import check_type
from accel.compiler.load.hub import model_folder
from accel.compiler.load.source import open_source
from accel.compiler.smoke import clone, source
from accel.compiler.smoke.tiny_models import randomise
from accel.ir.capture.capture import capture, capture_inspected
from accel.ir.capture.inspect import inspect
from accel.ir.facts import Facts
from accel.ir.program import Program
from accel.ir.weights import Stored

WHOLE = 60_000_000  # parameters up to which a model is captured as it is
DEEP = 8  # layers of a sketch, where its pattern is no longer than that
Check = Callable[
    [Facts], None
]  # raises where a recipe cannot take a model of which so much is known


@dataclass(frozen=True)
class Sizes:
    """What a model has of which only a sketch was captured.

    layers, period: how many, and after how many they repeat. heads, kv: KV heads of the sketch, and the
    model's for each of them. inner, outer: parameters of the layers, and of the head. active: the part of
    the layers' that a token reads, below 1 for a mixture of experts.
    """

    layers: int
    period: int
    heads: int
    kv: Fraction
    inner: int
    outer: int
    active: float


@dataclass
class Subject:
    """A captured program; where it is a sketch, the sizes of the model that it stands for. base: the program
    after the passes that every model goes through, once it was made.
    """

    program: Program
    sizes: Sizes | None = None
    notes: list[str] = field(default_factory=list)
    base: Program | None = None


def subject(model: Any, max_context: int, check: Check, trust_remote_code: bool = False) -> Subject:
    """Read and capture what is to be explained.

    Args:
        model: a directory with a config.json, a config.json, a GGUF file, a cached repository ("org/name"), a
            transformers model type (in its default size), `package.module:callable` of a callable that returns a
            module, or an `nn.Module`.
        check: asked before capture.

    Raises:
        AccelError: there is no such model, it cannot be captured, or what `check` raises.
    """
    if isinstance(model, nn.Module) or ":" in str(model):
        module = model if isinstance(model, nn.Module) else source.small_model(str(model)).model
        return _whole(module, max_context, check)
    path = model_folder(model) if "/" in str(model) else Path(model)
    found = open_source(path)
    config = found.config(trust_remote_code) if path.exists() else _usual(str(model))
    with torch.device("meta"):
        empty = source.of_config(config, trust_remote_code)
    if sum(p.numel() for p in empty.parameters()) > WHOLE:
        sketch = _sketch(config, empty, max_context, check, trust_remote_code)
        if path.exists() and found.quantised:
            sketch.notes.append("its weights are quantised, and are counted as float32 here")
        return sketch
    if found.has_weights:
        loaded = found.load(trust_remote_code)
        subject = _whole(loaded.model, max_context, check, loaded.stored)
        subject.program.facts.notes += loaded.notes
        return subject
    made = randomise(source.of_config(config, trust_remote_code), str(config.model_type))
    note = "there are no weights beside the configuration: random weights are used"
    return Subject(_whole(made.eval(), max_context, check).program, notes=[note])


def _whole(
    module: nn.Module, max_context: int, check: Check, stored: dict[Tensor, Stored] | None = None
) -> Subject:
    traits = inspect(module, max_context)
    check(traits.facts())
    return Subject(capture_inspected(module, traits, stored))


def _usual(name: str) -> Any:
    """The default configuration of a model type. Raises CaptureError with what is near."""
    from transformers import CONFIG_MAPPING

    if name.endswith((".json", ".gguf")):
        source.small_model(name)  # which says that it does not exist
    check_type(name, "model type")
    return CONFIG_MAPPING[name]()


def _sketch(
    config: Any, empty: nn.Module, max_context: int, check: Check, trust_remote_code: bool
) -> Subject:
    """The first layers, as many heads as show their proportions, few words; weights are random."""
    traits = inspect(empty, max_context)
    check(traits.facts())
    text = config.get_text_config()
    total, period = clone._total(config), clone.depth(config)[0]
    count = min(total, max(period, DEEP))
    head = max(clone.HEAD, _head_size(text))
    try:
        small = clone.shrunk(config, count, clone.KINDS, head)
        module = randomise(source.of_config(small, trust_remote_code), str(config.model_type))
        note = f"estimated from {count} of its {total} layers with fewer heads"
    except (
        Exception
    ):  # sizes that do not fit together fail in many ways: as the clone of `smoke` then
        found = clone.clone(config, lambda c: source.of_config(c, trust_remote_code))
        module, small = found.model, found.model.config
        note = "estimated from a small clone, whose heads are smaller too: figures are rough"
    limit = min(max_context, traits.own_limit or max_context)
    program = capture(module.eval(), max_context=limit)
    program.facts.name = traits.name
    sizes = _sizes(
        empty, text, (small.get_text_config() if hasattr(small, "get_text_config") else small)
    )
    return Subject(program, Sizes(total, period, **sizes), [note])


def _head_size(config: Any) -> int:
    own = getattr(config, "head_dim", None)
    heads = getattr(config, "num_attention_heads", None)
    if isinstance(own, int) and own > 0:
        return own
    return config.hidden_size // heads if heads and hasattr(config, "hidden_size") else 0


def _sizes(empty: nn.Module, text: Any, small: Any) -> dict[str, Any]:
    """Heads and parameters, from configurations and the model without its weights."""
    heads, full = (
        int(clone.kv_heads(c) or getattr(c, "num_attention_heads", 0) or 1) for c in (small, text)
    )
    tables = {
        id(m.weight): m.weight.numel() for m in empty.modules() if isinstance(m, nn.Embedding)
    }
    head: Any = getattr(empty, "get_output_embeddings", lambda: None)()
    outer = head.weight.numel() if head is not None else max(tables.values(), default=0)
    aside = tables | ({} if head is None else {id(head.weight): outer})
    inner = {n: p.numel() for n, p in empty.named_parameters() if id(p) not in aside}
    experts = sum(c for n, c in inner.items() if "experts" in n and "shared" not in n)
    return {
        "heads": heads,
        "kv": Fraction(full, heads),
        "inner": sum(inner.values()),
        "outer": outer,
        "active": 1 - experts / max(1, sum(inner.values())) * (1 - _chosen(text)),
    }


def _chosen(config: Any) -> float:
    """The share of a layer's experts that a token takes."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    count = next((v for n in names if isinstance(v := getattr(config, n, None), int) and v), 0)
    chosen = getattr(config, "num_experts_per_tok", None)
    return chosen / count if count and isinstance(chosen, int) else 1.0
