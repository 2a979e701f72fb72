"""Models in GGUF files, as llama.cpp writes them. A file is an architecture, named as general.architecture names it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.compiler.load.gguf._blocks import stored
from accel.compiler.load.gguf._file import GgufFile, GgufTensor, read_gguf
from accel.ir.axis import Axis
from accel.ir.codes import Coded, Made
from accel.ir.errors import CaptureError, unknown
from accel.ir.weights import Stored

ARCHITECTURES = Axis("GGUF", __name__)
_NONE: Mapping[str, str] = {}
# tokens that end an answer, which llama.cpp knows by their text
_ENDS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>",
    "_<EOT>", "<|end_of_text|>",
}  # fmt: skip


@dataclass(frozen=True)
class Base:
    """One architecture, of a file that llama.cpp's converter wrote from a model of transformers.

    The tables name modules: of the file -> of the model. `layer`: of a layer; `experts`: of its experts, {} standing
    for the expert. What is not in them is refused.
    """

    file: GgufFile

    model_type: ClassVar[str]
    top: ClassVar[Mapping[str, str]] = {
        "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    }  # fmt: skip
    layers: ClassVar[str] = "model.layers"
    layer: ClassVar[Mapping[str, str]] = {
        "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    experts: ClassVar[Mapping[str, str]] = _NONE
    read_apart: ClassVar[tuple[str, ...]] = ()  # tensors that are no weights

    def config(self) -> dict[str, Any]:
        """As transformers' config.json would have it. Raises CaptureError where the metadata lacks something."""
        heads, hidden = self.count("attention.head_count"), self.count("embedding_length")
        embedding = self._embedding()
        if embedding.shape[1:] != (hidden,):
            raise self.wrong(
                f"token_embd.weight is {list(embedding.shape)} and embedding_length {hidden}"
            )
        width = self.count("attention.key_length", hidden // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if self.count(key, width) != width:
                raise self.wrong(f"{key} is {self.count(key)} for heads of {width}")
        return {
            "model_type": self.model_type,
            "vocab_size": embedding.shape[0],
            "hidden_size": hidden,
            "intermediate_size": self.count("feed_forward_length", hidden),
            "num_hidden_layers": self.depth(),
            "num_attention_heads": heads,
            "num_key_value_heads": self.count("attention.head_count_kv", heads),
            "head_dim": width,
            "max_position_embeddings": self.count("context_length"),
            "rms_norm_eps": self.number("attention.layer_norm_rms_epsilon"),
            "rope_parameters": self.rope(),
            **self.shared(),
        }

    def shared(self) -> dict[str, Any]:
        """The part of `config` that all models have: what ends a text, and whether the head is the embedding."""
        fields, tokens = self.file.fields, self.file.fields.get("tokenizer.ggml.tokens", [])
        if not isinstance(tokens, list):
            raise self.wrong(f"tokenizer.ggml.tokens is {str(tokens)[:40]}, not a list")
        ends = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        ends += [i for i, token in enumerate(tokens) if token in _ENDS]
        known = list(dict.fromkeys(i for i in ends if isinstance(i, int)))
        return {
            "tie_word_embeddings": "output.weight" not in self.file.tensors,
            "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": known or None,
            "pad_token_id": None,
        }

    def depth(self) -> int:
        """Layers, which must all be in the file."""
        count = self.count("block_count")
        found = {name.split(".")[1] for name in self.file.tensors if name.startswith("blk.")}
        if found != {str(i) for i in range(min(count, len(found) + 1))}:
            raise self.wrong(f"block_count is {count}, and it holds {len(found)} layers")
        return count

    def rope(self) -> dict[str, Any]:
        """`rope_parameters`."""
        theta = {"rope_theta": self.number("rope.freq_base", 10000.0)}
        kind = self._value("rope.scaling.type", str, "linear")
        factor = self.number("rope.scaling.factor", self.number("rope.scale_linear", 1.0))
        if kind == "none" or kind == "linear" and factor in (0.0, 1.0):
            return {"rope_type": "default", **theta}
        if kind == "linear":
            return {"rope_type": kind, "factor": factor, **theta}
        own = [
            key for key in ("yarn_attn_factor", "attn_factor") if self._has(f"rope.scaling.{key}")
        ]
        if kind != "yarn" or own:
            raise self.wrong(
                f"rope.scaling.{own[0] if own else 'type'} is "
                f"{self._value(f'rope.scaling.{own[0]}', float) if own else kind}, and accel reads linear and yarn "
                "with their usual attention factor"
            )
        context = self.count("rope.scaling.original_context_length")
        usual = {"beta_fast": 32.0, "beta_slow": 1.0}
        betas = {k: self.number(f"rope.scaling.yarn_{k}", v) for k, v in usual.items()}
        return {
            "rope_type": kind, "factor": factor, "original_max_position_embeddings": context, **betas, **theta,
        }  # fmt: skip

    def weights(self) -> dict[str, Stored]:
        """The model's parameters by name. Raises CaptureError for a tensor that the model has no place for."""
        found: dict[str, Stored] = {}
        for name, tensor in self.file.tensors.items():
            if name in self.read_apart:
                continue
            module, _, last = name.rpartition(".")
            layer, kind = "", module
            if module.startswith("blk."):
                _, layer, kind = module.split(".", 2)
            place = f"{self.layers}.{layer}." if layer else ""
            table = self.layer if layer else self.top
            if layer and kind in self.experts and len(tensor.shape) == 3:
                for i, part in enumerate(_slices(tensor)):
                    own = f"{place}{self.experts[kind].format(i)}.{last}"
                    found[own] = stored(name, part, self.file.pages)
            elif kind in table and last in ("weight", "bias"):
                found[f"{place}{table[kind]}.{last}"] = self.weight(kind, last, name, tensor)
            else:
                raise self.wrong(f"{name} has no place in a model of type {self.model_type}")
        return found

    def weight(self, kind: str, last: str, name: str, tensor: GgufTensor) -> Stored:
        """A tensor of the tables' modules as the model has it; `last`: "weight" or "bias"."""
        return stored(name, tensor, self.file.pages)

    def adapt(self, model: Any) -> None:
        """Change of a loaded model what no configuration says."""

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number above zero of the architecture's metadata."""
        value: int = self._value(key, int, default)
        if not 0 < value < 2**31:
            raise self.wrong(f"{key} is {value}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._value(key, (int, float), default))

    def flags(self, key: str, pattern: int) -> list[bool]:
        """For each layer; `pattern`: where the file does not say, all but each so many-th."""
        value = self.file.fields.get(f"{self._name}.{key}", pattern)
        if isinstance(value, list):
            return [bool(v) for v in value][: self.depth()]
        return [bool(value == 0 or i % value < value - 1) for i in range(self.depth())]

    def wrong(self, what: str) -> CaptureError:
        """The error for a file that does not fit together, or that accel does not read."""
        return CaptureError(
            f"{self.file.path} ({self._name}): {what}; convert the model again with a present llama.cpp, or give the "
            "Hugging Face checkpoint that it was made from"
        )

    @property
    def _name(self) -> str:
        return str(self.file.fields["general.architecture"])

    def _has(self, key: str) -> bool:
        return f"{self._name}.{key}" in self.file.fields

    def _value(self, key: str, kind: Any, default: Any = None) -> Any:
        value = self.file.fields.get(f"{self._name}.{key}", default)
        if value is None:
            raise self.wrong(f"its metadata lacks {self._name}.{key}")
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.wrong(f"{key} is {str(value)[:40]}, of another kind than accel reads")
        return value

    def _embedding(self) -> GgufTensor:
        if "token_embd.weight" not in self.file.tensors:
            raise self.wrong("it lacks token_embd.weight")
        return self.file.tensors["token_embd.weight"]


def _slices(tensor: GgufTensor) -> Iterator[GgufTensor]:
    """The matrices [N,K] of [X,N,K]."""
    for part in tensor.data.view(tensor.shape[0], -1):
        yield replace(tensor, shape=tensor.shape[1:], data=part)


def paired(rows: int, heads: int) -> Tensor:
    """Rows [rows] of queries or keys where the rotary pairs are halves of a head, in a file where they are
    neighbours.
    """
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()


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
        found = self.architecture.weights()
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


def open_gguf(path: Path) -> GgufModel:
    """The model in a GGUF file; no weight is read.

    Raises:
        CaptureError: the file is damaged, or holds what accel does not read.
    """
    file = read_gguf(path)
    name = file.fields.get("general.architecture")
    if not isinstance(name, str):
        raise CaptureError(f"{path}: its metadata lacks general.architecture; convert it again")
    if name.replace("_", "-") not in ARCHITECTURES.names():
        raise CaptureError(
            f"{path}: {unknown('GGUF architecture', name, ARCHITECTURES.names())}; give the Hugging Face checkpoint "
            "that it was made from"
        )
    return GgufModel(file, ARCHITECTURES.method(name)(file))
