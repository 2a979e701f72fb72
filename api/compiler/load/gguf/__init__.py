"""Models in GGUF files, as llama.cpp writes them. A file is an architecture, named as general.architecture names it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.compiler.load.gguf._blocks import Unread, stored
from accel.compiler.load.gguf._file import GgufFile, GgufTensor, plain
from accel.compiler.load.gguf._metadata import Metadata
from accel.ir.axis import Axis
from accel.ir.codes import Coded, Made
from accel.ir.errors import CaptureError, unknown
from accel.ir.weights import Experts, Stacked, Stored

ARCHITECTURES = Axis("GGUF", __name__)
FACTORS = "rope_freqs.weight"  # of Llama 3.1: what the rotary frequencies are divided by
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


# beginnings of the names of what reads images and sounds, which some tools put into the file of the model
_OTHER_INPUTS = ("v.", "a.", "mm.")


@dataclass(frozen=True)
class Modules:
    """Modules of the file -> of the model, or tensors of the file -> parameters of the model where a name has a last
    part besides `weight` and `bias`. `layer`: of a layer, which the model has in `layers`; `experts`: of its experts,
    {} standing for the expert; `joined`: several tensors of a layer, all of which it has or none -> the parameter
    that is made of them. What is not in them is refused.
    """

    layer: Mapping[str, str] = field(default_factory=lambda: LAYER)
    experts: Mapping[str, str] = field(default_factory=dict)
    top: Mapping[str, str] = field(default_factory=lambda: TOP)
    layers: str = "model.layers"
    joined: Mapping[tuple[str, ...], str] = field(default_factory=dict)


@dataclass(frozen=True)
class NextN:
    """Where a checkpoint of transformers has the layer that drafts, {} standing for the number of the model's layers.
    `modules`: of the file, beside those of any layer -> of the checkpoint; `layer`: the beginning of the names of the
    others; `of_target`: what such a layer has of its target.
    """

    modules: Mapping[str, str] = field(
        default_factory=lambda: {
            **{
                f"nextn.{name}": f"model.layers.{{}}.{name}"
                for name in ("eh_proj", "enorm", "hnorm")
            },
            "nextn.shared_head_norm": "model.layers.{}.shared_head.norm",
        }
    )
    layer: str = "model.layers.{}."
    of_target: tuple[str, ...] = ("nextn.embed_tokens", "nextn.shared_head_head")


@dataclass(frozen=True)
class Base:
    """One architecture, of a file that llama.cpp's converter wrote from a model of transformers."""

    metadata: Metadata

    model_type: ClassVar[str]
    modules: ClassVar[Modules] = Modules()
    nextn: ClassVar[NextN] = NextN()
    read_apart: ClassVar[tuple[str, ...]] = (FACTORS,)  # tensors that are no weights

    def config(self) -> dict[str, Any]:
        """As transformers' config.json would have it. Raises CaptureError where the metadata lacks something."""
        return self.metadata.decoder(self.model_type)

    def weights(self) -> dict[str, Stored]:
        """The model's parameters by name. Raises CaptureError for a tensor that the model has no place for."""
        self._check_experts()
        apart = {*self.left_out(), *self.read_apart}
        return self._placed(name for name in self.metadata.file.tensors if name not in apart)

    def next_token_layer(self) -> dict[str, Stored]:
        """The first layer that drafts, by the names of a checkpoint of transformers; empty: the file has none. Raises
        CaptureError.
        """
        depth, nextn, found = self.metadata.depth(), self.nextn, dict[str, Stored]()
        start, behind = f"blk.{depth}.", f"{self.modules.layers}.{depth}."
        names = [name for name in self.metadata.file.tensors if name.startswith(start)]
        block = [name for name in names if not name.startswith(f"{start}nextn.")]
        for name, weight in self._placed(block).items():
            found[nextn.layer.format(depth) + name.removeprefix(behind)] = weight
        for name in names:
            own = name.removeprefix(start)
            kind, _, last = own.rpartition(".")
            if kind in nextn.modules and last == "weight":
                weight = self.weight(kind, name, self.metadata.file.tensors[name])
                found[f"{nextn.modules[kind].format(depth)}.{last}"] = weight
            elif name not in block and kind not in nextn.of_target:
                raise self.metadata.wrong(f"{plain(name)} has no place in a layer that drafts")
        return found

    def _placed(self, names: Iterable[str]) -> dict[str, Stored]:
        """Tensors of the file by the names of the model's parameters. Raises CaptureError."""
        found: dict[str, Stored] = {}
        pieces: dict[str, dict[str, GgufTensor]] = {}
        metadata, modules = self.metadata, self.modules
        joined = {own for parts in modules.joined for own in parts}
        for name in names:
            tensor = metadata.file.tensors[name]
            layer, own = _of_layer(name)
            kind, _, last = own.rpartition(".")
            place = f"{modules.layers}.{layer}." if layer else ""
            table = modules.layer if layer else modules.top
            if layer and own in joined:
                pieces.setdefault(layer, {})[own] = tensor
            elif kind in modules.experts and last == "weight" and len(tensor.shape) == 3:
                for i, part in enumerate(self.experts(name, tensor)):
                    found[f"{place}{modules.experts[kind].format(i)}.{last}"] = part
            elif own in table:
                found[f"{place}{table[own]}"] = self.weight(own, name, tensor)
            elif kind in table and last in ("weight", "bias"):
                found[f"{place}{table[kind]}.{last}"] = self.weight(kind, name, tensor)
            else:
                raise metadata.wrong(
                    f"{plain(name)} has no place in a model of type {self.model_type}"
                )
        for layer, held in pieces.items():
            for names, target in modules.joined.items():
                if not held.keys() & set(names):
                    continue
                if lacks := [own for own in names if own not in held]:
                    raise metadata.wrong(f"it lacks blk.{layer}.{lacks[0]}")
                parts = {f"blk.{layer}.{own}": held[own] for own in names}
                found[f"{modules.layers}.{layer}.{target}"] = self.join(target, parts)
        return found

    def weight(self, kind: str, name: str, tensor: GgufTensor) -> Stored:
        """A tensor of a module of the file as the model has it."""
        return stored(name, tensor, self.metadata.file.pages)

    def experts(self, name: str, tensor: GgufTensor) -> list[Stored]:
        """The weights [N,K] of the experts of a tensor [X,N,K]."""
        if tensor.shape[0] != (count := self.metadata.count("expert_count")):
            raise self.metadata.wrong(f"{name} is {list(tensor.shape)}, and expert_count {count}")
        return [stored(name, part, self.metadata.file.pages) for part in slices(tensor)]

    def join(self, target: str, parts: Mapping[str, GgufTensor]) -> Stored:
        """A parameter of tensors by name: their rows, one below the other; of experts [X,N,K], those of each."""
        if all(len(tensor.shape) == 3 for tensor in parts.values()):
            return Experts.rows([Experts.stack(self.experts(n, t)) for n, t in parts.items()])
        return self.below(parts.items())

    def below(self, parts: Iterable[tuple[str, GgufTensor]]) -> Stored:
        """The rows of tensors, one below the other."""
        pages = self.metadata.file.pages
        found = [stored(name, tensor, pages) for name, tensor in parts]
        if len({part.blank.shape[1:] for part in found}) > 1:
            shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in parts)
            raise self.metadata.wrong(f"{shapes} are not of one width")
        return Stacked.rows(found)

    def divisors(self) -> Tensor | None:
        """What the rotary frequencies are divided by, float32 [pairs]; None where the model has them as they are."""
        held = FACTORS in self.metadata.file.tensors
        return self.metadata.factors(FACTORS) if held else None

    def left_out(self) -> list[str]:
        """The tensors that are of another model than the language model: what reads images, and layers that draft."""
        depth, found = self.metadata.depth(), list[str]()
        for name in self.metadata.file.tensors:
            layer, _ = _of_layer(name)
            if name.startswith(_OTHER_INPUTS) or layer and int(layer) >= depth:
                found.append(name)
        return found

    def _check_experts(self) -> None:
        """That a layer has all parts of its experts, or none."""
        for layer in range(self.metadata.depth()):
            names = [f"blk.{layer}.{kind}.weight" for kind in self.modules.experts]
            lacks = [name for name in names if name not in self.metadata.file.tensors]
            if lacks and len(lacks) < len(names):
                raise self.metadata.wrong(f"it lacks {lacks[0]}")


def _of_layer(name: str) -> tuple[str, str]:
    """The number of a tensor's layer, and its name there: "blk.3.attn_q.weight" -> "3", "attn_q.weight"; "" of a
    tensor of no layer.
    """
    if name.startswith("blk.") and name.count(".") > 1:
        _, layer, own = name.split(".", 2)
        return layer, own
    return "", name


def slices(tensor: GgufTensor) -> Iterator[GgufTensor]:
    """The matrices [N,K] of [X,N,K]."""
    for part in tensor.data.view(tensor.shape[0], -1):
        yield replace(tensor, shape=tensor.shape[1:], data=part)


def runs(tensor: GgufTensor, counts: Sequence[int]) -> list[GgufTensor]:
    """The rows of a tensor [N,...] in runs of so many, N in all."""
    parts = tensor.data.view(tensor.shape[0], -1).split(list(counts))
    return [
        replace(tensor, shape=(len(part), *tensor.shape[1:]), data=part.flatten()) for part in parts
    ]


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
        few = [
            part
            for weight in found.values()
            for part in _parts(weight)
            if isinstance(part, (Coded, Made))
        ]
        kinds = {t.kind for t in self.file.tensors.values()} - {"F32", "F16", "BF16", "F64"}
        notes = [_said(left)] if (left := self.architecture.left_out()) else []
        if few:
            notes.append(
                f"{len(few)} weights of the checkpoint are quantised ({', '.join(sorted(kinds))})"
            )
        if floats := sum(isinstance(weight, Made) for weight in few):
            notes.append(
                f"{floats} of them are computed in float32: accel has no integer codes for them"
            )
        return found, notes

    def adapt(self, model: Any) -> None:
        """Divide a loaded model's rotary frequencies by the file's factors, where it has some, and say which tokens the
        file suppresses.
        """
        if suppressed := self.architecture.metadata.suppressed():
            model.generation_config.suppress_tokens = suppressed
        if (factors := self.architecture.divisors()) is None:
            return
        for name, buffer in model.named_buffers():
            if name.endswith("inv_freq"):
                with torch.no_grad():
                    buffer.div_(factors)


def _parts(weight: Stored) -> Iterator[Stored]:
    """What of a weight lies in the file."""
    inner = (*getattr(weight, "parts", ()), *getattr(weight, "experts", ()))
    if not inner:
        yield weight
    for part in inner:
        yield from _parts(part)


def _said(names: Sequence[str]) -> str:
    """Tensors that are left out, as a note."""
    drafts = [name for name in names if name.startswith("blk.")]
    others = [name for name in names if name not in set(drafts)]
    kinds = {"layers that draft (nextn)": drafts, "what reads images or sounds": others}
    told = [f"{len(some)} of {kind} ({some[0]}, …)" for kind, some in kinds.items() if some]
    return f"left out of the file: {', '.join(told)}"


# architectures of files that hold no language model -> what they are, and what to give
_APART = {
    "clip": "it is the part that reads images or sounds (mmproj); give the file of the language model beside it",
    "adapter": "it is a LoRA adapter; give the model's file, and the adapter as peft saves it with --adapter",
}


def open_gguf(file: GgufFile) -> GgufModel:
    """The model in a file; no weight is read. Raises CaptureError where accel does not read such a model."""
    path = file.path
    name = file.fields.get("general.architecture")
    if not isinstance(name, str):
        raise CaptureError(f"{path}: its metadata lacks general.architecture; convert it again")
    kind = "adapter" if file.fields.get("general.type") == "adapter" else name
    if kind in _APART:
        raise CaptureError(f"{path}: {_APART[kind]}")
    if name.replace("_", "-") not in ARCHITECTURES.names():
        raise CaptureError(
            f"{path}: {unknown('GGUF architecture', name, ARCHITECTURES.names())}; give the Hugging Face checkpoint "
            "that it was made from"
        )
    return GgufModel(file, ARCHITECTURES.method(name)(Metadata(file)))
