"""Peak memory of a session of a long prompt, by how the cache is stored, beside what `accel-compile explain` says.

python tools/bench/bench_memory.py [--context 16384] [--threads 2] [--only float32,kv-int8,kivi-2]

Two layers of 16 KV heads of 64, in int4. Each session in a fresh process, whose peak is counted from after a short
prompt on: so the graphs are open, and weights are there. Linux alone tells the peak.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from turns import VOCABULARY, llama, row

import accel
from accel.compiler.explain.explain import explain
from accel.compiler.explain.subject import subject
from accel.ir.recipe import Recipe

FEW = 300


def memory() -> dict[str, int]:
    """Resident bytes of this process: now, and the most since that was cleared."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines if line.startswith(("VmRSS", "VmHWM")))
    return {name: int(value.split()[0]) * 1024 for name, value in found.items()}


def session(folder: str, context: int, threads: int) -> dict[str, float]:
    """What a session of so many tokens takes, in this process."""
    tokens = np.random.default_rng(0).integers(3, VOCABULARY, (1, context))
    with accel.load(folder, threads=threads) as model, model.session() as one:
        one.run(tokens[:, :FEW], last_only=True)
        one.run(tokens[:, :1])
        one.rewind(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = memory()["VmRSS"]
        held = one.stats["kv_bytes"]
        one.run(tokens, last_only=True)
        one.end_prompt()
        one.run(tokens[:, :1])
        peak = memory()["VmHWM"] - before
        return {"peak": peak + held, "kv": one.stats["kv_bytes"], "most": one.kv_most}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="float32,kv-int8,kivi-4,kivi-2", help="recipes of codecs")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(session(options.child, options.context, options.threads)))
        return
    longest = options.context + 1
    module = llama(longest)
    captured = subject(module, longest, lambda *_: None)
    for name in options.only.split(","):
        recipe = Recipe.load(["int4"] if name == "float32" else ["int4", name])
        told = explain(recipe, None, max_context=longest, captured=captured, speed=False)
        assert told.cache is not None
        formula = told.cache.bytes(options.context)
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out"
            accel.optimize(module, recipe, out=out, max_context=longest, verify=False).close()
            more = ["--context", str(options.context), "--threads", str(options.threads)]
            command = [sys.executable, __file__, "--child", str(out), *more]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = {n: x / 1e6 for n, x in json.loads(done.stdout.splitlines()[-1]).items()}
        row(
            name, f"formula {formula / 1e6:.1f} MB", f"held {found['kv']:.1f}", f"most held {found['most']:.1f}",
            f"peak of the process {found['peak']:.1f}, {found['peak'] / (formula / 1e6):.2f} of the formula",
        )  # fmt: skip


if __name__ == "__main__":
    main()
