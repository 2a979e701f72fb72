"""llama.cpp's files of a model's floats: written, quantised (by an importance matrix or none), read for logits."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = dict[str, npt.NDArray[np.float32]]
TYPES = {"Q4_0": 2, "Q4_K_M": 15, "Q8_0": 7}  # llama_ftype
ROOT = {"general.architecture", "general.file_type", "general.quantization_version"}
# modules of transformers -> tensors of a GGUF file
NAMES = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
    "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
}  # fmt: skip


def write_floats(source: Path, out: Path) -> None:
    """A GGUF file of type llama or qwen2 in float32, its channels in random order.

    The model computes the same, but no block holds the numbers that the codes of `source` were made of: whatever the
    format of `source`, each format rounds these floats anew. A head that equals the embedding is left out.
    """

    def change(facts: dict[str, Any], floats: Arrays) -> Arrays:
        kind = str(facts["general.architecture"])
        if np.array_equal(floats.get("output.weight", np.zeros(1)), floats["token_embd.weight"]):
            del floats["output.weight"]
        return reordered(
            floats,
            hidden=facts[f"{kind}.embedding_length"],
            heads=facts[f"{kind}.attention.head_count"],
            groups=facts[f"{kind}.attention.head_count_kv"],
            inner=facts[f"{kind}.feed_forward_length"],
        )

    write_decoded(source, out, change)


def write_decoded(
    source: Path, out: Path, change: Callable[[dict[str, Any], Arrays], Arrays] = lambda _, x: x
) -> None:
    """A GGUF file in float32, of any type. `change`: makes its tensors out of its metadata and tensors."""
    import gguf

    reader = gguf.GGUFReader(source)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    writer = gguf.GGUFWriter(out, str(facts["general.architecture"]))
    for name, field in reader.fields.items():
        if name in ROOT or name.startswith("GGUF."):
            continue
        of = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], of)
    writer.add_file_type(0)
    read = gguf.quants.dequantize
    floats = {t.name: np.float32(read(t.data, t.tensor_type)) for t in reader.tensors}
    for name, value in change(facts, floats).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def reordered(floats: Arrays, hidden: int, heads: int, groups: int, inner: int) -> Arrays:
    """The same model with the channels of the residual stream, of values and of the MLPs in random order."""
    rng = np.random.default_rng(5)
    stream = rng.permutation(hidden)
    orders: dict[str, tuple[Any, Any, Any]] = {}
    found = {}
    for name, x in floats.items():
        *_, layer, what, part = ["", "", *name.split(".")]
        if layer and layer not in orders:
            size = len(floats[f"blk.{layer}.attn_v.weight"]) // groups
            own = [rng.permutation(size) for _ in range(groups)]
            values = np.concatenate([g * size + o for g, o in enumerate(own)])
            read = [h * size + own[h * groups // heads] for h in range(heads)]
            orders[layer] = values, np.concatenate(read), rng.permutation(inner)
        values, read, mlp = orders.get(layer, (None, None, None))
        if what in ("token_embd", "output", "attn_q", "attn_k") and part == "weight":
            x = x[:, stream]
        elif what.endswith("_norm"):
            x = x[stream]
        elif what == "attn_v":
            x = x[values][:, stream] if part == "weight" else x[values]
        elif what == "attn_output":
            x = x[stream][:, read]
        elif what in ("ffn_gate", "ffn_up"):
            x = x[mlp][:, stream]
        elif what == "ffn_down":
            x = x[stream][:, mlp]
        elif part != "bias":
            raise SystemExit(
                f"{name}: a tensor of no llama or qwen2 model; give a file of such a one"
            )
        found[name] = np.ascontiguousarray(x)
    return found


def importance(floats: Path, tokens: Any) -> Arrays:
    """Mean squares of what each matrix is multiplied with, [K] by name, on token ids [n,T]."""
    import torch

    from accel.compiler.load.source import open_source
    from accel.ir.weights import reading

    loaded = open_source(floats).load()
    found: Arrays = {}

    def watch(name: str) -> Any:
        def seen(module: Any, given: tuple[Any, ...]) -> None:
            squares = given[0].flatten(0, -2).float().square().mean(0).numpy()
            found[name] = found.get(name, np.zeros_like(squares)) + squares

        return seen

    for name, module in loaded.model.named_modules():
        words = name.split(".")
        if words[-1] in NAMES:
            at = next(w for w in words if w.isdigit())
            module.register_forward_pre_hook(watch(f"blk.{at}.{NAMES[words[-1]]}.weight"))
    with torch.no_grad(), reading(loaded.stored):
        loaded.model(input_ids=tokens, use_cache=False)
    return found


def quantise(floats: Path, out: Path, kind: str, matrix: Mapping[str, Any] | None = None) -> None:
    """A file of one of TYPES, as llama.cpp mixes its formats. matrix: from `importance`."""
    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = TYPES[kind]
    if matrix:
        entries = (llama_cpp.llama_model_imatrix_data * (len(matrix) + 1))()  # the last ends it
        for entry, (name, value) in zip(entries, matrix.items(), strict=False):
            entry.name, entry.size = name.encode(), value.size
            entry.data = value.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        pointer = ctypes.POINTER(llama_cpp.llama_model_imatrix_data)
        options.imatrix = ctypes.cast(entries, pointer)
    part = out.with_name(f"{out.name}.part")
    given = (str(floats).encode(), str(part).encode(), ctypes.byref(options))
    if llama_cpp.llama_model_quantize(*given):
        raise SystemExit(f"llama.cpp could not quantise {floats}: its own message is above")
    part.rename(out)


def logits(path: Path, rows: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """[n,T,V] of token ids [n,T], each row from an empty cache; cache of float32 for a float32 file."""
    from llama_cpp import Llama

    whole = {"type_k": 0, "type_v": 0} if path.stem.endswith("floats") else {}
    model = Llama(str(path), n_ctx=rows.shape[1], logits_all=True, verbose=False, **whole)
    found = []
    for row in rows:
        model.reset()
        model.eval(row.tolist())
        found.append(np.array(model.scores[: len(row)], np.float32))
    model.close()
    return np.stack(found)
