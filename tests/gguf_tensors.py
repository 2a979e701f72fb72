"""What llama.cpp's converter makes of a model's tensors before it gives them the names of a GGUF file."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

PAIRED = (
    "llama", "smollm3", "granite", "granitemoe", "granitehybrid", "minicpm", "mistral3",
)  # fmt: skip
ONE_MORE = ("gemma", "gemma2", "gemma3", "qwen3next", "qwen35", "qwen35moe")


def parts(name: str, value: Tensor, config: Any, arch: str) -> Iterator[tuple[str, Tensor]]:
    """A parameter as the converter hands it to its table of names: (the name of a parameter, its value), or more."""
    module, _, last = name.rpartition(".")
    for ending, change in CHANGES.items():
        if name.endswith(ending):
            yield from change(name, value, config)
            return
    rotated = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    if arch in PAIRED and (heads := rotated.get(module.rpartition(".")[2])):
        value = value.unflatten(0, (getattr(config, heads), 2, -1)).transpose(1, 2).flatten(0, 2)
    if arch in ONE_MORE and name.endswith("norm.weight") and "linear_attn" not in name:
        value = value + 1
    if arch == "gpt2" and ".h." in name and value.ndim == 2:
        value = value.t()
    if arch in ("qwen35", "qwen35moe") and "linear_attn" in name:
        value = _tiled(name, value, config)
    yield (f"{name}.weight" if last in ("sinks", "layer_scalar") else name), value


def _halves(gate: str, up: str) -> Callable[..., Any]:
    def split(name: str, value: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
        layer = name.split(".")[2]
        first, second = value.chunk(2, value.ndim - 2)
        yield f"blk.{layer}.{gate}.weight", first
        yield f"blk.{layer}.{up}.weight", second

    return split


def _gate_up(name: str, value: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    """Experts side by side; gpt-oss's are transposed, with gates and ups in turn."""
    layer = name.split(".")[2]
    turned = config.model_type == "gpt_oss"
    value = value.transpose(1, 2) if turned else value
    halves = (value[:, ::2], value[:, 1::2]) if turned else value.chunk(2, 1)
    if config.model_type == "gemma4_text":
        yield f"blk.{layer}.ffn_gate_up_exps.weight", value
        return
    for part, half in zip(("gate", "up"), halves, strict=True):
        yield f"blk.{layer}.ffn_{part}_exps.weight", half


def _gate_up_bias(name: str, value: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    layer = name.split(".")[2]
    yield f"blk.{layer}.ffn_gate_exps.bias", value[:, ::2]
    yield f"blk.{layer}.ffn_up_exps.bias", value[:, 1::2]


def _down(name: str, value: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    turned = config.model_type == "gpt_oss"
    yield (
        f"blk.{name.split('.')[2]}.ffn_down_exps.weight",
        value.transpose(1, 2) if turned else value,
    )


def _wide(name: str, value: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    layer, heads = name.split(".")[2], config.num_attention_heads
    each = value.unflatten(0, (heads, -1))
    keys, values = each.split([config.qk_nope_head_dim, config.v_head_dim], 1)
    yield f"blk.{layer}.attn_k_b.weight", keys.transpose(1, 2)
    yield f"blk.{layer}.attn_v_b.weight", values


def _qkvz(name: str, value: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    layer, width = name.split(".")[2], config.linear_key_head_dim
    each = config.linear_num_value_heads // config.linear_num_key_heads * width
    found = value.unflatten(0, (config.linear_num_key_heads, -1)).split(
        [width, width, each, each], 1
    )
    q, k, v, z = (part.flatten(0, 1) for part in found)
    yield f"blk.{layer}.attn_qkv.weight", torch.cat([q, k, v])
    yield f"blk.{layer}.attn_gate.weight", z


def _tiled(name: str, value: Tensor, config: Any) -> Tensor:
    """Heads of values in another order: the first of each head of keys, then the second of each."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    axis = 1 if "out_proj" in name else 0
    before = 2 * keys * config.linear_key_head_dim if "qkv" in name or "conv1d" in name else 0
    if "norm" in name:
        return value
    head, rest = value.split([before, value.shape[axis] - before], axis)
    rest = rest.unflatten(axis, (keys, values // keys, -1)).transpose(axis, axis + 1)
    return torch.cat([head, rest.flatten(axis, axis + 2)], axis)


def _decay(name: str, value: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    value = -value.exp()
    if "linear_attn" in name and config.model_type.startswith("qwen3_5"):
        value = _tiled(name, value, config)
    yield name, value if "linear_attn" in name else value[:, None]


def _time(name: str, value: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    if config.model_type.startswith("qwen3_5"):
        value = _tiled(name, value, config)
    yield name.replace("dt_bias", "dt_proj.bias"), value


def _channels(name: str, value: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    value = value.squeeze(1)
    yield (
        name,
        _tiled(name, value, config) if config.model_type.startswith("qwen3_5") else value,
    )


def _shared(name: str, value: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    """The MLP that all tokens go through, which is the only one where there are no experts."""
    layer, ending = name.split(".")[2], "_shexp" if config.num_local_experts else ""
    if "output" in name:
        yield f"blk.{layer}.ffn_down{ending}.weight", value
        return
    for kind, half in zip(("gate", "up"), value.chunk(2), strict=True):
        yield f"blk.{layer}.ffn_{kind}{ending}.weight", half


def _first(name: str, value: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    yield name, value[0] if config.model_type == "qwen2_moe" else value


def _column(name: str, value: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    yield name, value[:, None]


def _row(name: str, value: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    yield name, value[None]


def _named(own: str) -> Callable[..., Any]:
    def place(name: str, value: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
        yield f"blk.{name.split('.')[2]}.{own}", value

    return place


def _bare(name: str, value: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    yield f"blk.{name.split('.')[2]}.ffn_norm", value


CHANGES: dict[str, Callable[..., Any]] = {
    "experts.gate_up_proj": _gate_up,
    "experts.gate_up_proj_bias": _gate_up_bias,
    "experts.down_proj": _down,
    "experts.down_proj_bias": _named("ffn_down_exps.bias"),
    "block_sparse_moe.input_linear.weight": _halves("ffn_gate_exps", "ffn_up_exps"),
    "shared_mlp.input_linear.weight": _shared,
    "shared_mlp.output_linear.weight": _shared,
    "shared_expert_gate.weight": _first,
    "kv_b_proj.weight": _wide,
    "in_proj_qkvz.weight": _qkvz,
    "A_log": _decay,
    "dt_bias": _time,
    "mamba.D": _column,
    "mamba.norm.weight": _row,
    "conv1d.weight": _channels,
    "conv.conv.weight": _channels,
    "gate.e_score_correction_bias": _named("exp_probs_b.bias"),
    "feed_forward.expert_bias": _named("exp_probs_b.bias"),
    "pre_ff_layernorm.weight": _bare,
    "block_sparse_moe.router.weight": _named("ffn_gate_inp.weight"),  # a newer transformers
    "router.scale": _named("ffn_gate_inp.scale"),
    "router.per_expert_scale": _named("ffn_down_exps.scale"),
    "altup.correct_output_scale": _named("altup_correct_scale.weight"),
}
