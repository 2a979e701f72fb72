"""The text part of Gemma 3n."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from accel.compiler.load.gguf import LAYER, TOP, Base, Modules, slices
from accel.compiler.load.gguf._blocks import stored
from accel.compiler.load.gguf._file import GgufTensor
from accel.compiler.load.gguf.gemma2 import NORMS, kinds
from accel.compiler.load.gguf.qwen3 import HEAD_NORMS
from accel.ir.weights import Stored

PER_LAYER = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
PER_LAYER_TOP = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_SHARES_FROM = 20  # the layer from which on keys and values are those of a layer before, where a file does not say


@dataclass(frozen=True)
class Gemma3n(Base):
    """Every fifth layer attends to all tokens. Of the first layers only the largest gates pass."""

    model_type = "gemma3n_text"
    modules = Modules(
        {
            **LAYER, **NORMS, **HEAD_NORMS,
            **PER_LAYER, "altup_correct_coef": "altup.correction_coefs",
            "altup_correct_scale.weight": "altup.correct_output_scale",
            "altup_predict_coef": "altup.prediction_coefs", "altup_router": "altup.modality_router",
            "altup_router_norm": "altup.router_norm", "laurel_l": "laurel.linear_left",
            "laurel_r": "laurel.linear_right", "laurel_post_norm": "laurel.post_laurel_norm",
        },
        {"altup_proj": "model.altup_projections.{}", "altup_unembd_proj": "model.altup_unembed_projections.{}"},
        {
            **TOP, **PER_LAYER_TOP,
        },
    )  # fmt: skip

    def config(self) -> dict[str, Any]:
        metadata = self.metadata
        config = metadata.decoder(self.model_type, middle=metadata.layered("feed_forward_length"))
        local = {
            "rope_type": "default",
            "rope_theta": metadata.positive("rope.freq_base_swa", 10000.0),
        }
        layers, first = (
            config["num_hidden_layers"],
            metadata.file.tensors.get("blk.0.laurel_l.weight"),
        )
        if first is None:
            raise metadata.wrong("it lacks blk.0.laurel_l.weight")
        return {
            **config,
            "hidden_activation": "gelu_pytorch_tanh",
            "vocab_size_per_layer_input": config["vocab_size"],
            "hidden_size_per_layer_input": metadata.count("embedding_length_per_layer_input"),
            "laurel_rank": first.shape[0],
            "altup_num_inputs": metadata.count("altup.num_inputs"),
            "altup_active_idx": int(metadata.number("altup.active_idx")),
            "num_kv_shared_layers": max(0, layers - _SHARES_FROM),
            "sliding_window": metadata.count("attention.sliding_window"),
            "layer_types": kinds(metadata.flags("attention.sliding_window_pattern", 5)),
            "rope_parameters": {
                "full_attention": config["rope_parameters"],
                "sliding_attention": local,
            },
            "activation_sparsity_pattern": self._sparse(),
            "final_logit_softcapping": metadata.positive("final_logit_softcapping", 30.0),
        }

    def experts(self, name: str, tensor: GgufTensor) -> list[Stored]:
        """The projections of all streams but one, which a file has as one tensor."""
        return [stored(name, part, self.metadata.file.pages) for part in slices(tensor)]

    def _sparse(self) -> list[float]:
        """The share of a layer's gates that is cut; a file has its place on the normal curve."""
        places = self.metadata.numbers("activation_sparsity_scale")
        return [round(NormalDist().cdf(place), 6) if place > -10 else 0.0 for place in places]
