"""ik_llama.cpp through ik-llama-cpp-python's low-level interface, with flash attention; GGUF files as they are.

`+rtr` orders the weights by rows anew while it loads them, as its `-rtr` does; `+kv8` keeps KV in 8 bits (q8_0).
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location(
    "peer_llama_cpp", Path(__file__).with_name("llama_cpp.py")
)
assert _spec and _spec.loader
llama_cpp = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(llama_cpp)

PACKAGES = ("ik_llama_cpp",)
INSTALL = "ik-llama-cpp-python"
VARIANTS = ()
GGUF = ("file", "file+rtr", "file+rtr+kv8")


def file_name(variant: str, context: int, batch: int) -> str:
    return ""


def sources() -> list[Path]:
    return []


class Session(llama_cpp.Session):  # type: ignore[misc, name-defined]
    def clear(self) -> None:
        self.lib.llama_kv_cache_clear(self.context)

    def cut(self, row: int) -> None:
        remove = self.lib._lib.llama_kv_cache_seq_rm  # the package gives no name to it
        remove.argtypes, remove.restype = [ctypes.c_void_p, *[ctypes.c_int] * 3], ctypes.c_bool
        remove(self.context, row, self.length, -1)


class Model(llama_cpp.Model):  # type: ignore[misc, name-defined]
    def __init__(self, path: Path, variant: str, threads: int):
        from ik_llama_cpp import _ctypes_api as lib

        self.lib = lib
        lib.llama_backend_init()
        how = lib.llama_model_default_params()
        how.repack_tensors = "+rtr" in variant
        self.model = lib.llama_model_load_from_file(str(path).encode(), how)
        if not self.model:
            raise RuntimeError(f"ik_llama.cpp could not load {path}")
        self.threads, self.kv8 = threads, variant.endswith("+kv8")
        self.vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))

    def session(self, batch: int, room: int) -> Session:
        options = self.options(batch, room)
        options.flash_attn = True
        return Session(self.lib, self.model, self.vocabulary, batch, options)


def load(path: Path, variant: str, threads: int) -> Model:
    return Model(path, variant, threads)
