"""Open a saved session, or compute it: the bundled model, a prompt of its calibration text, alternating.

python tools/bench/bench_saved.py [--tokens 1500] [--rounds 7] [--threads 2] [--only exact,cachegen]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "train"))
from reference_data import REFERENCE

import accel
from accel.ir.recipe import Recipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="exact,cachegen", help="exact, or methods of kv.file")
    options = parser.parse_args()
    text = (Path(REFERENCE) / "calibration.txt").read_text(encoding="utf-8")
    for name in options.only.split(","):
        recipe = "base" if name == "exact" else Recipe(name=name, tables={"kv.file": {"use": name}})
        with (
            tempfile.TemporaryDirectory() as folder,
            accel.optimize(REFERENCE, recipe, verify=False) as built,
            accel.load(built.artifact.path, threads=options.threads) as model,
        ):
            assert model.tokenizer is not None
            tokens = np.array(model.tokenizer.encode(text, special=False)[: options.tokens])[None]
            file = Path(folder) / "session"
            computed, opened, worked = [], [], []
            for _ in range(options.rounds + 1):  # the first opens the graphs
                start = time.perf_counter()
                with model.session() as session:
                    session.prompt(tokens)
                    computed.append(time.perf_counter() - start)
                    session.save(file)
                start, busy = time.perf_counter(), time.process_time()
                with model.open_session(file):
                    opened.append(time.perf_counter() - start)
                    worked.append(time.process_time() - busy)
            size = file.stat().st_size / 1e6
        pairs = sorted(a / b for a, b in zip(computed[1:], opened[1:], strict=True))
        compute, open_, work = (statistics.median(x[1:]) * 1e3 for x in (computed, opened, worked))
        print(
            f"| {name} | {size:.2f} MB | computed in {compute:.0f} ms | opened in {open_:.0f} ms, "
            f"{work:.0f} of a processor | {statistics.median(pairs):.1f} ({pairs[0]:.1f}..{pairs[-1]:.1f}) |",
            flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
