"""Modules that compute otherwise in long sequences, held to the range in which they do not.

A cache keeps what a token's key was when it was written. Some rotary embeddings turn every position
anew once the sequence is longer than some length, and a sparse attention looks at all keys only while
there are few: up to there the cached answer is exact, and past there nothing exact can be cached.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from accel.ir.capture.traits import Limit, Swaps


@contextlib.contextmanager
def short_forms(model: nn.Module, swaps: Swaps) -> Iterator[None]:
    """Hold such modules to what they do in short sequences."""
    with contextlib.ExitStack() as held, torch.no_grad():
        for name in swaps.rotaries:
            held.enter_context(_rotary_held(model.get_submodule(name)))
        for name in swaps.indexers:
            module: Any = model.get_submodule(name)
            every = _choice(module)[1]
            module.forward = lambda hidden_states, *_, every=every, **__: every(hidden_states)
            held.callback(delattr, module, "forward")
            if hasattr(module, "build_block_mask"):  # of the blocks that it chose
                module.build_block_mask = _unchosen
                held.callback(delattr, module, "build_block_mask")
        yield


def limit_of(module: nn.Module, longest: int) -> Limit:
    """How long such a module is exact, up to `longest`, with the reason."""
    if is_indexer(module):
        return _choice(module)[0], _SPARSE
    with torch.no_grad():
        return _rotary_limit(module, longest)


def is_indexer(module: nn.Module) -> bool:
    """Whether a module chooses some of the keys for each query, as DeepSeek sparse attention does."""
    named = type(module).__name__.endswith("Indexer")
    return named and pools(module) is None and any(hasattr(module, n) for n in _CHOICES)


def pools(module: nn.Module) -> int | None:
    """How many tokens a module makes one key of (DeepSeek-V4); none where each token has its own."""
    rate = getattr(module, "compress_rate", None)
    return rate if isinstance(rate, int) and rate > 1 else None


def turns_anew(module: nn.Module) -> bool:
    """Whether a module's rotary embedding turns every position anew in long sequences."""
    return any("dynamic" in kind or kind == "longrope" for kind in _types(module).values())


_SPARSE = (
    "beyond that its sparse attention skips keys by an index that accel does not cache; up to it "
    "every query attends to all keys. Use shorter prompts or a model with dense attention"
)


def _choice(module: Any) -> tuple[int, Callable[[Tensor], Tensor]]:
    """Up to how many tokens an indexer chooses all keys, and what it gives for x [B,T,E] then."""
    return next(f(module) for name, f in _CHOICES.items() if hasattr(module, name))


def _of_keys(module: Any) -> tuple[int, Callable[[Tensor], Tensor]]:
    """Ids of keys [B,T,T]."""

    def every(x: Tensor) -> Tensor:
        batch, length = x.shape[:2]
        return torch.arange(length, device=x.device).expand(batch, length, length)

    return int(module.index_topk), every


def _of_blocks(module: Any) -> tuple[int, Callable[[Tensor], Tensor]]:
    """Ids of blocks of keys, which only make a mask."""
    return int(module.topk_blocks) * int(module.block_size), lambda x: x.new_zeros(1)


def _unchosen(_: Tensor, attention_mask: Tensor, *__: Any) -> Tensor:
    """The mask [B,1,T,T] of an attention that leaves no block out."""
    return attention_mask


def _of_pooled(module: Any) -> tuple[int, Callable[[Tensor], Tensor]]:
    """A mask [B,1,T,T] of the keys that are seen, chosen by blocks; those of the last, unfinished one are always."""

    def every(x: Tensor) -> Tensor:
        return torch.ones(x.shape[0], 1, x.shape[1], x.shape[1], dtype=torch.bool)

    return int(module.token_budget) + int(module.compress_ratio) - 1, every


_CHOICES: dict[str, Callable[[Any], tuple[int, Callable[[Tensor], Tensor]]]] = {
    "index_topk": _of_keys,
    "topk_blocks": _of_blocks,
    "token_budget": _of_pooled,
}


def _types(module: nn.Module) -> dict[str | None, str]:
    """Kind of layer (none where all are alike) -> its kind of rotary embedding."""
    found: Any = getattr(module, "rope_type", None)
    return dict(found) if isinstance(found, dict) else {None: str(found)}


def _rotary_limit(module: nn.Module, longest: int) -> Limit:
    """The longest sequence in which every position turns as it does in a short one, by trying."""
    with _rotary_held(module):
        whole = _tables(module, longest)

    def same(length: int) -> bool:
        other = copy.copy(module)
        other._buffers = dict(module._buffers)
        found = _tables(other, length)
        return all(
            torch.allclose(a, b[:, :length], rtol=0, atol=1e-6)
            for a, b in zip(found, whole, strict=True)
        )

    low, high = 1, longest + 1
    while high - low > 1:
        middle = longest if high > longest else (low + high) // 2
        low, high = (middle, high) if same(middle) else (low, middle)
    kinds = sorted(set(_types(module).values()))
    act = "set short_factor to long_factor" if "longrope" in kinds else "use rope_type 'yarn'"
    return low, (
        f"its rotary embedding ({', '.join(kinds)}) changes the rotation of all positions in longer sequences, "
        f"including cached keys. For longer sequences {act} in the configuration's rope_parameters"
    )


def _tables(module: nn.Module, length: int) -> list[Tensor]:
    """Cosines and sines (or complex numbers) [1,T,..] of each kind of layer."""
    x, positions = torch.zeros(1), torch.arange(length)[None]
    tables: list[Tensor] = []
    for layer in _types(module):
        out = module(x, positions) if layer is None else module(x, positions, layer)
        tables += [out] if isinstance(out, Tensor) else list(out)
    return tables


def _asks(module: nn.Module) -> bool:
    """Whether a rotary embedding takes its frequencies and a scale by the length of each call, as Phi-3.5-MoE's."""
    return type(module).__name__ == "PhimoeRotaryEmbedding"


@contextlib.contextmanager
def _rotary_held(module: Any) -> Iterator[None]:
    """Short sequences' frequencies, whatever the length."""
    kinds, buffers, before = module.rope_type, dict(module._buffers), dict(vars(module))
    first, *_ = _tables(module, 1)
    if _asks(module):
        found = module.rope_init_fn(module.config, first.device, 1)[0], float(first[0, 0, 0])
        module.rope_init_fn = lambda *_: found
        module.config = SimpleNamespace(rope_parameters={"rope_type": "default"})
    module.rope_type = dict.fromkeys(kinds, "held") if isinstance(kinds, dict) else "held"
    try:
        yield
    finally:
        vars(module).clear()  # of what the module keeps once a sequence was long, too
        vars(module).update(before)
        module._buffers.clear()
        module._buffers.update(buffers)
