"""Drafted tokens that fall with `specbranch`, by the parts of the method: the paper's ablation, on a text that nothing
learned from.

    python tools/bench/rollback.py TEXT [--prompts 16] [--size 64] [--tokens 64] [--temperature 0]

Each prompt is the beginning of another part of TEXT. `pearl` has neither branches nor a predictor. Printed are the
verified drafted tokens that fell, for each token that came and as a share of those verified, and the tokens of a call.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import turns
import typer

import accel
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.loop.autoregressive import Autoregressive
from accel.runtime.loop.pearl import Pearl
from accel.runtime.loop.specbranch import Specbranch
from accel.runtime.sample.standard import Standard

LENGTH = 6  # tokens that all draft ahead


def run(
    text: Path, prompts: int = 16, size: int = 64, tokens: int = 64, temperature: float = 0
) -> None:
    """A line for each."""
    recipe = {"loop": {"use": "specbranch", "predictor": True}, "draft": {"use": "model"}}
    with accel.optimize(str(turns.REFERENCE), recipe, max_context=1024) as model:
        tokenizer, trained = model.tokenizer, str(turns.REFERENCE / "specbranch.safetensors")
        assert tokenizer is not None, "the model reads text"
        ids = np.array(tokenizer.encode(text.read_text(encoding="utf-8", errors="ignore")))
        starts = np.linspace(0, ids.size - size, prompts).astype(int)
        parts = [ids[start : start + size] for start in starts]
        plain = {"branches": 3, "ahead": LENGTH}
        loops = {
            "`pearl`": Pearl(LENGTH),
            "branches alone": Specbranch(**plain, threshold=0),
            "branches, drafts end by `threshold`": Specbranch(**plain),
            "branches, predictor": Specbranch(**plain, predictor=True, trained=trained),
        }

        def decoded(loop, figures=None):
            found = []
            for number, part in enumerate(parts):
                sampler, rng = Standard(temperature=temperature), np.random.default_rng(number)
                row = Row(part, sampler, rng, limit=tokens, max_context=1024)
                with model.session() as session:
                    for _ in loop.tokens(session, [row], DecodeContext({}, None, model)):
                        pass
                    calls = session.stats["calls"]
                found.append(row.tokens)
                if figures is not None:
                    figures.update(row.drafting)
                    figures.update(tokens=len(row.tokens), calls=calls)
            return found

        want = decoded(Autoregressive())
        turns.head(
            "drafts", "fell, for each token", "fell, of the verified", "tokens of a call", "equal"
        )
        for name, loop in loops.items():
            figures = Counter[str]()
            same = sum(a == b for a, b in zip(decoded(loop, figures), want, strict=True))
            fell = figures["drafted"] - figures["accepted"]
            turns.row(
                name,
                f"{fell / figures['tokens']:.2f}",
                f"{fell / figures['drafted']:.2f}",
                f"{figures['tokens'] / figures['calls']:.2f}",
                f"{same} of {len(want)}",
            )


if __name__ == "__main__":
    typer.run(run)
