"""genai_config.json: what onnxruntime-genai needs to run the artifact's `genai` entry unchanged."""

from __future__ import annotations

from typing import Any

from accel.ir.state import Part


def genai_config(model: dict[str, Any], state: list[dict[str, Any]]) -> dict[str, Any]:
    """The configuration for a plain dense cache; `model` and `state` are the manifest's tables.

    Keys and values are concatenated by the graph (`past_present_share_buffer` off).
    """
    shape = next(s["shape"] for s in state if s["role"] == Part.KEYS)
    heads = model["layers"][0]["num_heads"]
    eos = model["eos"] or [model["vocab_size"] - 1]
    return {
        "model": {
            "type": "llama",
            "vocab_size": model["vocab_size"],
            "context_length": model["max_context"],
            "bos_token_id": model["bos"] or 0,
            "eos_token_id": eos,
            "pad_token_id": eos[0],
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "filename": "genai.onnx",
                "head_size": shape[3],
                "hidden_size": heads * shape[3],
                "num_attention_heads": heads,
                "num_hidden_layers": model["num_layers"],
                "num_key_value_heads": shape[1],
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "position_ids": "position_ids",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {
            "do_sample": False,
            "max_length": model["max_context"],
            "min_length": 0,
            "past_present_share_buffer": False,
        },
    }
