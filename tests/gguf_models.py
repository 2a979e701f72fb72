"""Small random models of the architectures of GGUF files."""

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf

from .gguf_case import SIZE

SIZES = {
    "vocab_size": SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
SMALL = {**SIZES, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 64}
FOUR = {**SIZES, "num_hidden_layers": 4}
FACTORS = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 4.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
}
GRANITE = {
    "embedding_scale": 3.0,
    "logit_scale": 4.0,
    "residual_scale": 0.5,
    "attention.scale": 0.2,
}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
NONE = {"expert_count": 0, "expert_used_count": 0}
EXPERTS = {"expert_count": 4, "expert_used_count": 2}
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_conv": 4,
}  # fmt: skip
HYBRID = {
    **MAMBA, **FACTORS, "mamba_expand": 2, "mamba_chunk_size": 16, "position_embedding_type": None,
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
}  # fmt: skip
SSM = {
    "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 1, "ssm.inner_size": 128, "ssm.time_step_rank": 8,
}  # fmt: skip
SECOND = {"attention.head_count_kv": [0, 2, 0, 0]}
LFM2 = {"layer_types": ["conv", "full_attention", "conv", "conv"], "conv_L_cache": 3}
MLA = {
    "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}  # fmt: skip
DEEP = {
    **EXPERTS, "attention.head_count_kv": 1, "attention.key_length": 40, "attention.value_length": 32,
    "attention.q_lora_rank": 24, "attention.kv_lora_rank": 32, "attention.key_length_mla": 24,
    "attention.value_length_mla": 16, "expert_feed_forward_length": 32, "expert_shared_count": 1,
    "leading_dense_block_count": 1, "rope.dimension_count": 8,
}  # fmt: skip
V3 = {
    "expert_weights_scale": 2.5, "expert_weights_norm": True, "expert_gating_func": 2, "expert_group_count": 2,
    "expert_group_used_count": 1,
}  # fmt: skip
SIGMOID = {"routed_scaling_factor": 2.5, "norm_topk_prob": True, "n_group": 2, "topk_group": 1}
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARNED = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 32,
    "rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0,
}  # fmt: skip
LINEAR = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "head_dim": 32,
}  # fmt: skip
DELTA = {
    "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 64,
    "attention.recurrent_layers": [True, True, True, False], "full_attention_interval": 4, "rope.dimension_count": 8,
}  # fmt: skip
QWEN_MOE = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
}  # fmt: skip
QWEN_EXPERTS = {
    **EXPERTS, "expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 48,
}  # fmt: skip
SECTIONS = {"rope.dimension_sections": [2, 1, 1, 0]}
TURNS = {
    "rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}  # fmt: skip
COMMAND = {"logit_scale": 0.25, "rope.scaling.type": "none"}
WINDOW = {"attention.sliding_window": 8}
MOST = {"attention.sliding_window_pattern": [True, True, True, False]}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 512}
LONG |= {
    f"{kind}_factor": [1.0 + i / n for i in range(12)] for kind, n in (("short", 10), ("long", 2))
}
E2B = (["sliding_attention"] * 4 + ["full_attention"]) * 4 + ["sliding_attention"] * 2
GLM_MOE = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "use_qk_norm": True,
}  # fmt: skip
GEMMA4 = {
    **{**SIZES, "num_hidden_layers": 6}, "head_dim": 16, "global_head_dim": 32, "sliding_window": 8,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2, "final_logit_softcapping": 30.0,
    "vocab_size_per_layer_input": SIZE,
}  # fmt: skip
GEMMA4_TOLD = {
    **WINDOW, "attention.sliding_window_pattern": [True, True, False] * 2, "attention.key_length": 32,
    "attention.value_length": 32, "attention.key_length_swa": 16, "attention.value_length_swa": 16,
    "rope.dimension_count": 32, "rope.dimension_count_swa": 16, "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4,
    "final_logit_softcapping": 30.0,
}  # fmt: skip
_WHOLE = "allow_global_per_layer_attribute_access"  # of configurations with widths for each layer


@dataclass(frozen=True)
class Model:
    """`arch`: the file's; `kind`, `sizes`: a configuration of transformers; `told`: metadata besides what all have;
    `patch`: what config.json has in place of what transformers writes, for llama.cpp's converter; `near`: how far
    llama.cpp's logits may be, of the largest.
    """

    arch: str
    kind: str
    sizes: dict[str, Any]
    told: dict[str, Any] = field(default_factory=dict)
    patch: dict[str, Any] = field(default_factory=dict)
    near: float = 1e-4

    @property
    def missing(self) -> bool:
        """Whether this transformers does not have it."""
        return not hasattr(hf, self.kind)

    def made(self) -> Any:
        """The model, its weights large enough for tokens to differ."""
        torch.manual_seed(0)
        model = hf.AutoModelForCausalLM.from_config(getattr(hf, self.kind)(**self.sizes))
        with torch.no_grad():
            for name, value in model.named_parameters():
                if value.ndim < 2 or name.endswith("bias"):
                    value.add_(0.2 * torch.randn(value.shape))
                elif "embed" not in name:
                    value.mul_(4)
        if hasattr(model.config, _WHOLE):
            setattr(model.config, _WHOLE, True)
        return model.float().eval()


MODELS = {
    "gpt-oss": Model(
        "gpt-oss", "GptOssConfig",
        {**FOUR, **MOE, "head_dim": 32, "sliding_window": 8, "rope_parameters": {**YARN, "truncate": True}},
        {**EXPERTS, **YARNED, **WINDOW, "expert_feed_forward_length": 96},
    ),
    "qwen35": Model(
        "qwen35", "Qwen3_5TextConfig", {**FOUR, **LINEAR, "rope_parameters": TURNS}, {**DELTA, **SECTIONS}
    ),
    "qwen35moe": Model(
        "qwen35moe", "Qwen3_5MoeTextConfig", {**FOUR, **LINEAR, **QWEN_MOE, "rope_parameters": TURNS},
        {**DELTA, **SECTIONS, **QWEN_EXPERTS},
    ),
    "qwen3next": Model(
        "qwen3next", "Qwen3NextConfig", {**FOUR, **LINEAR, **QWEN_MOE, "partial_rotary_factor": 0.25},
        {**DELTA, **QWEN_EXPERTS},
    ),
    "gemma3n": Model(
        "gemma3n", "Gemma3nTextConfig",
        {
            **SMALL, "num_hidden_layers": 22, "intermediate_size": [2048] * 22, "head_dim": 16, "laurel_rank": 64,
            "num_attention_heads": 2, "num_key_value_heads": 1,
            "vocab_size_per_layer_input": SIZE, "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 2,
            "sliding_window": 8, "layer_types": E2B, "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 12,
        },
        {
            **WINDOW, "altup.active_idx": 0, "altup.num_inputs": 4, "embedding_length_per_layer_input": 256,
            "attention.shared_kv_layers": 2, "activation_sparsity_scale": [1.6448536] * 10 + [-float("inf")] * 12,
            "attention.sliding_window_pattern": [kind[0] == "s" for kind in E2B], "final_logit_softcapping": 30.0,
            "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4,
        },
        near=5e-2,  # llama.cpp takes the deviation of a sample where the model takes that of a whole
    ),
    "gemma4": Model(
        "gemma4", "Gemma4TextConfig",
        {**GEMMA4, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 3, "use_double_wide_mlp": True},
        {
            **GEMMA4_TOLD, "feed_forward_length": [96] * 3 + [192] * 3, "attention.shared_kv_layers": 3,
            "embedding_length_per_layer_input": 16,
        },
        near=5e-3,  # its gelu is rounded to float16
    ),
    "gemma4-experts": Model(
        "gemma4", "Gemma4TextConfig",
        {
            **GEMMA4, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
            "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
        },
        {
            **GEMMA4_TOLD, **EXPERTS, "attention.shared_kv_layers": 0, "embedding_length_per_layer_input": 0,
            "attention.head_count_kv": [2, 2, 1] * 2, "expert_feed_forward_length": 32,
        },
        near=5e-3,
    ),
    "lfm2": Model(
        "lfm2", "Lfm2Config", {**FOUR, **LFM2, "block_auto_adjust_ff_dim": True, "block_multiple_of": 16},
        {**SECOND, "shortconv.l_cache": 3, "feed_forward_length": 64},
    ),
    "lfm2moe": Model(
        "lfm2moe", "Lfm2MoeConfig",
        {
            **FOUR, **LFM2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "num_dense_layers": 1,
        },
        {
            **SECOND, **EXPERTS, "shortconv.l_cache": 3, "expert_feed_forward_length": 32,
            "leading_dense_block_count": 1, "expert_gating_func": 2,
        },
    ),
    "granite": Model("granite", "GraniteConfig", {**SIZES, **FACTORS}, GRANITE),
    "granitemoe": Model("granitemoe", "GraniteMoeConfig", {**SIZES, **FACTORS, **MOE}, {**GRANITE, **EXPERTS}),
    "granitemoe-shared": Model(
        "granitemoe", "GraniteMoeSharedConfig", {**SIZES, **FACTORS, **MOE, "shared_intermediate_size": 48},
        {**GRANITE, **EXPERTS, "expert_shared_feed_forward_length": 48},
    ),
    "granitehybrid": Model(
        "granitehybrid", "GraniteMoeHybridConfig", {**FOUR, **HYBRID, **MOE, "shared_intermediate_size": 48},
        {
            **GRANITE, **EXPERTS, **SSM, **SECOND, "expert_shared_feed_forward_length": 48,
            "rope.scaling.finetuned": False, "context_length": 2**20,
        },
    ),
    "granitehybrid-dense": Model(
        "granitehybrid", "GraniteMoeHybridConfig",
        {**FOUR, **HYBRID, "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 96},
        {
            **GRANITE, **NONE, **SSM, **SECOND, "expert_shared_feed_forward_length": 96,
            "rope.scaling.finetuned": False, "context_length": 2**20,
        },
    ),
    "smollm3": Model("smollm3", "SmolLM3Config", FOUR),
    "phi4-mini": Model(
        "phi3", "Phi3Config",
        {
            **SIZES, "hidden_size": 128, "max_position_embeddings": 4096, "partial_rotary_factor": 0.75,
            "tie_word_embeddings": True, "original_max_position_embeddings": 512, "sliding_window": None,
            "rope_parameters": {**LONG, "partial_rotary_factor": 0.75},
        },
        {
            "rope.dimension_count": 24, "rope.scaling.original_context_length": 512,
            "rope.scaling.attn_factor": (1 + 3 / 9) ** 0.5, "attention.sliding_window": 0,
            "attention.key_length": None, "attention.value_length": None,
        },
    ),
    "deepseek2": Model(
        "deepseek2", "DeepseekV3Config", {**FOUR, **MLA, **SIGMOID, "num_key_value_heads": 4}, {**DEEP, **V3},
        {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    ),
    "deepseek2-yarn": Model(
        "deepseek2", "DeepseekV3Config",
        {
            **FOUR, **MLA, **SIGMOID, "num_key_value_heads": 4,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        {**DEEP, **V3, **YARNED, "rope.scaling.yarn_log_multiplier": 0.1},
        {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    ),
    "deepseek2-softmax": Model(
        "deepseek2", "DeepseekV2Config", {**FOUR, **MLA, "num_key_value_heads": 4, "topk_method": "greedy"},
        {**DEEP, "expert_weights_scale": 1.0},
    ),
    "glm4": Model(
        "glm4", "Glm4Config", {**SIZES, "head_dim": 32, "partial_rotary_factor": 0.5}, {"rope.dimension_count": 16}
    ),
    "glm4moe": Model(
        "glm4moe", "Glm4MoeConfig", {**SIZES, **GLM_MOE, "head_dim": 32, "partial_rotary_factor": 0.5},
        {
            **EXPERTS, "rope.dimension_count": 16, "expert_feed_forward_length": 32, "expert_shared_count": 1,
            "leading_dense_block_count": 1, "expert_gating_func": 2, "expert_weights_scale": 1.0,
            "expert_weights_norm": True, "expert_group_count": 1, "expert_group_used_count": 1,
        },
    ),
    "minicpm": Model(
        "minicpm", "GraniteConfig",
        {**SIZES, **FACTORS, "attention_multiplier": 0.25, "residual_multiplier": 1.4 / 2**0.5},
        {"embedding_scale": 3.0, "logit_scale": 4.0, "residual_scale": 1.4 / 2**0.5},
        {
            "model_type": "minicpm", "architectures": ["MiniCPMForCausalLM"], "scale_emb": 3.0, "scale_depth": 1.4,
            "dim_model_base": 16,
        },
    ),
    "minicpm4": Model(
        "minicpm", "GraniteConfig",
        {
            **SIZES, **FACTORS, "attention_multiplier": 0.25, "residual_multiplier": 1.4 / 2**0.5,
            "rope_parameters": {
                **LONG, "attention_factor": 1.0, "short_factor": LONG["short_factor"][:8],
                "long_factor": LONG["long_factor"][:8], "original_max_position_embeddings": 256,
            },
        },
        {
            "embedding_scale": 3.0, "logit_scale": 4.0, "residual_scale": 1.4 / 2**0.5,
            "rope.scaling.type": "longrope", "rope.scaling.original_context_length": 256,
        },
        {
            "model_type": "minicpm", "architectures": ["MiniCPMForCausalLM"], "scale_emb": 3.0, "scale_depth": 1.4,
            "dim_model_base": 16, "rope_scaling": {
                "rope_type": "longrope", "type": "longrope", "short_factor": LONG["short_factor"][:8],
                "long_factor": LONG["long_factor"][:8], "original_max_position_embeddings": 256,
            },
        },
    ),
    "mistral3": Model(
        "mistral3", "Ministral3Config",
        {
            **SIZES, "head_dim": 16,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        },
        {**YARNED, "rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.1},
    ),
    "olmo2": Model("olmo2", "Olmo2Config", SIZES),
    "olmo3": Model("olmo2", "Olmo3Config", {**FOUR, "sliding_window": 8}, {**WINDOW, **MOST}),
    "olmoe": Model(
        "olmoe", "OlmoeConfig", {**SIZES, "num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2}, EXPERTS
    ),
    "command-r": Model("command-r", "CohereConfig", {**SIZES, "logit_scale": 0.25}, COMMAND),
    "command-r-plus": Model(
        "command-r", "CohereConfig", {**SMALL, "logit_scale": 0.25, "use_qk_norm": True}, COMMAND,
        near=1e-3,
    ),
    "cohere2": Model(
        "cohere2", "Cohere2Config", {**FOUR, "logit_scale": 0.25, "sliding_window": 8, "head_dim": 16},
        {**WINDOW, **COMMAND}, {"rotary_pct": 1.0},
    ),
    "seed_oss": Model("seed_oss", "SeedOssConfig", {**SIZES, "head_dim": 16}),
    "ernie4_5": Model("ernie4_5", "Ernie4_5Config", {**SIZES, "head_dim": 16}),
    "exaone4": Model(
        "exaone4", "Exaone4Config",
        {**SIZES, "sliding_window": None, "layer_types": ["full_attention"] * 2, "sliding_window_pattern": 4},
    ),
    "exaone4-windows": Model(
        "exaone4", "Exaone4Config", {**SMALL, "sliding_window": 8, "sliding_window_pattern": 4},
        {**WINDOW, "attention.sliding_window_pattern": [True, True, True, False] * 16},
    ),
    "starcoder2": Model("starcoder2", "Starcoder2Config", FOUR, near=1e-3),
    "hunyuan-dense": Model("hunyuan-dense", "HunYuanDenseV1Config", {**SIZES, "head_dim": 16}),
    "falcon-h1": Model("falcon-h1", "FalconH1Config", {**SIZES, **MAMBA, "mamba_d_ssm": 128, "head_dim": 16}, SSM),
}  # fmt: skip
