"""Every causal-LM type of transformers, built to ONNX and compared: `python tools/matrix/coverage.py`.

Each type gets a small random-weight model (accel.compiler.smoke.tiny_models). Compared with the module's own forward:
the prefill's logits, 16 single-token steps, a call of several tokens after a rewind, and a ragged
batch of three. Results are kept in build/coverage.json, so that a run goes on where it was stopped;
`--write` puts the table into docs/figures/coverage.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import warnings
import zlib
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import accel
from accel.compiler.smoke.clone import own_logits
from accel.compiler.smoke.tiny_models import CONTEXT, small_model
from accel.ir.capture.inspect import inspect
from accel.ir.errors import AccelError, Miscompiled

ROOT = Path(__file__).resolve().parents[2]
RESULTS, TABLE = ROOT / "build/coverage.json", ROOT / "docs/figures/coverage.md"
TOLERANCE = 1e-3  # of the largest logit, at least 1; as in tools/models/random_decoders.py
STEPS = 16
SECONDS = 150  # of processor time, for one type
STATES = ("right", "refused", "wrong", "crashed", "no model")
PARTS = ("prefill", "steps", "rewind", "ragged")


@dataclass
class Result:
    """What became of one type. `errors` by part, relative to the largest logit."""

    type: str
    state: str
    why: str = ""
    tied: bool = False
    layers: int = 0
    kinds: str = ""
    errors: dict[str, float] | None = None
    seconds: float = 0.0


def causal_types() -> list[str]:
    """Every model type that transformers offers as a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def reference(model: nn.Module, tokens: list[int]) -> Tensor:
    """The module's own logits [T,V] of one sequence."""
    return own_logits(model, torch.tensor([tokens]))[0]


def check(model: nn.Module, compiled: accel.CompiledModel) -> dict[str, float]:
    """The largest error of each part, relative to the largest logit."""
    rng = np.random.default_rng(3)
    vocab = compiled.facts.vocab_size
    ids = rng.integers(3, vocab, 11 + STEPS + 9).tolist()  # 0..2 are pad, bos and eos

    def error(got: Any, tokens: list[int], rows: slice) -> float:
        want = reference(model, tokens)[rows]
        scale = max(1.0, float(want.abs().max()))
        worst = float((torch.from_numpy(np.array(got)) - want).abs().max()) / scale
        return worst if worst == worst else float("inf")

    found = {}
    with compiled.session(batch=1) as session:
        found["prefill"] = error(session.run([ids[:11]])[0], ids[:11], slice(0, 11))
        whole = ids[: 11 + STEPS]
        rows = [session.run([[t]])[0][0] for t in whole[11:]]
        found["steps"] = error(rows, whole, slice(11, None))
        session.rewind(14)
        other = ids[:14] + ids[11 + STEPS :]
        found["rewind"] = error(session.run([other[14:]])[0], other, slice(14, None))
    lengths, width = [13, 5, 9], 13
    batch = [[*ids[i : i + n], *[0] * (width - n)] for i, n in enumerate(lengths)]
    with compiled.session(batch=3) as session:
        logits = session.run(batch, lengths=lengths)
        after = session.run([[7], [8], [9]])
        worst = []
        for i, n in enumerate(lengths):
            tokens = [*ids[i : i + n], 7 + i]
            worst.append(error([*logits[i][:n], after[i][0]], tokens, slice(0, None)))
        found["ragged"] = max(worst)
    return found


def measure(model_type: str, target: str = "onnx") -> Result:
    """Build one type and compare it."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    from transformers.utils import logging

    logging.set_verbosity_error()
    start = time.perf_counter()
    result = Result(model_type, "no model", tied=bool(zlib.crc32(model_type.encode()) & 1))
    try:
        model = small_model(model_type, result.tied)
        if refused := inspect(model).refused:
            return Result(model_type, "refused", _line(refused), result.tied)
        reference(model, [5, 6, 7, 8])
    except Exception as error:
        result.why = f"transformers: {type(error).__name__}: {_line(error)}"
        return result
    try:
        with accel.optimize(model, target=target, max_context=CONTEXT, max_batch=3) as compiled:
            result.layers = len(compiled.facts.layers)
            result.kinds = ", ".join(dict.fromkeys(x.attention for x in compiled.facts.layers))
            result.errors = check(model, compiled)
        bad = [f"{p} {e:.1e}" for p, e in result.errors.items() if not e <= TOLERANCE]
        result.state, result.why = ("wrong", ", ".join(bad)) if bad else ("right", "")
    except Miscompiled as error:
        result.state, result.why = "wrong", _line(error)
    except AccelError as error:
        result.state, result.why = "refused", _line(error)
    except Exception as error:
        result.state, result.why = "crashed", f"{type(error).__name__}: {_line(error)}"
    result.seconds = round(time.perf_counter() - start, 1)
    return result


def _bounded(model_type: str) -> Result:
    """`measure` in a process that ends when it takes too long."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    return measure(model_type)


def _line(error: Exception | str) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:297] + "..."


def run(types: list[str], done: dict[str, Any]) -> None:
    """Measure types in a process of their own; one that dies or hangs counts as crashed."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    RESULTS.parent.mkdir(exist_ok=True)
    pool: ProcessPoolExecutor | None = None
    for index, name in enumerate(types):
        pool = pool or ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        try:
            result = pool.submit(_bounded, name).result()
        except BrokenProcessPool:
            pool = None
            result = Result(name, "crashed", f"the process died, or took more than {SECONDS} s")
        done[name] = asdict(result)
        RESULTS.write_text(json.dumps(done, indent=1), encoding="utf-8")
        print(f"{index + 1}/{len(types)} {name}: {result.state} {result.why}", flush=True)
    if pool:
        pool.shutdown()


def table(results: dict[str, Any]) -> str:
    """docs/figures/coverage.md."""
    import onnxruntime
    import transformers

    count = Counter(r["state"] for r in results.values())
    total = ", ".join(f"{count[s]} {s}" for s in STATES)
    lines = [
        "# Coverage: every causal language model type of transformers",
        "",
        f"{len(results)} types: **{total}**. Made by `python tools/matrix/coverage.py --write` with transformers "
        f"{transformers.__version__}, torch {torch.__version__.split('+')[0]}, onnxruntime "
        f"{onnxruntime.__version__}.",
        "",
        "Each is a small model of random weights (`api/compiler/smoke/tiny_models.py`: head size not "
        "hidden/heads where it can "
        "be chosen, vocabulary 101, windows of 7), built to ONNX and compared with the module's own forward: "
        f"the logits of a prefill of 11 tokens, {STEPS} single-token steps over the cache, 9 tokens after a "
        "rewind to 14, and a ragged batch of three. The error is the largest difference of any logit, relative "
        f"to the largest logit (at least 1); right is at most {TOLERANCE:.0e}. *No model* is a type of which "
        "transformers itself makes no runnable random model.",
        "",
        "| type | result | layers | what they carry | head | error | reason |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, r in sorted(results.items()):
        error = f"{max(r['errors'].values()):.1e}" if r["errors"] else ""
        why = r["why"].replace("|", "\\|")
        head = "" if r["state"] == "no model" else "tied" if r["tied"] else "untied"
        cells = (name, r["state"], r["layers"] or "", r["kinds"], head, error, why)
        lines.append(f"| {' | '.join(str(c) for c in cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("types", nargs="*", help="model types; all by default")
    parser.add_argument(
        "--again", nargs="*", choices=STATES, help="measure again, of these results"
    )
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.relative_to(ROOT)}")
    args = parser.parse_args()
    known = causal_types()
    if bad := [t for t in args.types if t not in known]:
        parser.error(f"transformers has no causal model type {', '.join(bad)}")
    done = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    again = {*STATES} if args.again == [] else {*(args.again or [])}
    todo = args.types or [t for t in known if t not in done or done[t]["state"] in again]
    run(todo, done)
    print(dict(Counter(r["state"] for r in done.values())))
    if args.write:
        TABLE.write_text(table(done), encoding="utf-8")
    return int(any(done[t]["state"] in ("wrong", "crashed") for t in todo))


if __name__ == "__main__":
    sys.exit(main())
