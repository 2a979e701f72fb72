"""What benchmarks share: a random Llama, turns of what is compared, figures of rounds, Markdown tables."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

REFERENCE = Path(str(files("accel.reference")))
VOCABULARY = 8000
Clock = Callable[[], float]
T = TypeVar("T")


def llama(context: int, **sizes: int) -> Any:
    """A random Llama for so many tokens: two layers of 16 heads of 64, or of other sizes of its configuration."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = dict(
        vocab_size=VOCABULARY, hidden_size=1024, intermediate_size=2816, num_hidden_layers=2,
        num_attention_heads=16, num_key_value_heads=16, max_position_embeddings=context,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**shape, **sizes})).eval()


def seconds(call: Callable[[], Any], clock: Clock = time.perf_counter) -> float:
    start = clock()
    call()
    return clock() - start


def in_turns(
    ways: Mapping[str, Callable[[], T]], rounds: int, warm: int = 0, quiet: float = 0.0
) -> dict[str, list[T]]:
    """What each way gives in each round after `warm` ones. Every round begins with another way; before each of them
    threads of the one before have `quiet` seconds to come to rest.
    """
    found: dict[str, list[T]] = {name: [] for name in ways}
    names = list(ways)
    for turn in range(-warm, rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            time.sleep(quiet)
            one = ways[name]()
            if turn >= 0:
                found[name].append(one)
    return found


def ratios(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """Of each round, from the least to the most."""
    return sorted(x / y for x, y in zip(a, b, strict=True))


def median_range(found: Sequence[float], digits: int = 2, scale: float = 1.0) -> str:
    """The median, and the least and the most."""
    middle, least, most = (
        f"{scale * x:.{digits}f}" for x in (median(found), min(found), max(found))
    )
    return f"{middle} ({least} .. {most})"


def head(*names: str) -> None:
    """Begin a Markdown table; columns whose name begins with > hold numbers."""
    print(f"| {' | '.join(name.removeprefix('>') for name in names)} |")
    print("".join("|---:" if name.startswith(">") else "|---" for name in names) + "|", flush=True)


def row(*cells: Any) -> None:
    """A line of a Markdown table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)
