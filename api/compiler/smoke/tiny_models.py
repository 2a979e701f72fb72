"""Small random-weight models of any transformers type: what is architectural stays, sizes shrink."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from accel.ir.errors import CaptureError, unknown

if TYPE_CHECKING:
    from torch import nn

# The sizes are odd on purpose: a head size that is not hidden/heads wherever a configuration lets it
# be chosen, a vocabulary that is no multiple of 8, windows shorter than a test's sequence.
HIDDEN, HEADS, GROUPS, HEAD, FFN, VOCAB, CONTEXT = 64, 4, 2, 24, 76, 101, 256
LONGEST_PATTERN = 8  # layers at most, where a model repeats a pattern of different ones

_SIZES: dict[str, Any] = {
    **dict.fromkeys(
        ["vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input", "audio_vocab_size",
         "pronunciation_vocab_size", "shape_vocab_size", "encoder_hash_byte_group_vocab"], VOCAB),
    **dict.fromkeys(
        ["hidden_size", "d_model", "n_embd", "dim", "embedding_dim", "emb_dim", "embedding_size",
         "word_embed_proj_dim", "lru_width", "attention_hidden_size", "input_embedding_size",
         "output_embedding_size", "adapter_in_dim", "adapter_input_size", "adapter_out_dim",
         "adapter_output_size"], HIDDEN),
    **dict.fromkeys(
        ["num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
         "encoder_attention_heads", "attention_heads", "num_decoder_attention_heads",
         "num_encoder_attention_heads", "linear_num_value_heads", "mamba_n_heads"], HEADS),
    **dict.fromkeys(["num_key_value_heads", "num_kv_heads", "kv_n_heads", "linear_num_key_heads"], GROUPS),
    **dict.fromkeys(["head_dim", "global_head_dim", "dim_head"], HEAD),
    **dict.fromkeys(
        ["intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "dff", "d_inner",
         "dim_ff", "ffn_hidden_size", "feed_forward_size", "intermediate_size_mlp"], FFN),
    **dict.fromkeys(
        ["moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size",
         "shared_intermediate_size", "shared_experts_intermediate_size", "hidden_size_per_layer_input"], 20),
    **dict.fromkeys(
        ["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length",
         "max_target_positions"], CONTEXT),
    **dict.fromkeys(
        ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 8),
    **dict.fromkeys(
        ["num_experts_per_tok", "moe_topk", "moe_k", "n_group", "num_expert_group", "num_experts_per_token",
         "moe_num_shared_experts"], 2),
    "topk_group": 1, "pretraining_tp": 1, "n_shared_experts": 1, "num_shared_experts": 1,
    **dict.fromkeys(
        ["sliding_window", "window_size", "attention_window_size", "attention_chunk_size"], 7),
    "rotary_dim": 8, "query_pre_attn_scalar": 11, "attention_head_size": HEAD,
    "kv_lora_rank": 18, "q_lora_rank": 22, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 14,
    "index_topk": 48, "index_head_dim": 16, "index_n_heads": 2,
    "linear_key_head_dim": 12, "linear_value_head_dim": 10,
    "mamba_d_head": 32, "mamba_d_state": 6, "mamba_d_ssm": 128, "mamba_chunk_size": 8, "chunk_size": 8,
    "mamba_headdim": 32, "mamba_dt_rank": 5, "time_step_rank": 5, "state_size": 6, "laurel_rank": 6,
    "n_mamba_heads": 2, "adapter_rank": 4, "block_size": 8, "conv_L_cache": 3, "num_buckets": 8,
    "position_bias_num_buckets": 16, "position_bias_max_distance": 40, "relative_max_distance": 20,
    "keep_window_size": 300, "num_mel_bins": 10, "max_source_positions": 20, "shape_embed_dim": 12,
    "pronunciation_embed_dim": 12, "block_multiple_of": 8, "max_inference_chunksize": 64,
}  # fmt: skip
_LAYERS = (
    "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers "
    "num_encoder_layers num_blocks"
).split()
_TOKENS = {
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "sep_token_id": 2, "cls_token_id": 1, "forced_eos_token_id": None, "unk_token_id": 0,
}  # fmt: skip
_DRAFT = {  # its layers take the keys of another model
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": HEAD, "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
# What a type's own code asks for beyond sizes.
_OWN: dict[str, dict[str, Any]] = {
    "aria_text": {"moe_num_shared_experts": 1},
    "bamba": {"attn_layer_indices": [1]},
    **dict.fromkeys(
        ["blt_local_encoder", "blt_local_decoder", "blt_global_transformer", "blt_patcher"],
        {"head_dim": HIDDEN // HEADS, "num_key_value_heads": HEADS}),
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 50000.0},
        },
    },
    "cpmant": {"prompt_length": 4},
    "dbrx": {
        "attn_config": {"kv_n_heads": GROUPS, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": FFN, "hidden_size": HIDDEN, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "deepseek_v2": {"first_k_dense_replace": 1, "num_experts_per_tok": 2},
    "deepseek_v3": {"first_k_dense_replace": 1},
    "dory": {
        "initializer_range": 0.4, "num_hidden_layers": 4,
        "n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
    },
    "dots1": {
        "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_experts_per_tok": 2,
    },
    "dots3_note_text": {
        "head_dim": 26, "num_key_value_heads": HEADS,
        "per_layer_config": {2: {
            "num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 36, "qk_nope_head_dim": 18,
        }},
    },
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4,
        "num_kv_shared_layers": 2, "intermediate_size": FFN, "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
    },
    "gemma4_assistant": {"text_config": _DRAFT | {"model_type": "gemma4_text"}, "backbone_hidden_size": HIDDEN},
    "gemma4_unified_assistant": {
        "text_config": _DRAFT | {"model_type": "gemma4_unified_text"}, "backbone_hidden_size": HIDDEN,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    # few passes and small scales: of noise alone deep loops multiply rounding by thousands
    "hrm_text": {
        "H_cycles": 1, "L_cycles": 2, "num_hidden_layers": 3, "num_layers_per_stack": 1, "embedding_scale": 2.0,
    },
    "helium": {"head_dim": HIDDEN // HEADS},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "mamba2": {"num_heads": 4, "head_dim": 32, "n_groups": 2},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"], "index_n_heads": GROUPS, "index_head_dim": 16,
        "index_block_size": 8, "index_topk_blocks": 6,
    },
    "nemotron": {"num_key_value_heads": GROUPS},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": HEAD, "indexer_budget": 48,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"axial_pos_shape": [8, 32], "axial_pos_embds_dim": [24, 40]},
    "xlm": {"causal": True},
    "xlnet": {"d_head": HIDDEN // HEADS},
    "xlstm": {"num_heads": 2, "hidden_size": 2 * HIDDEN, "embedding_dim": 2 * HIDDEN},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    "zamba": {
        "layers_block_type": ["mamba", "hybrid"] * 2, "num_hidden_layers": 4, "use_mamba_kernels": False,
        "attention_head_dim": 2 * HIDDEN // HEADS, "attention_hidden_size": 2 * HIDDEN,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"] * 2, "num_hidden_layers": 4, "kv_channels": 16,
        "n_mamba_heads": 4, "chunk_size": 256,
        "attention_head_dim": 2 * HIDDEN // HEADS, "attention_hidden_size": 2 * HIDDEN, "use_mem_rope": True,
    },
}  # fmt: skip
# Computed by the configuration out of other fields, which have shrunk.
_DERIVED = {
    "qk_head_dim",
    "hybrid_layer_ids",
    "model_type",
    "architectures",
    "transformers_version",
    "dtype",
}


def small_config(model_type: str, layers: int = 2, **overrides: Any) -> Any:
    """A small configuration of a transformers model type, with every kind of layer that it has.

    Args:
        model_type: as in `config.json`.
        layers: how many; more where the type repeats a longer pattern of layers.
        overrides: fields set as given, e.g. `tie_word_embeddings`.

    Raises:
        CaptureError: transformers knows no such type, or the type takes no small sizes.
    """
    from transformers import CONFIG_MAPPING

    names = list(CONFIG_MAPPING.keys())
    if model_type not in names:
        raise CaptureError(unknown("model type", model_type, names))
    kind = CONFIG_MAPPING[model_type]
    try:
        return _shrunk(_default(kind, model_type), layers, **overrides)
    except Exception as error:
        raise CaptureError(
            f"no small configuration of {model_type}: {type(error).__name__}: {error}"
        ) from error


def _default(kind: Any, model_type: str) -> Any:
    """The configuration of a type as it is when nothing is said; of some that is none."""
    try:
        return kind()
    except Exception:
        return kind(**_OWN.get(model_type, {}))


def _shrunk(config: Any, layers: int = 2, **overrides: Any) -> Any:
    """A small configuration of the same architecture as `config`."""
    fields = _fields(config.to_dict(), layers)
    given = _OWN.get(config.model_type, {})
    for name, inner in vars(config).items():  # of a model of several parts: each part
        if hasattr(inner, "to_dict") and name not in given:
            fields[name] = _shrunk(inner, layers).to_dict()
    fields |= given
    if "is_decoder" in config.to_dict() and not getattr(config, "is_encoder_decoder", False):
        fields["is_decoder"] = True
    return type(config)(**{**fields, **overrides})


def _fields(default: dict[str, Any], layers: int) -> dict[str, Any]:
    count = _layers(default, layers)
    fields: dict[str, Any] = {}
    for name, value in default.items():
        if name in _LAYERS:
            fields[name] = count
        elif name in _TOKENS:
            fields[name] = _TOKENS[name]
        elif name in _SIZES and isinstance(value, int) and not isinstance(value, bool):
            fields[name] = _SIZES[name]
        elif isinstance(value, list) and len(value) == _depth(default):
            fields[name] = value[:count]
        elif name == "per_layer_config" and value:
            fields[name] = _by_layer(default, count)
        elif name == "head_dim" and value is None:
            fields[name] = HEAD
        elif name not in _DERIVED:
            fields[name] = value
    heads, groups = fields.get("num_attention_heads"), default.get("num_key_value_heads")
    if "qk_rope_head_dim" in fields:  # multi-head latent attention: of a head, what turns
        fields["head_dim"] = fields["qk_rope_head_dim"]
    if heads and groups == default.get("num_attention_heads"):
        fields["num_key_value_heads"] = heads
    return fields


def _by_layer(default: dict[str, Any], count: int) -> dict[int, dict[str, Any]]:
    """What single layers have of their own, in the proportion that it has to what the others have."""

    def small(name: str, value: Any) -> Any:
        if name not in _SIZES or not isinstance(value, int):
            return value
        others = default.get(name)
        return max(1, _SIZES[name] * value // (others or value))

    found = {}
    for n, own in default["per_layer_config"].items():
        if int(n) < count:
            found[int(n)] = {name: small(name, value) for name, value in own.items()}
            if own.get("num_key_value_heads") == own.get("num_attention_heads", 0):
                found[int(n)]["num_key_value_heads"] = found[int(n)]["num_attention_heads"]
    return found


def _depth(default: dict[str, Any]) -> int:
    return next((default[n] for n in _LAYERS if isinstance(default.get(n), int)), 0)


def _layers(default: dict[str, Any], least: int) -> int:
    """The fewest layers, `least` at least, among which every kind of layer occurs."""
    depth, count = _depth(default), least
    for value in default.values():
        if isinstance(value, list) and len(value) == depth:
            kinds = {str(v) for v in value}
            need = next(n for n in range(1, depth + 1) if {str(v) for v in value[:n]} == kinds)
            count = max(count, need)
    return min(count, LONGEST_PATTERN)


def small_model(model_type: str, tied: bool = False) -> nn.Module:
    """A small random-weight causal language model of a type; its text part where it has others."""
    from transformers import AutoModelForCausalLM

    config = small_config(model_type, tie_word_embeddings=tied)
    with seeded():
        try:
            model = AutoModelForCausalLM.from_config(config)
        except AttributeError:  # a configuration of several parts: the class takes the text's
            model = AutoModelForCausalLM.from_config(config.get_text_config())
    return written_out(randomise(model, model_type))


def written_out(model: nn.Module) -> nn.Module:
    """The model with its attention written out where transformers' fused form leaves something out: a cap on the
    scores, a scale by the layer, or that later tokens are hidden.
    """
    from accel.ir.capture.inspect import inspect

    if inspect(model).swaps.written_attention:
        model.set_attn_implementation("eager")  # type: ignore[operator]
    return model


@contextmanager
def seeded() -> Iterator[None]:
    """What `randomise` leaves as a type's own code makes it is drawn of one seed."""
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def randomise(model: nn.Module, name: str, embedding: float = 0.4) -> nn.Module:
    """Weights of a scale that keeps every layer's influence visible; the same for the same name."""
    import torch
    from torch import Tensor, nn

    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))

    def noise(weight: Tensor, scale: float) -> Tensor:
        return torch.randn(weight.shape, generator=generator) * scale

    seen: set[int] = set()
    with torch.no_grad():
        for module in model.modules():
            for key, weight in module.named_parameters(recurse=False):
                if weight.data_ptr() in seen:  # a tied weight, drawn once
                    continue
                seen.add(weight.data_ptr())
                if key == "bias":
                    weight.copy_(noise(weight, 0.2))
                elif weight.dim() < 2:  # of a norm: around its own start, 1 or 0
                    weight.add_(noise(weight, 0.2))
                elif isinstance(module, nn.Embedding):
                    weight.copy_(noise(weight, embedding))
                else:
                    inputs = (
                        weight.shape[0] if type(module).__name__ == "Conv1D" else weight.shape[1]
                    )
                    weight.copy_(noise(weight, 1.8 / inputs**0.5))
    return model.eval()
