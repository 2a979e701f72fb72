"""DeepSeek V2 and V3, and what is built as they are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from operator import mul
from typing import Any

from torch import Tensor

from accel.compiler.load.gguf import LAYER, Base, Modules, slices
from accel.compiler.load.gguf._blocks import stored
from accel.compiler.load.gguf._file import GgufTensor
from accel.compiler.load.gguf.qwen2moe import EXPERTS, KINDS
from accel.ir.weights import Stacked, Stored

_SOFTMAX, _SIGMOID = 1, 2  # expert_gating_func
_KV = "self_attn.kv_b_proj.weight"


@dataclass(frozen=True)
class DeepSeek2(Base):
    """Keys and values come of one narrow vector. A file has the two halves of the matrix that widens it apart, that
    of the keys transposed for each head; older ones have it whole. Where a sigmoid weighs the experts, the model is
    V3's, else V2's.
    """

    model_type = "deepseek_v2"
    modules = Modules(
        {
            **{k: v for k, v in LAYER.items() if k not in ("attn_k", "attn_v")},
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
            "ffn_gate_inp": "mlp.gate",
            "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
            **{f"ffn_{kind}_shexp": f"mlp.shared_experts.{kind}_proj" for kind in KINDS},
        },
        EXPERTS,
        joined={("attn_k_b.weight", "attn_v_b.weight"): _KV},
    )

    def config(self) -> dict[str, Any]:
        metadata = self.metadata
        key, value = self._widths()
        rotated, heads = (
            metadata.count("rope.dimension_count"),
            metadata.count("attention.head_count"),
        )
        if not 0 < rotated < key or rotated % 2:
            raise metadata.wrong(f"rope.dimension_count is {rotated} for heads of {key}")
        hidden = metadata.count("embedding_length")
        config = {
            "model_type": self.model_type,
            "vocab_size": metadata.vocabulary(),
            "hidden_size": hidden,
            "intermediate_size": metadata.count("feed_forward_length", hidden),
            "num_hidden_layers": metadata.depth(),
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "max_position_embeddings": metadata.count("context_length"),
            "rope_parameters": self._rope(),
            "attention_bias": False,
            "q_lora_rank": metadata.count("attention.q_lora_rank") if self._narrow() else None,
            "kv_lora_rank": metadata.count("attention.kv_lora_rank"),
            "qk_rope_head_dim": rotated,
            "qk_nope_head_dim": key - rotated,
            "v_head_dim": value,
            **metadata.epsilon(),
            **metadata.shared(),
        }
        return {**config, **self._routes()}

    def weight(self, kind: str, name: str, tensor: GgufTensor) -> Stored:
        found = super().weight(kind, name, tensor)
        factor, _ = self._scores()
        first = (
            "attn_q_a_norm" if self._narrow() else "attn_q"
        )  # what the queries are a product with
        return found.changed(partial(mul, factor)) if kind == first and factor != 1 else found

    def join(self, target: str, parts: Mapping[str, GgufTensor]) -> Stored:
        """Of each head, the rows of keys and then of values."""
        pages, heads = self.metadata.file.pages, self.metadata.count("attention.head_count")
        (name, keys), (other, values) = parts.items()
        key, value = self._widths()
        key -= self.metadata.count("rope.dimension_count")
        rank = self.metadata.count("attention.kv_lora_rank")
        for one, tensor, shape in ((name, keys, (rank, key)), (other, values, (value, rank))):
            if tensor.shape != (heads, *shape):
                raise self.metadata.wrong(
                    f"{one} is {list(tensor.shape)}, and it should be {[heads, *shape]}"
                )
        rows = list[Stored]()
        for k, v in zip(slices(keys), slices(values), strict=True):
            rows += [stored(name, k, pages).changed(_turned), stored(other, v, pages)]
        return Stacked.rows(rows)

    def _widths(self) -> tuple[int, int]:
        """Columns of a head of keys, and of values."""
        metadata, own = (
            self.metadata,
            "_mla" if self.metadata.has("attention.key_length_mla") else "",
        )
        return (
            metadata.count(f"attention.key_length{own}"),
            metadata.count(f"attention.value_length{own}"),
        )

    def _narrow(self) -> bool:
        """Whether queries too come of a narrow vector."""
        return self.metadata.holds("attn_q_a.weight")

    def _scores(self) -> tuple[float, float]:
        """What the scores of transformers' model lack to those of the file, and what YaRN's logarithm is multiplied
        by: V2's model in transformers leaves out that YaRN scales scores.
        """
        metadata = self.metadata
        log = 10 * metadata.number("rope.scaling.yarn_log_multiplier", 0.1)
        if not metadata.has("rope.scaling.yarn_log_multiplier") or self._sigmoid():
            return 1.0, log
        return (0.1 * log * math.log(metadata.positive("rope.scaling.factor")) + 1) ** 2, log

    def _rope(self) -> dict[str, Any]:
        rope = self.metadata.rope()
        if rope["rope_type"] == "yarn":
            _, log = self._scores()
            rope |= {"mscale": log, "mscale_all_dim": log}
        return rope

    def _sigmoid(self) -> bool:
        kind = self.metadata.count("expert_gating_func", _SOFTMAX)
        if kind not in (_SOFTMAX, _SIGMOID):
            raise self.metadata.wrong(f"expert_gating_func is {kind}, and accel reads 1 and 2")
        return kind == _SIGMOID

    def _routes(self) -> dict[str, Any]:
        """How tokens go to experts."""
        metadata = self.metadata
        count, used = metadata.experts_used()
        groups = metadata.count("expert_group_count", 1)
        config = {
            "n_routed_experts": count,
            "num_experts_per_tok": used,
            "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
            "n_shared_experts": metadata.count("expert_shared_count"),
            "first_k_dense_replace": int(metadata.number("leading_dense_block_count", 0)),
            "routed_scaling_factor": metadata.positive("expert_weights_scale", 1.0),
            "n_group": groups,
            "topk_group": metadata.count("expert_group_used_count", groups),
        }
        norm = metadata.flag("expert_weights_norm", False)
        if self._sigmoid():
            return {**config, "model_type": "deepseek_v3", "norm_topk_prob": norm}
        if norm:
            raise metadata.wrong("expert_weights_norm comes with a softmax over experts")
        method = "greedy" if groups == 1 else "group_limited_greedy"
        return {**config, "topk_method": method, "norm_topk_prob": False}


def _turned(value: Tensor) -> Tensor:
    return value.t().contiguous()
