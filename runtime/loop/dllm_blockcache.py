"""Fast-dLLM's block caches (arXiv:2505.22618): calls within a block reuse the keys and values of other blocks."""

from __future__ import annotations

from dataclasses import dataclass

from accel.runtime.loop.dllm_threshold import DllmThreshold


@dataclass(frozen=True)
class DllmBlockcache(DllmThreshold):
    """Every block begins with a call of the whole canvas, which makes all keys and values anew. Later calls take, with
    `cache` = prefix, the block and the masks behind it; with dual, the block alone, in place.

    Where logits are of the token before, that one is in the calls too, so that no slot's logits come from outside.
    """

    cache: str = "dual"
