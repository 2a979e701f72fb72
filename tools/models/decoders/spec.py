"""What a small random decoder is made of: `Spec`, the `CHOICES` of each part, and how one is drawn."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, fields, replace
from typing import Any


@dataclass(frozen=True)
class Spec:
    """The parts of one decoder. Every field but `case` has its choices in CHOICES."""

    case: int = 0  # seeds the weights and the tokens
    layers: int = 1
    heads: int = 4
    repeat: int = 1  # query heads per KV head
    head_dim: int = 6
    value_dim: int = 0  # 0: as head_dim
    hidden: int = 20
    vocab: int = 37
    norm: str = "layer"
    place: str = "pre"
    residual: str = "plain"
    mlp: str = "gelu"
    positions: str = "none"
    source: str = "arange"
    longest: int = 200  # of tables that the module keeps
    mask: str = "causal"
    fill: str = "inf"
    attention: str = "sdpa"
    scale: str = "root"
    qkv: str = "separate"
    layout: str = "batch"
    qk_norm: str = "none"
    softcap: float = 0.0
    sinks: str = "none"
    gated: bool = False
    bias: bool = False
    tied: bool = False
    embedding: str = "plain"
    head: str = "plain"
    returns: str = "tensor"


CHOICES: dict[str, tuple[Any, ...]] = {
    "layers": (1, 1, 1, 2),
    "heads": (1, 2, 3, 4, 6, 6),
    "repeat": (1, 2, 2, 3, 6),
    "head_dim": (4, 6, 8, 10),
    "value_dim": (0, 0, 0, 5, 12),
    "hidden": (12, 20, 24, 30),
    "vocab": (19, 37, 41),
    "norm": ("layer", "layer", "layer_plain", "rms", "rms_own", "rms_plus_one", "rms_flat", "none"),
    "place": ("pre", "pre", "post", "sandwich", "parallel", "parallel_two"),
    "residual": ("plain", "plain", "constant", "vector", "learned"),
    "mlp": (
        "relu", "gelu", "gelu_tanh", "gelu_own", "quick_gelu", "relu_squared", "swiglu", "geglu",
        "fused", "moe_all", "moe_topk", "moe_loop", "none",
    ),
    "positions": (
        "none", "learned", "sinusoid", "sinusoid_table", "rope_half", "rope_pairs", "rope_stack",
        "rope_part", "rope_complex", "rope_table", "alibi", "alibi_keys", "t5", "clipped",
    ),
    "source": ("arange", "arange", "given", "cumsum", "buffer"),
    "longest": (48, 64, 200),
    "mask": ("causal", "causal", "window", "chunk", "strided", "first_keys", "mixed"),
    "fill": ("inf", "least", "finite", "where", "add_inf", "add_finite", "table", "product", "given"),
    "attention": (
        "sdpa", "sdpa_grouped", "sdpa_grouped", "matmul", "matmul_grouped", "matmul_grouped", "bmm",
        "baddbmm", "einsum", "einsum_late", "einsum_grouped", "einsum_grouped", "flex", "flex_score",
        "one_by_one", "module", "layer",
    ),
    "scale": ("root", "root", "queries", "constant", "stored"),
    "qkv": ("separate", "separate", "split", "split", "chunk", "unbind", "per_head"),
    "layout": ("batch", "batch", "time"),
    "qk_norm": ("none", "none", "rms", "layer", "unit"),
    "softcap": (0.0, 0.0, 0.0, 4.0),
    "sinks": ("none", "none", "none", "none", "column", "plus_one"),
    "gated": (False, False, True),
    "bias": (False, True),
    "tied": (False, True),
    "embedding": ("plain", "scaled", "normed"),
    "head": ("plain", "plain", "norm", "cap", "scaled"),
    "returns": ("tensor", "tensor", "tuple", "dict", "object"),
}  # fmt: skip


def settle(spec: Spec) -> Spec:
    """The nearest spec whose parts go together."""
    change: dict[str, Any] = {}
    if spec.heads % spec.repeat:
        change["repeat"] = 1
    if spec.attention in ("module", "layer"):  # PyTorch's own, with the projections inside
        change |= {
            "repeat": 1, "value_dim": 0, "qk_norm": "none", "softcap": 0.0, "sinks": "none",
            "hidden": spec.heads * spec.head_dim, "gated": False, "qkv": "separate",
        }  # fmt: skip
        if spec.positions.startswith(("rope", "alibi", "t5", "clipped")):
            change["positions"] = "learned"
    if spec.attention == "layer":
        change |= {"mlp": "gelu", "residual": "plain", "norm": "layer"}
        change["place"] = "post" if spec.place == "post" else "pre"
    if spec.attention.startswith("sdpa"):
        change |= {"softcap": 0.0, "sinks": "none"}
    if spec.attention == "flex":
        change["sinks"] = "none"
    if spec.qkv == "per_head" and not spec.value_dim == change.get("value_dim", 0) == 0:
        change["value_dim"] = 0
    if spec.qkv in ("unbind", "per_head", "chunk"):
        change |= {"repeat": 1, "value_dim": 0}
    if change.get("repeat", spec.repeat) == 1 and spec.attention.endswith("_grouped"):
        change["attention"] = spec.attention.removesuffix("_grouped")
    if spec.mask == "mixed" and spec.layers == 1:
        change["layers"] = 2
    if spec.norm == "none":
        change["place"] = "pre"
        change.setdefault("residual", "learned")
    return replace(spec, **change)


def random_spec(case: int, seed: int) -> Spec:
    """The spec number `case` of a seed, whatever was drawn before it."""
    rng = random.Random(f"{seed}.{case}")
    return settle(Spec(case, **{name: rng.choice(values) for name, values in CHOICES.items()}))


def differences(spec: Spec) -> dict[str, Any]:
    """The fields that differ from the plainest decoder: what a failing case is printed as."""
    plain = asdict(Spec())
    return {f.name: v for f in fields(spec) if (v := getattr(spec, f.name)) != plain[f.name]}
