"""Twenty like requests, one after another: what a drafter gains that remembers earlier ones.

    python tools/bench/bench_like.py [--requests 20] [--tokens 96] [--rounds 5] [--kind code ...]

Requests of a kind are one prompt under headings that differ in a number, as an agent asks again and again. Each is
decoded plainly, by `prompt-lookup`, by `suffix-tree`, and by `suffix-tree` with a store that all requests share, in
turns; every round begins with an empty store. Prints medians over the requests after the first of tokens a second
through plain decoding's, new tokens of a call of all layers, and the shared store through `prompt-lookup`. Raises where
a token is not plain decoding's.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.progress import track
from turns import REFERENCE, head, row

import accel
from accel.reference.kinds import KINDS, prompts

STDERR = Console(stderr=True)  # where progress goes: the table is for a page
WAYS: dict[str, Any] = {
    "plain": "base",
    "prompt-lookup": "prompt-lookup",
    "suffix-tree": "suffix-tree",
    "suffix-tree, shared": {
        "draft": {"use": "suffix-tree", "shared": True},
        "verify": {"use": "sample-match"},
        "length": {"use": "fixed", "tokens": 31},
    },
}
Figures = dict[str, list[tuple[float, float]]]  # of each way: tokens a second, tokens of a call


def requests(kind: str, count: int) -> list[str]:
    """One prompt under so many headings."""
    (text,) = prompts(kind, 1)
    return [f"# request {i}\n{text}" for i in range(1, count + 1)]


def one_round(folder: Path, texts: list[str], tokens: int, turn: int) -> Figures:
    """All requests, each in every way; the first one's figures are left out."""
    models = {way: accel.load(folder / way) for way in WAYS}
    found: Figures = {way: [] for way in WAYS}
    try:
        for model in models.values():  # opens graphs; ends before it has anything to remember
            model.generate(texts[0][-40:], 2, eos=[])
        for i, text in enumerate(texts):
            outputs = {}
            for way in sorted(WAYS, key=lambda way: (list(WAYS).index(way) + i + turn) % len(WAYS)):
                outputs[way] = models[way].generate(text, tokens, eos=[])
                stats = outputs[way].stats
                if i:
                    calls = stats["tokens"] / stats["calls"]
                    found[way].append((stats["tokens_per_second"], calls))
            for way, output in outputs.items():
                if output.tokens != outputs["plain"].tokens:
                    raise RuntimeError(
                        f"{way}: request {i + 1} has other tokens than plain decoding"
                    )
    finally:
        for model in models.values():
            model.close()
    return found


def together(rounds: list[Figures]) -> dict[str, tuple[float, float]]:
    """Of each way: the median ratio of a request's speed to plain decoding's, and the median of tokens of a call."""
    found = {}
    for way in WAYS:
        pairs = [
            (own[0] / plain[0], own[1])
            for each in rounds
            for own, plain in zip(each[way], each["plain"], strict=True)
        ]
        found[way] = (median(p[0] for p in pairs), median(p[1] for p in pairs))
    return found


def line(kind: str, figures: dict[str, tuple[float, float]], gain: float) -> None:
    cells = [
        f"{ratio:.2f} ({calls:.1f})" for way, (ratio, calls) in figures.items() if way != "plain"
    ]
    row(kind, *cells, f"{gain:.2f}")


def gain_of(rounds: list[Figures]) -> float:
    """The median ratio of a request's speed with the shared store to its speed by prompt lookup."""
    ways = ("suffix-tree, shared", "prompt-lookup")
    return median(
        a[0] / b[0] for each in rounds for a, b in zip(*(each[w] for w in ways), strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=96, help="new ones of each request")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="default: all")
    given = parser.parse_args()
    if given.requests < 2:
        parser.error("--requests: give at least 2; the first has none before it")
    with TemporaryDirectory() as folder:
        for way, recipe in track(WAYS.items(), "build", transient=True, console=STDERR):
            accel.optimize(REFERENCE, recipe, out=Path(folder) / way, verify=False).close()
        ways = [f"`{way}`" for way in WAYS if way != "plain"]
        head("kind", *ways, "shared / prompt-lookup")
        for kind in given.kind or KINDS:
            texts = requests(kind, given.requests)
            rounds = [
                one_round(Path(folder), texts, given.tokens, turn)
                for turn in track(range(given.rounds), kind, transient=True, console=STDERR)
            ]
            line(kind, together(rounds), gain_of(rounds))


if __name__ == "__main__":
    main()
