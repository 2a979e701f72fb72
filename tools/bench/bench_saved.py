"""Open a saved session, or compute it: the bundled model, a prompt of its calibration text, alternating; and what the
opened session then gives for the 128 tokens that follow.

python tools/bench/bench_saved.py [--tokens 1500] [--rounds 7] [--threads 2] [--only exact,cachegen]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
from turns import REFERENCE, head, median_range, ratios, row

import accel
from accel.compiler.quality.divergence import divergence, log_odds
from accel.ir.recipe import Recipe

AFTER = 128  # tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="exact,cachegen", help="exact, or methods of kv.file")
    options = parser.parse_args()
    text = (REFERENCE / "calibration.txt").read_text(encoding="utf-8")
    numbers = (
        "file, MB",
        "compute, ms",
        "open, ms",
        "processor, ms",
        "ratio (range)",
        "KL",
        "same token",
    )
    head("saved with", *(f">{name}" for name in numbers))
    for name in options.only.split(","):
        recipe = "base" if name == "exact" else Recipe(name=name, tables={"kv.file": {"use": name}})
        with (
            tempfile.TemporaryDirectory() as folder,
            accel.optimize(REFERENCE, recipe, verify=False) as built,
            accel.load(built.artifact.path, threads=options.threads) as model,
        ):
            assert model.tokenizer is not None
            ids = np.array(model.tokenizer.encode(text, special=False))[None]
            tokens, after = np.split(ids[:, : options.tokens + AFTER], [options.tokens], 1)
            file = Path(folder) / "session"
            computed, opened, worked = [], [], []
            for _ in range(options.rounds + 1):  # the first opens the graphs
                start = time.perf_counter()
                with model.session() as session:
                    session.prompt(tokens)
                    computed.append(time.perf_counter() - start)
                    session.save(file)
                    want = log_odds(session.run(after)[0])
                start, busy = time.perf_counter(), time.process_time()
                with model.open_session(file) as session:
                    opened.append(time.perf_counter() - start)
                    worked.append(time.process_time() - busy)
                    lost = divergence(want, log_odds(session.run(after)[0]))
            size = file.stat().st_size / 1e6
        spent = (f"{median(x[1:]) * 1e3:.0f}" for x in (computed, opened, worked))
        row(
            f"`{name}`", f"{size:.2f}", *spent, median_range(ratios(computed[1:], opened[1:]), 1),
            f"{lost.kl / AFTER:.4f}", f"{lost.same / AFTER:.3f}",
        )  # fmt: skip


if __name__ == "__main__":
    main()
