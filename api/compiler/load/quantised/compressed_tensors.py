"""compressed-tensors, as LLM Compressor writes it. The tensors beside a weight tell its variant:

pack-quantized: weight_packed int32, signed codes raised by 2^(bits-1); weight_shape; int-quantized and
naive-quantized: weight int8; float-quantized: weight float8; nvfp4 and mxfp4: weight_packed uint8, two 4-bit
floats in a byte. weight_scale is one number, or one per row, group of columns, or block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accel.compiler.load.quantised import Base, Weight, modules, needed, sized, typed
from accel.compiler.load.quantised._floats import check_scale, e2m1_codes, exponents, scaled
from accel.compiler.load.quantised._packing import from_words, within_words, words_of
from accel.ir.codes import Coded, Codes, Made
from accel.ir.errors import CaptureError

_FORMATS = (
    "pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision", "dense",
)  # fmt: skip
_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass
class CompressedTensors(Base):
    """Integer codes and 4-bit floats are kept; float8 is computed in float32, since no integer codes equal it."""

    def weights(self, tensors: Mapping[str, Tensor]) -> Iterator[Weight]:
        self._check()
        for module, parts in modules(tensors, "weight_packed"):
            needed(module, "weight_packed", parts, "weight_scale")
            few = parts["weight_packed"].dtype is torch.uint8
            stored = (self._small_floats if few else self._packed)(module, parts)
            yield self._found(module, parts, stored)
        for module, parts in modules(tensors, "weight_scale"):
            if "weight_packed" in parts:
                continue
            needed(module, "weight_scale", parts, "weight")
            yield self._found(module, parts, self._plain(module, parts))

    def _found(self, module: str, parts: Mapping[str, Tensor], stored: Coded | Made) -> Weight:
        used = [f"{module}.{part}" for part in parts if part != "bias"]
        return Weight(f"{module}.weight", stored, used)

    def _check(self) -> None:
        """Refuse what is computed otherwise than by codes and scales; note what has no effect."""
        formats = {self.config.get("format"), *(g.get("format") for g in self._groups())} - {None}
        for form in formats:
            if form not in _FORMATS:
                raise CaptureError(
                    f"quantization_config.format is {form}; accel reads {', '.join(_FORMATS)}: give a "
                    "checkpoint in one of those"
                )
        sparse = self.config.get("sparsity_config") or {}
        if sparse.get("format", "dense") != "dense":
            raise CaptureError(
                f"quantization_config.sparsity_config.format is {sparse['format']}; accel reads dense weights"
            )
        if self.config.get("transform_config"):
            raise CaptureError(
                "quantization_config.transform_config rotates activations, which accel does not do; give a "
                "checkpoint without transforms"
            )
        if any(group.get("input_activations") for group in self._groups()):
            self.notes.append("activations are not rounded as its quantization_config says")
        if self.config.get("kv_cache_scheme"):
            self.notes.append(
                "kv_cache_scheme has no effect: [kv.codec] of a recipe sets the cache"
            )

    def _groups(self) -> list[Mapping[str, Any]]:
        found = self.config.get("config_groups") or {}
        return [group for group in found.values() if isinstance(group, Mapping)]

    def _told(self, key: str) -> list[Any]:
        """The values that any group of modules has for its weights."""
        return [(group.get("weights") or {}).get(key) for group in self._groups()]

    def _group(self, name: str, scale: Tensor, rows: int, columns: int) -> int:
        """Columns that share a scale [N,G], [N,1], [N] or [1]."""
        if scale.numel() == 1:
            return columns
        if scale.dim() != 1:
            typed(name, scale, 2)
        sized(name, scale, rows, *scale.shape[1:])
        many = scale.shape[1] if scale.dim() > 1 else 1
        if many == 1:
            return columns
        for size in self._told("group_size"):
            if isinstance(size, int) and size > 0 and -(-columns // size) == many:
                return size
        raise CaptureError(
            f"{name} has {many} groups for {columns} columns, and quantization_config has group_size "
            f"{', '.join(map(str, self._told('group_size')))}: checkpoint and configuration do not match"
        )

    def _packed(self, module: str, parts: Mapping[str, Tensor]) -> Coded:
        words, scale = parts["weight_packed"], parts["weight_scale"]
        needed(module, "weight_packed", parts, "weight_shape")
        typed(f"{module}.weight_packed", words, 2, torch.int32)
        typed(f"{module}.weight_shape", parts["weight_shape"], 1, torch.int32, torch.int64)
        sized(f"{module}.weight_shape", parts["weight_shape"], 2)
        rows, columns = parts["weight_shape"].tolist()
        found = [
            (bits, dense)
            for bits in dict.fromkeys(self._told("num_bits"))
            if isinstance(bits, int) and 1 <= bits <= 8
            for dense, wide in (
                (True, words_of(columns, bits)),
                (False, -(-columns // (32 // bits))),
            )
            if words.shape == (rows, wide)
        ]
        if not found:
            raise CaptureError(
                f"{module}.weight_packed is {list(words.shape)}, which does not hold [{rows}, {columns}] codes of "
                f"{self._told('num_bits')} bits: checkpoint and configuration do not match"
            )
        bits, dense = found[0]
        group = self._group(f"{module}.weight_scale", scale, rows, columns)
        many = scale.shape[1] if scale.dim() > 1 else 1
        groups = parts.get("weight_g_idx")
        if groups is not None and bool((groups < 0).any()):
            groups = None  # not set
        if groups is not None:
            groups = groups.long()
            sized(f"{module}.weight_g_idx", groups, columns)
            if torch.equal(groups, torch.arange(columns) // group):
                groups = None
            elif int(groups.max()) >= many:
                raise CaptureError(
                    f"{module}.weight_g_idx names groups beyond the {many} of weight_scale: fetch it again"
                )
        zeros = parts.get("weight_zero_point")
        if zeros is not None:
            typed(f"{module}.weight_zero_point", zeros, 2, torch.int32)
            wide = words_of(rows, bits) if dense else -(-rows // (32 // bits))
            sized(f"{module}.weight_zero_point", zeros, wide, many)
        read = partial(
            _packed_codes, words, scale, zeros, bits, (rows, columns), group, groups, dense
        )
        form = (bits, group, None if groups is None else groups.numpy().tobytes())
        return Coded.of_shape((rows, columns), read, form, self.pages)

    def _small_floats(self, module: str, parts: Mapping[str, Tensor]) -> Coded:
        packed, scale = parts["weight_packed"], parts["weight_scale"]
        typed(f"{module}.weight_packed", packed, 2)
        typed(f"{module}.weight_scale", scale, 2)
        rows, half = packed.shape
        sized(f"{module}.weight_scale", scale, rows, *scale.shape[1:])
        group = self._group(f"{module}.weight_scale", scale, rows, 2 * half)
        whole = parts.get("weight_global_scale")
        if whole is not None and whole.numel() != 1:
            sized(f"{module}.weight_global_scale", whole, 1)

        def read() -> Codes:
            scales = exponents(scale)
            if whole is not None:
                scales = scales / whole.float().reshape(())
            return e2m1_codes(packed, scales, group)

        return Coded.of_shape((rows, 2 * half), read, (8, group), self.pages)

    def _plain(self, module: str, parts: Mapping[str, Tensor]) -> Coded | Made:
        weight, scale = parts["weight"], parts["weight_scale"]
        typed(f"{module}.weight", weight, 2)
        rows, columns = weight.shape
        if weight.dtype in _FLOATS:
            shapes = [shape for shape in self._told("block_structure") if shape]
            block = shapes[0] if shapes else None
            if scale.dtype is torch.uint8:
                block = [1, self._group(f"{module}.weight_scale", scale, rows, columns)]
            check_scale(f"{module}.weight_scale", weight, scale, block)
            make = partial(scaled, weight, scale, block)
            return Made.of_shape(weight.shape, make, self.pages)
        if weight.dtype is not torch.int8:
            raise CaptureError(
                f"{module}.weight is {str(weight.dtype).removeprefix('torch.')} with a scale beside it: it was not "
                "compressed; save the model with save_compressed=True"
            )
        group = self._group(f"{module}.weight_scale", scale, rows, columns)
        zeros = parts.get("weight_zero_point")
        if zeros is not None and zeros.numel() not in (1, rows if group == columns else 0):
            sized(f"{module}.weight_zero_point", zeros, *scale.shape)
        read = partial(_plain_codes, weight, scale, zeros, group)
        return Coded.of_shape((rows, columns), read, (8, group), self.pages)


def _packed_codes(
    words: Tensor, scale: Tensor, zeros: Tensor | None, bits: int, shape: tuple[int, int], group: int,
    groups: Tensor | None, dense: bool,
) -> Codes:  # fmt: skip
    unpacked = from_words if dense else within_words
    q, scales = unpacked(words, bits, shape[1]), _by_row(scale, shape[0])
    if zeros is None:
        offsets = torch.full(scales.shape, 2 ** (bits - 1), dtype=torch.uint8)
    else:
        offsets = unpacked(zeros.t(), bits, shape[0]).t().contiguous()
    return Codes(q, scales, offsets, bits, group, groups)


def _plain_codes(weight: Tensor, scale: Tensor, zeros: Tensor | None, group: int) -> Codes:
    scales = _by_row(scale, weight.shape[0])
    offsets = torch.zeros(scales.shape) if zeros is None else _by_row(zeros, weight.shape[0])
    return Codes(_raised(weight), scales, _raised(offsets), 8, group)


def _by_row(scale: Tensor, rows: int) -> Tensor:
    """One number, or one per row or group -> float32 [N,G]."""
    wide = scale.float() if scale.dim() == 2 else scale.float().reshape(-1, 1)
    return wide.expand(rows, -1).contiguous()


def _raised(codes: Tensor) -> Tensor:
    """Signed codes of 8 bits -> uint8."""
    return (codes.short() + 128).to(torch.uint8)
