"""Models in GGUF files, as llama.cpp writes them. A file is an architecture, named as general.architecture names it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import torch

from accel.compiler.load.gguf._blocks import Unread, stored
from accel.compiler.load.gguf._file import GgufFile, GgufTensor, plain
from accel.compiler.load.gguf._metadata import Metadata
from accel.ir.axis import Axis
from accel.ir.codes import Coded, Made
from accel.ir.errors import CaptureError, unknown
from accel.ir.weights import Stored

ARCHITECTURES = Axis("GGUF", __name__)
FACTORS = "rope_freqs.weight"  # of Llama 3.1: what the rotary frequencies are divided by
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


@dataclass(frozen=True)
class Modules:
    """Modules of the file -> of the model. `layer`: of a layer, which the model has in `layers`; `experts`: of its
    experts, {} standing for the expert. What is not in them is refused.
    """

    layer: Mapping[str, str] = field(default_factory=lambda: LAYER)
    experts: Mapping[str, str] = field(default_factory=dict)
    top: Mapping[str, str] = field(default_factory=lambda: TOP)
    layers: str = "model.layers"


@dataclass(frozen=True)
class Base:
    """One architecture, of a file that llama.cpp's converter wrote from a model of transformers."""

    metadata: Metadata

    model_type: ClassVar[str]
    modules: ClassVar[Modules] = Modules()
    read_apart: ClassVar[tuple[str, ...]] = ()  # tensors that are no weights

    def config(self) -> dict[str, Any]:
        """As transformers' config.json would have it. Raises CaptureError where the metadata lacks something."""
        return self.metadata.decoder(self.model_type)

    def weights(self) -> dict[str, Stored]:
        """The model's parameters by name. Raises CaptureError for a tensor that the model has no place for."""
        found: dict[str, Stored] = {}
        metadata, modules = self.metadata, self.modules
        self._check_experts()
        for name, tensor in metadata.file.tensors.items():
            if name in self.read_apart:
                continue
            module, _, last = name.rpartition(".")
            layer, kind = "", module
            if module.startswith("blk.") and module.count(".") > 1:
                _, layer, kind = module.split(".", 2)
            place = f"{modules.layers}.{layer}." if layer else ""
            table = modules.layer if layer else modules.top
            if layer and kind in modules.experts and last == "weight" and len(tensor.shape) == 3:
                if tensor.shape[0] != (count := metadata.count("expert_count")):
                    raise metadata.wrong(
                        f"{name} is {list(tensor.shape)}, and expert_count {count}"
                    )
                for i, part in enumerate(_slices(tensor)):
                    own = f"{place}{modules.experts[kind].format(i)}.{last}"
                    found[own] = stored(name, part, metadata.file.pages)
            elif kind in table and last in ("weight", "bias"):
                found[f"{place}{table[kind]}.{last}"] = self.weight(kind, name, tensor)
            else:
                raise metadata.wrong(
                    f"{plain(name)} has no place in a model of type {self.model_type}"
                )
        return found

    def weight(self, kind: str, name: str, tensor: GgufTensor) -> Stored:
        """A tensor of a module of the file as the model has it."""
        return stored(name, tensor, self.metadata.file.pages)

    def _check_experts(self) -> None:
        """That a layer has all parts of its experts, or none."""
        for layer in range(self.metadata.depth()):
            names = [f"blk.{layer}.{kind}.weight" for kind in self.modules.experts]
            lacks = [name for name in names if name not in self.metadata.file.tensors]
            if lacks and len(lacks) < len(names):
                raise self.metadata.wrong(f"it lacks {lacks[0]}")


def _slices(tensor: GgufTensor) -> Iterator[GgufTensor]:
    """The matrices [N,K] of [X,N,K]."""
    for part in tensor.data.view(tensor.shape[0], -1):
        yield replace(tensor, shape=tensor.shape[1:], data=part)


@dataclass(frozen=True)
class GgufModel:
    """A model in a file: its configuration as transformers' config.json would have it, its parameters by name, and
    what is to be said of them.
    """

    file: GgufFile
    architecture: Base

    @cached_property
    def config(self) -> dict[str, Any]:
        return self.architecture.config()

    def weights(self) -> tuple[dict[str, Stored], list[str]]:
        """The parameters, and notes. Raises CaptureError."""
        try:
            found = self.architecture.weights()
        except Unread as error:
            raise CaptureError(f"{self.file.path}: {error}") from None
        few = [weight for weight in found.values() if isinstance(weight, (Coded, Made))]
        kinds = {t.kind for t in self.file.tensors.values()} - {"F32", "F16", "BF16", "F64"}
        if not few:
            return found, []
        notes = [f"{len(few)} weights of the checkpoint are quantised ({', '.join(sorted(kinds))})"]
        if floats := sum(isinstance(weight, Made) for weight in few):
            notes.append(
                f"{floats} of them are computed in float32: accel has no integer codes for them"
            )
        return found, notes

    def adapt(self, model: torch.nn.Module) -> None:
        """Divide the rotary frequencies of a loaded model by the file's factors, where it has some."""
        if FACTORS not in self.file.tensors:
            return
        factors = self.architecture.metadata.factors(FACTORS)
        for name, buffer in model.named_buffers():
            if name.endswith("inv_freq"):
                with torch.no_grad():
                    buffer.div_(factors)


def open_gguf(file: GgufFile) -> GgufModel:
    """The model in a file; no weight is read. Raises CaptureError where accel does not read such a model."""
    path = file.path
    name = file.fields.get("general.architecture")
    if not isinstance(name, str):
        raise CaptureError(f"{path}: its metadata lacks general.architecture; convert it again")
    if name.replace("_", "-") not in ARCHITECTURES.names():
        raise CaptureError(
            f"{path}: {unknown('GGUF architecture', name, ARCHITECTURES.names())}; give the Hugging Face checkpoint "
            "that it was made from"
        )
    return GgufModel(file, ARCHITECTURES.method(name)(Metadata(file)))
