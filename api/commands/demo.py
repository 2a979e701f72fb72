"""demo: compile and run the bundled model, and compare it with PyTorch."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accel.commands.console import error_text, progress, size, table
from accel.ir.errors import AccelError, InputError, extra
from accel.ir.version import VERSION

if TYPE_CHECKING:
    from accel.runtime.model.compiled import CompiledModel

EXAMPLES = """\b
Examples:
  accel-compile demo
  accel-compile demo --out ./artifact
"""
PROMPTS = (
    "def quicksort(items):\n",
    "import os\nimport sys\n\n\nclass Path",
    '    """Return the number of',
)
NEW_TOKENS = 64
NEAR_TIE = 1e-4  # two logits closer than this may swap places by rounding alone

_FRESH = """
import json, sys, time
start = time.perf_counter()
import accel
with accel.load(sys.argv[1]) as model:
    model.session().close()
    loaded = time.perf_counter() - start
    out = model.generate(json.loads(sys.argv[2]), int(sys.argv[3]))
heavy = sorted({"torch", "transformers"} & sys.modules.keys())
print(json.dumps({"seconds": loaded, "tokens": out.tokens, "heavy": heavy}))
"""


@dataclass
class _Plain:
    """The model in PyTorch, without accel; `tokens` and `seconds` of each prompt's continuation."""

    model: Any
    tokens: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0


def demo(
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the artifact in this folder.")
    ] = None,
) -> None:
    """Compile and run the bundled model.

    Compiles it, generates text, loads the artifact in a new process, compares the tokens with
    PyTorch and shows the speed of both. Takes under two minutes on two cores.
    """
    with extra("compile"):
        from accel.compiler.optimize import optimize

    start = time.perf_counter()
    source = reference()
    with ExitStack() as stack:
        if out is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="accel-demo-")))
            out = folder / "artifact"
        with progress("build") as show:
            model = stack.enter_context(optimize(source, "base", out=out, progress=show))
        _built(model)
        prompts = [_encode(model, text) for text in PROMPTS]
        _generated(model, prompts[0])
        fresh = _in_fresh_process(out, prompts)
        plain = _side_by_side(source, model, prompts)
        _check(plain, prompts, fresh)
    typer.echo(f"\ndone in {time.perf_counter() - start:.0f} s")


def reference() -> Path:
    """The folder of the bundled model. Raises InputError where it was not installed."""
    import accel.reference

    folder = Path(next(iter(accel.reference.__path__)))
    if not (folder / "model.safetensors").is_file():
        raise InputError(
            f"the bundled model is missing from {folder}; install accel {VERSION} again"
        )
    return folder


def _built(model: CompiledModel) -> None:
    report = model.report
    facts = report["model"]
    typer.echo(
        f"1. built: {facts['name']} with {facts['num_layers']} layers and "
        f"{facts['parameters'] / 1e6:.1f} M parameters -> an ONNX artifact of "
        f"{size(report['bytes']['total'])} in {report['seconds']['total']:.0f} s; "
        f"largest error {error_text(max(report['errors'].values(), default=None))}"
    )


def _encode(model: CompiledModel, text: str) -> list[int]:
    if model.tokenizer is None:
        raise InputError("the bundled model has no tokenizer.json; reinstall accel-compile")
    return list(model.tokenizer.encode(text))


def _generated(model: CompiledModel, prompt: list[int]) -> None:
    """Print one continuation as it comes."""
    typer.echo("2. generated:\n")
    typer.echo(PROMPTS[0], nl=False)
    with model.stream(PROMPTS[0], NEW_TOKENS) as stream:
        for piece in stream:
            typer.echo(piece, nl=False)
    typer.echo("\n")


def _in_fresh_process(artifact: Path, prompts: list[list[int]]) -> list[list[int]]:
    """The tokens that a new Python gives, which has seen nothing but the artifact."""
    arguments = [str(artifact), json.dumps(prompts), str(NEW_TOKENS)]
    run = subprocess.run(
        [sys.executable, "-c", _FRESH, *arguments], capture_output=True, text=True, check=False
    )
    if run.returncode:
        raise AccelError(f"the new process failed: {run.stderr.strip()[-500:]}")
    found = json.loads(run.stdout)
    if found["heavy"]:
        raise AccelError(f"the new process imported {' and '.join(found['heavy'])}")
    typer.echo(
        f"3. a new process, without torch and transformers, loaded it in {found['seconds']:.1f} s"
    )
    tokens: list[list[int]] = found["tokens"]
    return tokens


def _side_by_side(source: Path, model: CompiledModel, prompts: list[list[int]]) -> _Plain:
    """Continue each prompt greedily with transformers, in float32, on as many threads as accel
    takes, and with accel, in turn: what else runs on the machine slows both. Prints the speeds.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from accel.lowering.onnx.threads import default_threads

    torch.set_num_threads(default_threads())
    logging.disable_progress_bar()
    plain = _Plain(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval())
    mine, count = 0.0, 0
    for new_tokens in (2, NEW_TOKENS):  # the first round warms both up
        plain.tokens, plain.seconds, mine, count = [], 0.0, 0.0, 0
        for prompt in prompts:
            start = time.perf_counter()
            plain.tokens.append(_greedy(plain.model, prompt, new_tokens))
            middle = time.perf_counter()
            count += len(model.generate(prompt, new_tokens).tokens[0])
            plain.seconds += middle - start
            mine += time.perf_counter() - middle
    theirs = sum(map(len, plain.tokens)) / plain.seconds
    rows = [["accel", f"{count / mine:.0f}"], ["transformers generate", f"{theirs:.0f}"]]
    table(["4. greedy, float32", ">tokens/s"], rows)
    typer.echo(f"   {count / mine / theirs:.1f} times as fast on this machine, prefill included")
    return plain


def _greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """The new tokens that transformers gives."""
    import torch

    ids = torch.tensor([prompt])
    with torch.no_grad():
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
        )
    return [int(token) for token in made[0, len(prompt) :]]


def _check(plain: _Plain, prompts: list[list[int]], tokens: list[list[int]]) -> None:
    """Equal token by token; only a tie in PyTorch's own logits excuses a difference."""
    ties = 0
    for prompt, mine, theirs in zip(prompts, tokens, plain.tokens, strict=True):
        if mine != theirs:
            at = next(
                (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b),
                min(len(mine), len(theirs)),
            )
            gap = _gap(plain.model, prompt + theirs[:at])
            if gap > NEAR_TIE:
                raise AccelError(
                    f"token {at} after {PROMPTS[prompts.index(prompt)]!r} differs from PyTorch's "
                    f"(the two highest logits differ by {gap:.2g}); please report this"
                )
            ties += 1
    typer.echo(
        f"5. the new process gives the same tokens as PyTorch on {len(prompts) - ties} of {len(prompts)} prompts, "
        f"{sum(map(len, tokens))} tokens in total" + (f" ({ties} differ at a tie)" if ties else "")
    )


def _gap(model: Any, prefix: list[int]) -> float:
    """How far the best logit after a prefix is above the second."""
    import torch

    with torch.no_grad():
        best = model(torch.tensor([prefix])).logits[0, -1].topk(2).values
    return float(best[0] - best[1])
