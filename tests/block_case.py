"""Blocks of masks behind a text: what one masked call of transformers says of them, and plain decoding by it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import models
import numpy as np
import torch

from accel.ir.axis import Axis
from accel.runtime.decode.context import DecodeContext
from accel.runtime.sample.standard import Standard

from .draft_case import rows_of
from .tree_case import with_trees

AXIS = Axis("loop", "accel.runtime.loop")
MASK, NEW = 3, 17
PROMPTS = [np.random.default_rng(n).integers(4, 50, n) for n in (9, 5, 14)]


@dataclass(frozen=True)
class Case:
    """Options of a loop, and what it decodes by them, plainly: (a prompt, new tokens) -> tokens, and calls behind the
    prompt's.
    """

    options: dict[str, Any]
    plain: Callable[[np.ndarray, int], tuple[list[int], int]]

    def __str__(self) -> str:
        return str(self.options)


def sight(text: int, tree: np.ndarray) -> np.ndarray:
    """What each token sees of a text and of a call behind it: the text causally, the call as `tree` says."""
    size = text + len(tree)
    seen = np.tri(size, dtype=bool)
    seen[text:, text:] = tree
    return seen


def whole(module, ids: np.ndarray, places: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """The logits [T,V] of one call of transformers with a mask that says what each token sees."""
    window = getattr(module.config, "sliding_window", None)
    if window:
        seen = seen & (places[:, None] - places < window)
    added = torch.zeros(1, 1, *seen.shape).masked_fill(~torch.from_numpy(seen), -1e30)
    with torch.no_grad():
        out = module(
            torch.from_numpy(ids)[None],
            attention_mask=added,
            position_ids=torch.from_numpy(places)[None],
            use_cache=False,
        )
    return out.logits[0].numpy()


def cached(session) -> list[np.ndarray]:
    """The keys, values and positions of what each row holds, as they are stored."""
    found = []
    for name, buffer in session._core.backend.buffers().items():
        along = 1 if name.endswith("pos") else 2
        for row, held in zip(np.asarray(buffer), session.lengths.tolist(), strict=True):
            found.append(np.take(row, np.arange(held), along - 1).copy())
    return found


@cache
def module():
    """A Llama that is sure of some tokens."""
    found = models.ARCHITECTURES["llama"]()
    with torch.no_grad():
        found.lm_head.weight.mul_(2)
    return found


@cache
def compiled():
    return with_trees(module(), target="eager", max_context=96, max_batch=3, verify=False)


def after(text: list[int]) -> np.ndarray:
    """The logits [V] after a text."""
    size = len(text)
    return whole(module(), np.array(text), np.arange(size), np.tri(size, dtype=bool))[-1]


def behind(text: list[int], block: list[int]) -> np.ndarray:
    """The logits [K,V] of a block behind a text: it sees that and itself."""
    ids = np.array([*text, *block])
    seen = sight(len(text), np.ones((len(block), len(block)), bool))
    return whole(module(), ids, np.arange(ids.size), seen)[len(text) :]


def odds(logits: np.ndarray) -> np.ndarray:
    """Probabilities [n,V], none of the mask."""
    scores = logits.astype(np.float64)
    scores[:, MASK] = -np.inf
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True)


def greedy(prompt: np.ndarray, new: int) -> list[int]:
    text = prompt.tolist()
    for _ in range(new):
        text.append(int(after(text).argmax()))
    return text[prompt.size :]


def decoded(
    name: str, prompts: list[np.ndarray], new: int = NEW, watch: Any = None, **options: Any
) -> tuple[list[list[int]], int]:
    """The tokens of rows that a loop decodes together, and its calls behind the prompts'; `watch(session, rows)` is
    called at every token.
    """
    loop = AXIS.build(name, **{"mask": MASK, **options})
    rows = rows_of(prompts, Standard(), 0, limit=new, max_context=96)
    with compiled().session(len(prompts)) as session:
        for _ in loop.tokens(session, rows, DecodeContext()):
            if watch is not None:
                watch(session, rows)
        calls = int(session.stats["calls"]) - 1
    return [row.tokens for row in rows], calls
