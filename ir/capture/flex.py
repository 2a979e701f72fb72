"""flex_attention written out while a module is exported: its own operator hides scores in sub-graphs."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as theirs


@contextlib.contextmanager
def flex_uncompiled() -> Iterator[None]:
    """Inside, `flex_attention` runs as it is: compiling it for every length would take seconds each."""
    with (
        patch.object(theirs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),
        torch.compiler.set_stance("force_eager"),
    ):
        yield


@contextlib.contextmanager
def flex_written_out() -> Iterator[None]:
    """Inside, `flex_attention` traces to softmax(score_mod(q kᵀ)) v, and a block mask is its mask_mod.

    The functions themselves stay, since a module may hold them under any name, or compiled; what they
    call is replaced.
    """
    with (
        flex_uncompiled(),
        patch.object(theirs, "flex_attention_hop", _written_out),
        patch.object(theirs, "setup_compilation_env", lambda: contextlib.nullcontext("eager")),
        patch.object(theirs, "create_mask", lambda *_: None),
        patch.object(theirs, "_convert_mask_to_block_mask", lambda *_, **__: (None, None)),
        patch.object(theirs, "_create_sparse_block_from_block_mask", _block_mask),
        patch.object(theirs, "_enforce_mem_layouts", lambda q, k, v: (q, k, v)),
        patch.object(
            theirs, "_validate_device", lambda q, k, v: None
        ),  # it refuses gradients on CPUs
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def _written_out(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Any, block: Any, scale: float, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    """(q [B,H,T,D], k [B,G,S,D], v [B,G,S,Dv]) -> [B,H,T,Dv], log-sum-exp and maximum [B,H,T]."""
    repeat = q.shape[1] // k.shape[1]
    if repeat > 1:
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    b, h, i, j = (
        torch.arange(n, device=q.device).view([-1 if a == axis else 1 for a in range(4)])
        for axis, n in enumerate((*q.shape[:3], k.shape[2]))
    )
    scores = score_mod((q @ k.transpose(-1, -2)) * scale, b, h, i, j)
    if block[-1] is not theirs.noop_mask:
        scores = scores.masked_fill(~block[-1](b, h, i, j), float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1), scores.amax(-1)


def _block_mask(
    blocks: Any, mask_mod: Any, lengths: tuple[Any, Any], *_: object
) -> theirs.BlockMask:
    """A block mask of one block: only its `mask_mod` and lengths are read."""
    one = torch.ones(1, 1, 1, dtype=torch.int32)
    return theirs.BlockMask.from_kv_blocks(
        one, one[..., None] * 0, mask_mod=mask_mod, seq_lengths=lengths, compute_q_blocks=False
    )
