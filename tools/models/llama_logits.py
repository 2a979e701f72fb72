"""llama.cpp as a yardstick: how it splits text, its logits, its greedy tokens."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp as lib
import numpy as np
import torch
from torch import Tensor

_SILENT = lib.llama_log_callback(lambda *_: None)


class Peer:
    """llama.cpp with a GGUF file, on one thread."""

    def __init__(self, path: Path):
        lib.llama_log_set(_SILENT, ctypes.c_void_p(0))
        lib.llama_backend_init()
        self.model = lib.llama_model_load_from_file(
            str(path).encode(), lib.llama_model_default_params()
        )
        if not self.model:
            raise RuntimeError(f"llama.cpp could not load {path}")
        self.vocabulary = lib.llama_model_get_vocab(self.model)
        self.size: int = lib.llama_vocab_n_tokens(self.vocabulary)

    def ids(self, text: str) -> list[int]:
        """Tokens, special ones by their text."""
        data = text.encode()
        found = (lib.llama_token * (len(data) + 8))()
        count = lib.llama_tokenize(self.vocabulary, data, len(data), found, len(found), True, True)
        return list(found[:count])

    def logits(self, ids: Sequence[int]) -> Tensor:
        """[T,V], with a cache in float32."""
        context, made = self._context(len(ids)), torch.empty(len(ids), self.size)
        self._run(context, ids, 0, made)
        lib.llama_free(context)
        return made

    def continued(self, ids: Sequence[int], count: int) -> list[int]:
        """`count` greedy tokens, whatever ends a text."""
        context, made = self._context(len(ids) + count), list[int]()
        last, part = torch.empty(1, self.size), list(ids)
        for i in range(count):
            self._run(context, part, 0 if i == 0 else len(ids) + i - 1, last)
            part = [int(last[0].argmax())]
            made += part
        lib.llama_free(context)
        return made

    def _context(self, room: int) -> Any:
        options = lib.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = -(-room // 256) * 256
        options.n_threads = options.n_threads_batch = 1
        options.type_k = options.type_v = options.flash_attn_type = 0
        context = lib.llama_init_from_model(self.model, options)
        if not context:
            raise RuntimeError(f"llama.cpp made no context of {room} tokens")
        return context

    def _run(self, context: Any, ids: Sequence[int], position: int, out: Tensor) -> None:
        """Append tokens at a position; the logits of the last ones, as many as `out` [n,V] has rows."""
        batch = lib.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens, first = len(ids), len(ids) - len(out)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position + i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, i >= first
        code = lib.llama_decode(context, batch)
        lib.llama_batch_free(batch)
        if code:
            raise RuntimeError(f"llama_decode failed with {code} on {len(ids)} tokens")
        for i, row in enumerate(out):
            logits = lib.llama_get_logits_ith(context, first + i)
            row.copy_(torch.from_numpy(np.ctypeslib.as_array(logits, (self.size,))))
