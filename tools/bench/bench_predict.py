"""What `accel-compile explain` predicts of decoding, beside what is measured: a table for
docs/figures/details/builds.md.

    python tools/bench/bench_predict.py [RECIPE …] [--model DIR] [--threads N]

Each recipe is explained and built; a token's time is the least of `--steps` after each prompt (whatever else
the machine does only adds to it, and the rates of the prediction are least times too).
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import numpy as np
from turns import REFERENCE, head, row, seconds

import accel
from accel.compiler.explain import explain
from accel.compiler.explain.subject import subject
from accel.runtime.model.compiled import CompiledModel

RECIPES = ("base", "int8", "int4", "kv-int8", "snapkv", "unified-skip", "edge")


def measured(model: CompiledModel, prompt: int, steps: int) -> float:
    """Tokens per second of the fastest step after a prompt."""
    rng = np.random.default_rng(0)
    with model.session() as session:
        session.prompt(rng.integers(3, model.facts.vocab_size, (1, prompt)))
        best = float("inf")
        for token in rng.integers(3, model.facts.vocab_size, (steps, 1, 1)):
            best = min(best, seconds(lambda token=token: session.run(token).argmax()))
    return 1 / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*", default=list(RECIPES))
    parser.add_argument("--model", type=Path, default=REFERENCE)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--context", type=int, default=2048)
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    captured = subject(given.model, given.context, lambda facts: None)
    head("recipe", "prompt", "predicted, tokens/s", "measured", "predicted / measured")
    for recipe in given.recipes:
        told = explain(
            recipe, None, max_context=given.context, captured=captured, threads=given.threads
        )
        with accel.optimize(given.model, recipe, max_context=given.context, verify=False) as built:
            assert built.artifact is not None
            with accel.load(built.artifact.path, threads=given.threads) as model:
                for prompt, (_, said) in told.speed.items():
                    prompt = min(prompt, given.context - given.steps)
                    found = measured(model, prompt, given.steps)
                    speed = getattr(said, "tokens_per_second", float("nan"))
                    row(recipe, prompt, f"{speed:.0f}", f"{found:.0f}", f"{speed / found:.2f}")


if __name__ == "__main__":
    main()
