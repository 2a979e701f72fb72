"""A small model of an architecture, with random weights: its layer pattern kept, its sizes shrunk.

Fields of a configuration are read by what their names count: heads, channels of a head, widths
(heads × channels), experts, words, layers. Each kind shrinks by one ratio, so that what was a multiple
of something else still is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from accel.compiler.smoke.tiny_models import randomise, seeded, written_out
from accel.ir.capture.adapter import Adapter
from accel.ir.capture.inspect import inspect
from accel.ir.capture.logits import logits_of
from accel.ir.capture.traits import Kind
from accel.ir.errors import CaptureError
from accel.ir.ties import FirstOfTies

KINDS = ("head", "experts", "vocab", "window")  # of sizes that shrink; widths go with the heads
HEAD, VOCAB, WINDOW, EXPERTS = 16, 256, 8, 4
_KINDS = tuple(  # the first pattern that is found in a field's name says what the field counts
    (kind, re.compile(pattern))
    for kind, pattern in {
        "keep": r"token|max_|_per_tok|kernel|classifier|multiple_of|num_labels|codebook",
        "depth": r"^(n|num)_(hidden_)?(layers?|blocks)$|^(num_)?(de|en)coder_layers$",
        "vocab": r"vocab",
        "chosen": r"^(moe_)?(num_)?top_?k(_experts)?$|^moe_k$",
        "experts": r"^(n|num|moe_num)_(local_|routed_)?experts$|^zero_expert_num$",
        "kv": r"(key_value|kv)_heads$|head_kv$|query_groups?(_num)?$",
        "groups": r"^(mamba_)?n_?groups$",
        "head": r"head_?dim|d_head|dim_head|head_size|channels$|lora_rank|rotary_dim|pre_attn_scalar|d_state",
        "heads": r"heads?$",
        "window": r"sliding_window$|(?<!max_)window_size$|^attention_window$|attention_chunk_size",
        "width": r"hidden|embd|embed|emb_dim|d_model|intermediate|ffn|dff|dim_ff|(d|n)_inner|d_ssm"
        r"|width|feed_forward|rank$|mlp_dim|_dim$",
    }.items()
)
_EVERY = re.compile(r"period|interval|pattern|(?<!rescale_)every|freq|_step$|^first_k")  # layers
_MOST = 250_000_000  # parameters of a model that could not be shrunk


@dataclass(frozen=True)
class Clone:
    """A small model that is built like another, in eval mode, and what should be said of it."""

    model: nn.Module
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Scale:
    """New sizes of one configuration: `a` new heads per old one, `b` new channels per old one."""

    heads: int = 0
    kv: int = 0
    a: Fraction = Fraction(1)
    b: Fraction = Fraction(1)
    layers: int = 2


def clone(config: Any, make: Callable[[Any], nn.Module]) -> Clone:
    """A model of a transformers configuration, as shallow and narrow as its architecture allows.

    `make(config)` builds the module. Where a shrunk kind of size breaks the configuration that kind
    is left in full size, and a note says so.

    Raises:
        CaptureError: no small model can be built of it, whichever sizes are left as they are.
    """
    layers, why = depth(config)
    deeper = min(3 * layers, _total(config))
    ways = [(layers, list(KINDS)), (deeper, list(KINDS))]
    ways += [(layers, [k for k in KINDS if k != left]) for left in KINDS]
    first: Exception | None = None
    for count, kinds in [*ways, (layers, [])]:
        try:
            model = _made(shrunk(config, count, kinds), make)
        except Exception as error:  # a configuration that does not fit together fails in many ways
            first = first or error
            continue
        said = why if count == layers else f"with {layers} it cannot be built"
        notes = [f"{count} layers: {said}"] if count > 2 else []
        full = [k for k in KINDS if k not in kinds]
        notes += [f"full size, because smaller values fail: {', '.join(full)}"] if full else []
        return Clone(model, notes)
    raise CaptureError(
        f"no small model of {type(config).__name__}: {type(first).__name__}: "
        f"{' '.join(str(first).split())}; correct the configuration, or compile the whole model"
    ) from first


def _made(config: Any, make: Callable[[Any], nn.Module]) -> nn.Module:
    """The model of a configuration, tried on a few tokens."""
    with torch.device("meta"):
        count = sum(p.numel() for p in make(config).parameters())
    if count > _MOST:
        raise CaptureError(
            f"it has {count:,} parameters, more than the limit for a small model, {_MOST:,}"
        )
    with seeded():
        model = make(config).float()  # as accel computes; configurations often say bfloat16
    model = written_out(randomise(model, str(config.model_type)))
    tokens = torch.arange(1, 11).reshape(2, 5)
    if not bool(own_logits(model, tokens).isfinite().all()):
        raise CaptureError("its logits are not finite with random weights")
    return model


def own_logits(model: nn.Module, tokens: Tensor, source: Tensor | None = None) -> Tensor:
    """Logits [B,T,V] of tokens [B,T] as a module gives them when nobody helps it; of equal experts it takes the first.

    `source`: what the encoder of a model that has one takes for each row, by default `sources` of it.
    """
    traits = inspect(model, tokens.shape[1])
    with torch.no_grad(), FirstOfTies():
        if traits.kind is Kind.ENCODER_DECODER:
            if source is None:
                source = sources(model, [4] * len(tokens))
            given = {traits.input_name: source, "decoder_input_ids": tokens}
            return logits_of(model(**given, use_cache=False)).float()
        if traits.kind is Kind.DECODER:
            # layers that read the keys of another one find them in a cache only
            return logits_of(model(input_ids=tokens, use_cache=traits.shares_kv)).float()
        positions = torch.arange(tokens.shape[1]).repeat(tokens.shape[0], 1)
        logits: Tensor = Adapter(model, traits)(tokens, positions)
        return logits.float()


def sources(model: nn.Module, lengths: Sequence[int]) -> Tensor:
    """Random inputs of an encoder-decoder's encoder: token ids [B,X], of which the first `lengths` [B]
    count, or features [B, ...].
    """
    traits = inspect(model, max(lengths))
    traits.require()
    facts = traits.encoder
    assert facts is not None  # it has an encoder
    generator = torch.Generator().manual_seed(11)
    if facts.features:
        return torch.randn(len(lengths), *facts.features, generator=generator)
    shape = (len(lengths), max(lengths))
    return torch.randint(3, facts.vocab_size, shape, generator=generator)


def shrunk(config: Any, layers: int, kinds: Any, head: int = HEAD) -> Any:
    """The configuration with `layers` layers, and the sizes of these kinds made small; heads of at most
    `head` channels.
    """
    scale = _scale(config, layers, "head" in kinds, head)
    told = config.to_diff_dict()
    given = {n: v for n, v in told.items() if n not in ("model_type", "transformers_version")}
    vocab = getattr(config, "vocab_size", None)
    for name, value in _fields(config):
        new = _new(config, name, value, scale, kinds)
        if new != value:
            given[name] = new
    if own := given.get("per_layer_config"):
        given["per_layer_config"] = {
            int(n): {k: _new(config, k, v, scale, kinds) for k, v in fields.items()}
            for n, fields in own.items()
            if int(n) < layers
        }
    for name in getattr(type(config), "sub_configs", {}):
        inner = getattr(config, name, None)
        if hasattr(inner, "to_diff_dict"):
            given[name] = shrunk(inner, depth(inner)[0], kinds, head)
    if isinstance(vocab, int) and "vocab" in kinds:
        given |= _tokens(config, min(vocab, VOCAB))
    return type(config)(**given)


def depth(config: Any) -> tuple[int, str]:
    """How many layers show every kind of layer that a configuration has, and which field says so."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    total = _total(config)
    if total <= 2:
        return max(total, 1), "all of them"
    found = (2, "")
    for name, value in _fields(text, properties=True):
        if isinstance(value, list) and value and isinstance(value[0], (str, int)):
            flags = _by_layer(name, value, total)
            if flags is not None:
                need = max(flags.index(kind) for kind in dict.fromkeys(flags)) + 1
                found = max(found, (need, name))
            elif "block_types" in name:
                found = max(found, (min(len(value), total), name))
        elif type(value) is int and 1 < value < total and _EVERY.search(name):
            found = max(found, (value + (name.startswith("first")), name))
    shared = getattr(text, "num_kv_shared_layers", 0) or 0
    layers = found[0] * 2 if shared else found[0]  # those that own keys, then those that share
    return min(layers, total), f"its layer pattern is that long ({found[1]})"


def _by_layer(name: str, value: list[Any], total: int) -> list[Any] | None:
    """What a list says of each layer: a word for each, or the numbers of the layers that are special."""
    if len(value) == total and len(set(map(str, value))) < total:
        return [str(v) for v in value]
    special = all(type(v) is int and 0 <= v < total for v in value)
    if special and re.search(r"layer|indices|_at$", name) and len(set(value)) == len(value):
        return [i in value for i in range(total)]
    return None


def _fields(config: Any, properties: bool = False) -> Iterator[tuple[str, Any]]:
    """The plain fields of a configuration, and what its own class works out of them: properties that all classes have
    are other names of fields, of which transformers writes notes where they are read.
    """
    from transformers import PreTrainedConfig

    names = list(config.to_dict())
    if properties:
        kind = type(config)
        own = (n for n in dir(kind) if isinstance(getattr(kind, n), property))
        names += [n for n in own if getattr(kind, n) is not getattr(PreTrainedConfig, n, None)]
    inner = getattr(type(config), "sub_configs", {})
    for name in dict.fromkeys(names):
        if not name.startswith("_") and name not in inner:
            try:
                yield name, _read(config, name)
            except Exception:  # a property of models that this one is not
                continue


def _read(config: Any, name: str) -> Any:
    """A field; of one that some layers have otherwise, which configurations do not give, what the others have."""
    told = vars(config)
    return (
        told[name]
        if "_heterogeneity_spec" in told and name in told
        else getattr(config, name, None)
    )


def _scale(config: Any, layers: int, narrow: bool, head: int) -> _Scale:
    """Few heads in the proportions of many, of at most `head` channels."""
    heads = _read(config, "num_attention_heads") or _read(config, "num_heads")
    width = _read(config, "hidden_size")
    if not narrow or not isinstance(width, int):
        return _Scale(layers=layers)
    if not isinstance(heads, int) or heads < 1:
        return _Scale(b=Fraction(min(width, 4 * head), width), layers=layers)
    size = _read(config, "head_dim")
    size = size if isinstance(size, int) and size > 0 else max(1, width // heads)
    kv = kv_heads(config) or heads
    per = heads // kv
    few = per if per <= 4 else next((r for r in (4, 3) if per % r == 0), 4)
    new_kv = min(kv, 2 if per > 1 else 4)
    a, b = Fraction(new_kv * few, heads), Fraction(min(size, head), size)
    return _Scale(new_kv * few, new_kv, a, b, layers)


def kv_heads(config: Any) -> int | None:
    """KV heads, where a field of the configuration counts them apart from the query heads."""
    found = [v for n, v in _fields(config) if _kind(n) == "kv" and type(v) is int]
    return found[0] if found and found[0] > 0 else None


def _kind(name: str) -> str | None:
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), None)


def _new(config: Any, name: str, value: Any, scale: _Scale, kinds: Any) -> Any:
    """A field's new value; what counts nothing that shrinks keeps its old one."""
    kind = _kind(name)
    if isinstance(value, dict):
        return _rotary(value, scale.b) if "rope" in name else value
    if isinstance(value, list):
        return _list(config, name, value, scale.layers)
    if type(value) is not int or value <= 0:
        return value
    if kind == "depth":
        return min(value, scale.layers)
    if name == "num_kv_shared_layers":
        return scale.layers // 2
    if kind in ("kv", "heads", "head") and "head" in kinds and scale.heads:
        ratio = scale.b if kind == "head" else scale.a
        return scale.kv if kind == "kv" else max(1, round(value * ratio))
    if kind == "groups" and "head" in kinds:
        return min(value, 2)
    if kind == "width" and "head" in kinds:
        return max(min(value, 4), 4 * round(value * scale.a * scale.b / 4))
    if "experts" in kinds and (kind in ("experts", "chosen") or name in _ROUTING):
        return _routing(config, name, kind, value)
    if kind in ("vocab", "window") and kind in kinds:
        return min(value, VOCAB if kind == "vocab" else WINDOW)
    return min(value, scale.layers - 1) if name.endswith("layer_end_index") else value


_ROUTING = ("num_experts_per_tok", "n_group", "topk_group", "moe_num_experts_per_tok")


def _routing(config: Any, name: str, kind: str | None, value: int) -> int:
    """Experts and how they are chosen: two groups at most, one of them chosen, two experts of it."""
    grouped = (getattr(config, "n_group", 1) or 1) > 1
    if kind == "experts":
        return min(value, 2 * EXPERTS if grouped else EXPERTS)
    return min(value, 1 if name == "topk_group" else 2)


def _list(config: Any, name: str, value: list[Any], layers: int) -> list[Any]:
    """A list by layer keeps the first layers; one of special layers those that are left."""
    if not value:
        return value
    if len(value) == _total(config):
        return value[:layers]
    if isinstance(value[0], list) and len(value[0]) == 2 and isinstance(value[0][0], list):
        pattern, _ = value[0]  # repeated so many times
        return [[pattern, max(1, layers // len(pattern))]]
    if isinstance(value[0], int) and _by_layer(name, value, _total(config)) is not None:
        return [v for v in value if v < layers]
    return value


def _total(config: Any) -> int:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    total = getattr(text, "num_hidden_layers", None)
    return total if isinstance(total, int) and total > 0 else 2


def _rotary(value: dict[str, Any], b: Fraction) -> dict[str, Any]:
    """Rope settings for heads of fewer channels: factors by channel pair, sections of channels."""
    found: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, dict):
            found[key] = _rotary(inner, b)
        elif isinstance(inner, list) and "section" in key:
            part = [max(1, int(n * b)) for n in inner]
            part[0] += int(sum(inner) * b) - sum(part)
            found[key] = part
        elif isinstance(inner, list) and key.endswith("factor"):
            found[key] = inner[: max(1, int(len(inner) * b))]
        else:
            found[key] = inner
    return found


def _tokens(config: Any, vocab: int) -> dict[str, Any]:
    """Special tokens that lie beyond the small vocabulary, moved to its end."""
    found: dict[str, Any] = {}
    for name, value in _fields(config):
        if not name.endswith(("token_id", "token_index")):
            continue
        if isinstance(value, list):
            found[name] = [v if v < vocab else vocab - 1 - i for i, v in enumerate(value)]
        elif isinstance(value, int) and value >= vocab:
            found[name] = vocab - 1 - len(found) % (vocab // 2)
    return found
