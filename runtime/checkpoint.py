"""A Hugging Face model directory -> module and tokenizer file; it never runs code of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accel.ir.errors import CaptureError
from accel.runtime.config import read_config, refuse, refuse_quantised


def load_model(path: Path, trust_remote_code: bool = False) -> Any:
    """The causal language model of a directory, in float32 on the CPU.

    Raises:
        CaptureError: not a model directory, no such architecture, damaged weights, or a model that
            brings its own code without `trust_remote_code`.
    """
    config = read_config(path)
    refuse(path, config, trust_remote_code)
    refuse_quantised(path, config)
    if not any(path.glob("*.safetensors")):
        raise CaptureError(
            f"{path} holds no *.safetensors; save the model with model.save_pretrained(...), which writes them"
        )
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    quiet = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            low_cpu_mem_usage=True,
        ).eval()
    except Exception as error:  # transformers and safetensors raise many kinds
        raise CaptureError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    finally:
        if quiet:
            logging.enable_progress_bar()


def tokenizer_json(tokenizer: Any, model_path: Path | None) -> str | None:
    """The text of a tokenizer.json, out of what the user gave or what lies beside the model.

    Accepts a `tokenizers.Tokenizer`, a fast Hugging Face tokenizer, or a path to a tokenizer.json or
    its directory.
    """
    if tokenizer is None:
        beside = model_path / "tokenizer.json" if model_path else None
        return beside.read_text(encoding="utf-8") if beside and beside.is_file() else None
    if isinstance(tokenizer, (str, Path)):
        file = Path(tokenizer)
        file = file / "tokenizer.json" if file.is_dir() else file
        if not file.is_file():
            raise CaptureError(f"{file}: no such tokenizer; give a tokenizer.json or its directory")
        return file.read_text(encoding="utf-8")
    inner = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(inner, "to_str"):
        raise CaptureError(
            f"tokenizer is a {type(tokenizer).__name__} without a tokenizer.json form; give a fast "
            "Hugging Face tokenizer, a tokenizers.Tokenizer or the path of a tokenizer.json"
        )
    return str(inner.to_str())
