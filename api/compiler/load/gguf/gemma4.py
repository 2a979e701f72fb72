"""The text part of Gemma 4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from accel.compiler.load.gguf import FACTORS, LAYER, TOP, Base, Modules
from accel.compiler.load.gguf.gemma2 import NORMS, kinds
from accel.compiler.load.gguf.gemma3n import PER_LAYER, PER_LAYER_TOP
from accel.compiler.load.gguf.qwen3 import HEAD_NORMS

_FAR = 1e20  # a factor above which a pair of columns is not rotated


@dataclass(frozen=True)
class Gemma4(Base):
    """Layers that attend to all tokens have wider heads, of which a part is rotated, and may have keys for values. A
    file has that part as factors of the rotation, those of the other columns so great that they stand still.
    """

    model_type = "gemma4_text"
    modules = Modules(
        {
            **LAYER,
            **NORMS,
            **HEAD_NORMS,
            **PER_LAYER,
            "layer_output_scale.weight": "layer_scalar",
            "ffn_gate_inp": "router.proj",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
        },
        top={**TOP, **PER_LAYER_TOP},
        joined={
            ("ffn_gate_exps.weight", "ffn_up_exps.weight"): "experts.gate_up_proj",
            ("ffn_gate_up_exps.weight",): "experts.gate_up_proj",
            ("ffn_down_exps.weight",): "experts.down_proj",
        },
    )

    def config(self) -> dict[str, Any]:
        metadata = self.metadata
        sliding = metadata.flags("attention.sliding_window_pattern", 6)
        wide, width = metadata.width(), metadata.count("attention.key_length_swa")
        shared = int(metadata.number("attention.shared_kv_layers", 0))
        hidden = metadata.count("embedding_length")
        return {
            "model_type": self.model_type,
            "vocab_size": metadata.vocabulary(),
            "vocab_size_per_layer_input": metadata.vocabulary(),
            "hidden_size": hidden,
            "num_hidden_layers": metadata.depth(),
            "num_attention_heads": metadata.count("attention.head_count"),
            "head_dim": width,
            "global_head_dim": wide,
            "max_position_embeddings": metadata.count("context_length"),
            "sliding_window": metadata.count("attention.sliding_window"),
            "layer_types": kinds(sliding),
            "num_kv_shared_layers": shared,
            "hidden_size_per_layer_input": int(
                metadata.number("embedding_length_per_layer_input", 0)
            ),
            "hidden_activation": "gelu_pytorch_tanh",
            "final_logit_softcapping": metadata.positive("final_logit_softcapping")
            if metadata.has("final_logit_softcapping")
            else None,
            "rope_parameters": self._rope(wide),
            **metadata.epsilon(),
            **metadata.shared(),
            **self._heads(sliding, shared),
            **self._middle(shared),
            **self._experts(),
        }

    def divisors(self) -> Tensor | None:
        return None

    def _rope(self, wide: int) -> dict[str, Any]:
        metadata = self.metadata
        if FACTORS not in metadata.file.tensors:
            raise metadata.wrong(f"it lacks {FACTORS}")
        rotated = int((metadata.factors(FACTORS) < _FAR).sum())
        return {
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": metadata.positive("rope.freq_base_swa", 10000.0),
            },
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": metadata.positive("rope.freq_base"),
                "partial_rotary_factor": 2 * rotated / wide,
            },
        }

    def _heads(self, sliding: list[bool], shared: int) -> dict[str, Any]:
        """Heads of keys, of layers with windows and of the others."""
        metadata = self.metadata
        heads = metadata.layered("attention.head_count_kv")
        found = [
            sorted({n for n, slides in zip(heads, sliding, strict=True) if slides is kind})
            for kind in (True, False)
        ]
        if any(len(some) != 1 for some in found):
            raise metadata.wrong(f"attention.head_count_kv is {heads} for layers of two kinds")
        (own,), (other,) = found
        last = metadata.depth() - shared
        lacking = [
            i
            for i in range(last)
            if not sliding[i] and f"blk.{i}.attn_v.weight" not in metadata.file.tensors
        ]
        config = {"num_key_value_heads": own, "attention_k_eq_v": bool(lacking)}
        if own != other and not lacking:
            raise metadata.wrong(f"attention.head_count_kv is {heads}, and values are not keys")
        return {**config, "num_global_key_value_heads": other}

    def _middle(self, shared: int) -> dict[str, Any]:
        """Columns within the MLP: layers that share keys may have twice as many."""
        metadata = self.metadata
        sizes = metadata.layered("feed_forward_length")
        first = len(sizes) - shared
        double = sizes[-1] == 2 * sizes[0]
        if sizes != [sizes[0]] * first + [sizes[0] * (2 if double else 1)] * shared:
            raise metadata.wrong(f"feed_forward_length is {sizes}")
        return {"intermediate_size": sizes[0], "use_double_wide_mlp": double}

    def _experts(self) -> Mapping[str, Any]:
        metadata = self.metadata
        if metadata.number("expert_count", 0) <= 0:
            return {"enable_moe_block": False}
        count, used = metadata.experts_used()
        return {
            "enable_moe_block": True,
            "num_experts": count,
            "top_k_experts": used,
            "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
        }
