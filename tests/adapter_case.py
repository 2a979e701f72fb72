"""LoRA adapters of random numbers in peft's format, written without it, and the formula that they stand for."""

import copy
import json

import torch
from safetensors.torch import save_file
from torch import nn

CONV = "Conv1D"  # transformers' linear of GPT-2, whose weight is [in,out]


def modules(model: nn.Module, *ends: str) -> dict[str, nn.Module]:
    """The modules whose names end so."""
    return {n: m for n, m in model.named_modules() if n.endswith(ends)}


def write(folder, model, ends, rank=3, alpha=5.0, seed=0, dtype=torch.float32, **config):
    """An adapter of all modules whose names end so; the folder."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, module in modules(model, *ends).items():
        out, into = (
            module.weight.shape[::-1] if type(module).__name__ == CONV else module.weight.shape
        )
        parts = {"A": torch.randn(rank, into, generator=generator) / into**0.5}
        parts["B"] = torch.randn(out, rank, generator=generator) / 2
        for part, value in parts.items():
            tensors[f"base_model.model.{name}.lora_{part}.weight"] = value.to(dtype).contiguous()
    config = {"r": rank, "lora_alpha": alpha, "target_modules": list(ends), **config}
    return written(folder, tensors, **config)


def written(folder, tensors, **config):
    """An adapter folder of these tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "base_model_name_or_path": "base/name", **config}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def tensors_of(folder):
    """What an adapter folder holds."""
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


def merged(model, folder, scale):
    """Another model, with W + scale * B A in place of each W that the adapter adapts."""
    other, tensors = copy.deepcopy(model), tensors_of(folder)
    for key, a in tensors.items():
        if ".lora_A." not in key:
            continue
        name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        b = tensors[key.replace("lora_A", "lora_B")]
        module, delta = other.get_submodule(name), scale * b.float() @ a.float()
        with torch.no_grad():
            module.weight += delta.T if type(module).__name__ == CONV else delta
    return other


def logits(model, tokens):
    """A module's logits [B,T,V] in NumPy."""
    with torch.no_grad():
        return model(torch.as_tensor(tokens)).logits.float().numpy()
