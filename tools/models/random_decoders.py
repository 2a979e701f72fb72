"""Compile random small decoders and compare them with their own modules.

`python tools/models/random_decoders.py --cases 2000 --seed 1 --log build/random.jsonl` goes on where the log
ends. Each case is right, refused (with a reason), wrong or crashed; it leaves with 1 after the last two.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.attention.flex_attention as flex
from decoders.model import build
from decoders.spec import Spec, differences, random_spec
from torch import Tensor, nn

import accel
from accel import AccelError
from accel.ir.capture.logits import logits_of

CONTEXT = 48
TOLERANCE = 1e-3  # of the largest logit
# An error in these words is accel's own fault, not a reason why a model is refused.
FAULTS = ("Report it", "differs from the module", "Report it with the model's configuration")


@dataclass(frozen=True)
class Result:
    """What became of one case."""

    verdict: str  # right, refused, wrong, crashed
    about: str = ""


def reference(model: nn.Module, tokens: Tensor) -> np.ndarray:
    """The module's logits [B,T,V]."""
    with torch.no_grad():
        return logits_of(model(tokens)).numpy()


def compare(model: nn.Module, compiled: accel.CompiledModel, vocab: int, seed: int) -> str:
    """The first way of running in which the compiled model leaves its module; none: empty."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab, (3, min(29, compiled.facts.max_context)), generator=generator)
    length, ids = tokens.shape[1], tokens.numpy()
    want = reference(model, tokens)
    lengths = np.array([length - 3, 1, 14])
    ragged = tokens.clone()
    with compiled.session(3) as whole, compiled.session(3) as split, compiled.session(3) as rows:
        ways = [("prefill", whole.run(ids), want)]
        for start, end in ((0, 1), (1, 12), (12, 13), (13, 14), (14, length - 3)):
            ways.append((f"cached {start}:{end}", split.run(ids[:, start:end]), want[:, start:end]))
        split.rewind([9, 4, 17])
        other = torch.randint(0, vocab, (3, 5), generator=generator)
        for row, held in enumerate((9, 4, 17)):
            ragged[row, held : held + 5] = other[row]
        after = reference(model, ragged)
        got = split.run(other.numpy())
        for row, held in enumerate((9, 4, 17)):
            ways.append((f"rewound row {row}", got[row], after[row, held : held + 5]))
        got = rows.run(ids, lengths)
        for row, count in enumerate(lengths):
            ways.append((f"ragged row {row}", got[row, :count], want[row, :count]))
        part = np.stack([ids[row, count : count + 3] for row, count in enumerate(lengths)])
        got = rows.run(part)
        for row, count in enumerate(lengths):
            ways.append((f"after padding row {row}", got[row], want[row, count : count + 3]))
    scale = max(1.0, float(np.abs(want).max()))
    for name, left, right in ways:
        error = float(np.abs(left - right).max()) / scale
        if not error <= TOLERANCE:  # NaN too
            return f"{name}: logits differ by {error:.1e} of the largest"
    return ""


def attempt(spec: Spec, target: str = "eager") -> Result:
    """Compile one spec and compare it."""
    model = build(spec)
    try:
        with accel.optimize(model, target=target, max_context=CONTEXT, max_batch=3) as compiled:
            found = compare(model, compiled, spec.vocab, spec.case)
    except AccelError as error:
        fault = any(words in str(error) for words in FAULTS)
        return Result("crashed" if fault else "refused", f"{type(error).__name__}: {error}")
    except Exception as error:  # what a user must never see
        return Result("crashed", f"{type(error).__name__}: {error}")
    return Result("wrong", found) if found else Result("right")


def main() -> int:
    """Run the cases that the log lacks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=200, help="how many cases")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the first case")
    parser.add_argument("--onnx", type=int, default=5, help="every n-th case is built to ONNX")
    parser.add_argument(
        "--log", type=Path, help="results, one JSON per line; cases in it are not run again"
    )
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True  # the same mathematics, not compiled first
    done: dict[int, str] = {}
    if options.log and options.log.exists():
        lines = map(json.loads, options.log.read_text(encoding="utf-8").splitlines())
        done = {line["case"]: line["verdict"] for line in lines if line["seed"] == options.seed}
    cases = range(options.first, options.first + options.cases)
    counts = Counter(done[c] for c in cases if c in done)
    start = time.perf_counter()
    for case in cases:
        if case in done:
            continue
        spec = random_spec(case, options.seed)
        target = "onnx" if case % options.onnx == 0 else "eager"
        result = attempt(spec, target)
        counts[result.verdict] += 1
        if options.log:
            line = {"case": case, "seed": options.seed, "target": target, **vars(result)}
            with options.log.open("a", encoding="utf-8") as log:
                log.write(json.dumps(line) + "\n")
        if result.verdict != "right":
            print(
                f"{case} {result.verdict} ({target}): {result.about}\n    {differences(spec)}",
                flush=True,
            )
    print(
        f"{dict(counts)} of {len(cases)} cases, seed {options.seed}, {time.perf_counter() - start:.0f} s"
    )
    return 1 if counts["wrong"] or counts["crashed"] else 0


if __name__ == "__main__":
    sys.exit(main())
