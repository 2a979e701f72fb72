"""llama.cpp through llama-cpp-python's low-level interface; `+kv8` keeps KV in 8 bits (q8_0), else in float16.
`+nofa`: without flash attention. `file`: a GGUF as it is.

Flash attention is llama.cpp's own choice (which takes it on a CPU), and always on with `+kv8`, which needs it.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGES = ("llama_cpp",)
INSTALL = "llama-cpp-python (and gguf, to prepare models)"
SETTINGS = ("", "+nofa", "+kv8")
VARIANTS = tuple(f"{kind}{how}" for how in SETTINGS for kind in ("q4_0", "q8_0", "f32"))
GGUF = tuple(f"file{how}" for how in SETTINGS)
FILE_TYPES = {"q4_0": 2, "q8_0": 7}  # llama_ftype
Q8_0 = 8  # ggml_type


def file_name(variant: str, context: int, batch: int) -> str:
    kind = variant.partition("+")[0]
    return "" if kind == "file" else f"{kind}.gguf"


def sources() -> list[Path]:
    return []


def prepare(checkpoint: Path, out: Path, variant: str, context: int, batch: int) -> None:
    import sys
    from importlib.util import find_spec

    if find_spec("gguf") is None:
        sys.exit(
            f"{sys.executable} lacks gguf, which writes llama.cpp's model files: install it there"
        )
    kind = variant.partition("+")[0]
    whole = out.with_name("f32.gguf")
    part = out.with_name(f"{out.name}.part")
    if kind == "f32":
        write_gguf(checkpoint, part)
    else:
        if not whole.exists() or whole.stat().st_mtime < newest(checkpoint):
            prepare(checkpoint, whole, "f32", context, batch)
        quantize(whole, part, FILE_TYPES[kind])
    part.rename(out)


def newest(checkpoint: Path) -> float:
    return max(f.stat().st_mtime for f in checkpoint.iterdir() if f.is_file())


def quantize(source: Path, out: Path, file_type: int) -> None:
    """Every matrix in the one format, the head and the embedding too (`pure`)."""
    import sys

    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.pure = file_type, True
    if llama_cpp.llama_model_quantize(
        str(source).encode(), str(out).encode(), ctypes.byref(options)
    ):
        sys.exit(f"llama.cpp could not quantise {source}: its own message is above")


def write_gguf(checkpoint: Path, out: Path) -> None:
    """A checkpoint of type llama or qwen2 in float32, with a vocabulary of made-up words."""
    import sys

    import gguf
    import numpy as np

    config = json.loads((checkpoint / "config.json").read_text())
    kind = config["model_type"]
    if kind not in ("llama", "qwen2"):
        sys.exit(
            f"{checkpoint} is of type {kind}; only llama and qwen2 are written as GGUF here: give a file "
            "that llama.cpp's own converter made, as llama_cpp:VARIANT=FILE"
        )
    heads, layers, hidden = (
        config[k] for k in ("num_attention_heads", "num_hidden_layers", "hidden_size")
    )
    kv_heads = config.get("num_key_value_heads") or heads
    arch = {name: a for a, name in gguf.MODEL_ARCH_NAMES.items()}[kind]
    names = gguf.get_tensor_name_map(arch, layers)
    writer = gguf.GGUFWriter(out, kind)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config.get("head_dim") or hidden // heads)
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    writer.add_file_type(0)
    add_vocabulary(writer, kind, config["vocab_size"])
    for name, value in tensors(checkpoint):
        rows = {"q_proj": heads, "k_proj": kv_heads}.get(name.split(".")[-2])
        if rows and kind == "llama":  # its rotary pairs are neighbours, not halves
            value = value.reshape(rows, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
        wanted = names.get_name(name, (".weight", ".bias"))
        if wanted is None:
            sys.exit(f"{checkpoint}: gguf has no name for the tensor {name} in a {kind} model")
        writer.add_tensor(wanted, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_vocabulary(writer: Any, kind: str, size: int) -> None:
    special, byte, normal = 3, 6, 1  # gguf.TokenType
    if kind == "llama":
        words = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(256)]
        types = [2, special, special] + [byte] * 256
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([0.0] * size)
    else:
        words, types = ["<s>", "</s>"], [special, special]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_merges(["t 0"])
    words, types = words[:size], types[:size]
    writer.add_token_list(words + [f"t{i}" for i in range(size - len(words))])
    writer.add_token_types(types + [normal] * (size - len(types)))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def tensors(checkpoint: Path) -> Iterator[tuple[str, Any]]:
    """Every tensor of a checkpoint as float32, mapped where it is stored so."""
    import numpy as np

    kinds = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
    for file in sorted(checkpoint.glob("*.safetensors")):
        with file.open("rb") as head:
            length = int.from_bytes(head.read(8), "little")
            header = json.loads(head.read(length))
        data = np.memmap(file, np.uint8, "r", 8 + length)
        for name, facts in header.items():
            if name == "__metadata__":
                continue
            start, end = facts["data_offsets"]
            value = data[start:end].view(kinds[facts["dtype"]]).reshape(facts["shape"])
            if facts["dtype"] == "BF16":
                value = (value.astype(np.uint32) << 16).view(np.float32)
            yield name, value.astype(np.float32, copy=False)


class Session:
    """lib: the module of llama.cpp's functions."""

    def __init__(self, lib: Any, model: Any, vocabulary: int, batch: int, options: Any):
        self.lib, self.vocabulary, self.batch, self.length = lib, vocabulary, batch, 0
        self.context = lib.llama_init_from_model(model, options)
        if not self.context:
            raise RuntimeError(f"llama.cpp made no context of {options.n_ctx} tokens")
        self.call = lib.llama_batch_init(2048, 0, 1)
        self.first: Any = None

    def clear(self) -> None:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)

    def cut(self, row: int) -> None:
        """To the prompt's length."""
        memory = self.lib.llama_get_memory(self.context)
        self.lib.llama_memory_seq_rm(memory, row, self.length, -1)

    def run(self, rows: list[list[int]], position: int) -> list[int]:
        """Append tokens [batch][T] at a position; each row's best next token."""
        import numpy as np

        width, best = len(rows[0]), [0] * len(rows)
        places = [(r, t) for r in range(len(rows)) for t in range(width)]
        for start in range(0, len(places), 2048):
            part, call = places[start : start + 2048], self.call
            call.n_tokens = len(part)
            for i, (r, t) in enumerate(part):
                call.token[i], call.pos[i], call.n_seq_id[i] = rows[r][t], position + t, 1
                call.seq_id[i][0], call.logits[i] = r, t == width - 1
            if code := self.lib.llama_decode(self.context, call):
                raise RuntimeError(f"llama_decode failed with {code} on {len(part)} tokens")
            for i, (r, t) in enumerate(part):
                if t == width - 1:
                    logits = self.lib.llama_get_logits_ith(self.context, i)
                    best[r] = int(np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())
        return best

    def prefill(self, prompts: list[list[int]]) -> list[int]:
        self.clear()
        self.first = self.run(prompts, 0)
        self.length = len(prompts[0])
        return self.first

    def decode(self, new: int) -> list[float]:
        for row in range(self.batch):
            self.cut(row)
        tokens, seconds = self.first, []
        for i in range(new):
            start = time.perf_counter()
            tokens = self.run([[t] for t in tokens], self.length + i)
            seconds.append(time.perf_counter() - start)
        return seconds

    def close(self) -> None:
        self.lib.llama_batch_free(self.call)
        self.lib.llama_free(self.context)


class Model:
    def __init__(self, path: Path, variant: str, threads: int):
        import llama_cpp as lib

        self.lib: Any = lib
        lib.llama_backend_init()
        self.model = lib.llama_model_load_from_file(
            str(path).encode(), lib.llama_model_default_params()
        )
        if not self.model:
            raise RuntimeError(f"llama.cpp could not load {path}")
        self.threads, self.kv8 = threads, variant.endswith("+kv8")
        self.plain = variant.endswith("+nofa")
        self.vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))

    def options(self, batch: int, room: int) -> Any:
        options = self.lib.llama_context_default_params()
        options.n_ctx = -(-room // 256) * 256 * batch
        options.n_seq_max = batch
        options.n_batch = 2048
        options.n_threads = options.n_threads_batch = self.threads
        if self.kv8:
            options.type_k = options.type_v = Q8_0
        return options

    def session(self, batch: int, room: int) -> Session:
        options = self.options(batch, room)
        if self.kv8:
            options.flash_attn_type = self.lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
        elif self.plain:
            options.flash_attn_type = self.lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        return Session(self.lib, self.model, self.vocabulary, batch, options)


def load(path: Path, variant: str, threads: int) -> Model:
    return Model(path, variant, threads)
