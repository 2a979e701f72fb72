"""Flat calls against padded ones on the bundled model, a batch of eight: processor time of one thread, in turns.

    python tools/bench/bench_flat.py [--artifact FOLDER] [--pairs 9]

Prints a table of calls, by the tokens of each row, and of whole generations. Processor time, since other work of the
machine adds to the time of the clock.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from turns import REFERENCE, head, in_turns, ratios, row, seconds

import accel
from accel.reference.kinds import prompts
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.draft.prompt_lookup import PromptLookup
from accel.runtime.length.fixed import Fixed
from accel.runtime.loop.autoregressive import Autoregressive
from accel.runtime.loop.speculative import Speculative
from accel.runtime.sample.standard import Standard
from accel.runtime.session import flat
from accel.runtime.tree.chain import Chain
from accel.runtime.verify.sample_match import SampleMatch

HELD = [300, 40, 200, 80, 128, 256, 30, 60]  # tokens of the rows before
CALLS = [
    [11, 1, 1, 1, 1, 1, 1, 1],
    [11, 1, 6, 1, 9, 1, 3, 2],
    [11, 8, 9, 10, 8, 11, 11, 8],
    [1, 0, 0, 1, 0, 0, 0, 0],
    [4, 4, 4, 4, 4, 4, 0, 0],
    [300, 20, 100, 4, 40, 256, 10, 60],
]
KINDS = ("code", "edit", "recall", "repetitive")  # two prompts of each
LIMITS = [96, 16, 96, 48, 96, 24, 64, 96]  # new tokens
METHODS: dict[str, Any] = {
    "draft": PromptLookup(),
    "verify": SampleMatch(),
    "length": Fixed(),
    "tree": Chain(),
}


def compare(what: str, run: Callable[[], None], pairs: int) -> None:
    """A line of milliseconds padded and flat, and the ratio: medians."""

    def with_share(share: float) -> float:
        flat.SHARE = share
        return seconds(run, time.process_time)

    ways = {"padded": partial(with_share, 0.0), "flat": partial(with_share, 0.9999)}
    padded, without = in_turns(ways, pairs, warm=1).values()  # the first one opens graphs
    spent = (f"{1e3 * median(each):.1f}" for each in (padded, without))
    row(what, *spent, f"{median(ratios(padded, without)):.2f}")


def measure(model: Any, pairs: int) -> None:
    rng = np.random.default_rng(0)
    with model.session(8) as session:
        session.run(rng.integers(3, model.facts.vocab_size, (8, max(HELD))), HELD, last_only=True)
        for counts in CALLS:
            ids = rng.integers(3, model.facts.vocab_size, (8, max(counts)))

            def call(ids: Any = ids, counts: Any = counts) -> None:
                session.run(ids, counts)
                session.rewind(HELD)

            few = pairs if max(counts) < 100 else max(1, pairs // 3)
            compare(", ".join(map(str, counts)), call, few)
    texts = [model.tokenizer.encode(text) for kind in KINDS for text in prompts(kind, 2)]
    for name, loop in (("plain decoding", Autoregressive()), ("prompt lookup", Speculative())):

        def generate(loop: Any = loop) -> None:
            rows = [
                Row(
                    np.array(text),
                    Standard(),
                    np.random.default_rng(0),
                    limit=limit,
                    max_context=1000,
                )
                for text, limit in zip(texts, LIMITS, strict=True)
            ]
            with model.session(8) as session:
                for _ in loop.tokens(session, rows, DecodeContext(METHODS)):
                    pass

        compare(name, generate, max(1, pairs // 3))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--artifact", help="of the bundled model, with [batch]; else it is built")
    parser.add_argument("--pairs", type=int, default=9, help="of each call")
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        artifact = given.artifact or str(Path(folder) / "flat")
        if given.artifact is None:
            tables = {"batch": {"use": "flat"}}
            accel.optimize(str(REFERENCE), tables, max_batch=8, out=artifact).close()
        for kernels in ("native", "grouped"):
            print()
            head(kernels, "padded, ms", "flat, ms", "ratio")
            with accel.load(artifact, kernels=kernels, threads=1) as model:
                measure(model, given.pairs)


if __name__ == "__main__":
    main()
