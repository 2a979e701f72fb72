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
from accel.ir.recipe import Recipe
from accel.ir.version import VERSION
from accel.reference.examples import Example, examples

if TYPE_CHECKING:
    from accel.runtime.model.compiled import CompiledModel
    from accel.runtime.model.output import Output

EXAMPLES = """\b
Examples:
  accel-compile demo
  accel-compile demo --out ./artifact
"""
# label -> a recipe, built beside base and asked the same
BESIDE: dict[str, Any] = {
    "int4": "int4",
    "snapkv, 256 tokens": {
        "kv": {
            "score": {"use": "snapkv"},
            "budget": {"use": "uniform", "tokens_kept": 256},
        }
    },
    "prompt-lookup": "prompt-lookup",
    "layerskip": "layerskip",
}
LINES, END = 14, 4  # of a text that is shown, and of the end of a longer prompt
NEAR_TIE = 1e-4  # two logits closer than this may swap places by rounding alone

_FRESH = """
import json, sys, time
start = time.perf_counter()
import accel
with accel.load(sys.argv[1]) as model:
    model.session().close()
    loaded = time.perf_counter() - start
    tokens = [model.generate(ids, new).tokens[0] for ids, new in json.loads(sys.argv[2])]
heavy = sorted({"torch", "transformers"} & sys.modules.keys())
print(json.dumps({"seconds": loaded, "tokens": tokens, "heavy": heavy}))
"""


@dataclass(frozen=True)
class Asked:
    """An example, and its prompt in tokens."""

    example: Example
    ids: list[int]

    @property
    def new_tokens(self) -> int:
        return self.example.new_tokens


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

    Compiles it and asks it for a function, a key in a long prompt and an edit; loads the artifact in a new process,
    compares the tokens with PyTorch, and shows the speed of both and of other recipes. Takes under two minutes on two
    cores.
    """
    with extra("compile"):
        from accel.compiler.optimize import optimize

    start = time.perf_counter()
    source = reference()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="accel-demo-")))
        out = out or folder / "artifact"
        with progress("build") as show:
            model = stack.enter_context(optimize(source, "base", out=out, progress=show))
        _built(model)
        asked = [Asked(example, _encode(model, example.prompt)) for example in examples()]
        _answers(model, asked)
        fresh = _in_fresh_process(out, asked)
        plain = _side_by_side(source, model, asked)
        _check(plain, asked, fresh)
        _recipes(source, model, asked, folder)
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


def _answers(model: CompiledModel, asked: list[Asked]) -> None:
    """Print what the model writes after each prompt, and whether it is what it should be."""
    typer.echo("2. asked, greedily:")
    for one in asked:
        text = _text(model.generate(one.ids, one.new_tokens))
        lines = one.example.prompt.splitlines(keepends=True)
        if len(lines) > LINES:
            lines = ["…\n", *lines[-END:]]
        verdict = one.example.verdict(text)
        typer.echo(f"\n   {one.example.about}: {verdict}\n")
        _quote("".join(lines) + one.example.shown(text))
        if verdict == "wrong":
            typer.echo("\n   the right answer:\n")
            _quote(one.example.wanted)
    typer.echo("")


def _text(out: Output) -> str:
    assert out.text is not None, "the model has a tokenizer"
    return out.text[0]


def _quote(text: str) -> None:
    """Print a text apart from what is said of it; no more than its first lines."""
    lines = text.splitlines()
    more = ["…"] if len(lines) > LINES else []
    for line in lines[:LINES] + more:
        typer.echo(f"   | {line}".rstrip())


def _in_fresh_process(artifact: Path, asked: list[Asked]) -> list[list[int]]:
    """The tokens that a new Python gives, which has seen nothing but the artifact."""
    arguments = [str(artifact), json.dumps([(one.ids, one.new_tokens) for one in asked])]
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


def _side_by_side(source: Path, model: CompiledModel, asked: list[Asked]) -> _Plain:
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
    for whole in (False, True):  # the first round warms both up
        plain.tokens, plain.seconds, mine, count = [], 0.0, 0.0, 0
        for one in asked:
            new_tokens = one.new_tokens if whole else 2
            start = time.perf_counter()
            plain.tokens.append(_greedy(plain.model, one.ids, new_tokens))
            middle = time.perf_counter()
            count += len(model.generate(one.ids, new_tokens).tokens[0])
            plain.seconds += middle - start
            mine += time.perf_counter() - middle
    theirs = sum(map(len, plain.tokens)) / plain.seconds
    rows = [["accel", f"{count / mine:.0f}"], ["transformers generate", f"{theirs:.0f}"]]
    typer.echo("4. the same prompts in both, prefill included:")
    table(["greedy, float32", ">tokens/s"], rows)
    typer.echo(f"   {count / mine / theirs:.1f} times as fast on this machine")
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


def _check(plain: _Plain, asked: list[Asked], tokens: list[list[int]]) -> None:
    """Equal token by token; only a tie in PyTorch's own logits excuses a difference."""
    ties = 0
    for one, mine, theirs in zip(asked, tokens, plain.tokens, strict=True):
        if mine != theirs:
            at = next(
                (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b),
                min(len(mine), len(theirs)),
            )
            gap = _gap(plain.model, one.ids + theirs[:at])
            if gap > NEAR_TIE:
                raise AccelError(
                    f"token {at} of the example that {one.example.about} differs from PyTorch's "
                    f"(the two highest logits differ by {gap:.2g}); please report this"
                )
            ties += 1
    typer.echo(
        f"5. the new process gives the same tokens as PyTorch on {len(asked) - ties} of {len(asked)} prompts, "
        f"{sum(map(len, tokens))} tokens in total" + (f" ({ties} differ at a tie)" if ties else "")
    )


def _recipes(source: Path, model: CompiledModel, asked: list[Asked], folder: Path) -> None:
    """Build other recipes, ask each the same, and print what that took and what came."""
    from accel.compiler.assemble import assemble
    from accel.compiler.build_options import BuildOptions
    from accel.compiler.choose.builds import Builds

    texts, row = _measured(model, asked)
    rows = [["base", *row, "–"]]
    with progress("recipes") as show:
        show("capture", 0.0)
        builds = Builds(source, BuildOptions())
        for at, (label, spec) in enumerate(BESIDE.items(), 1):
            show(label, at / (len(BESIDE) + 1))
            plan = assemble(Recipe.load(spec))
            with builds.build(plan, folder / f"recipe-{at}") as other:
                found, row = _measured(other, asked)
            same = sum(a == b for a, b in zip(texts, found, strict=True))
            rows.append([label, *row, f"{same} of {len(asked)}"])
    typer.echo("6. recipes beside each other, on the same prompts:")
    names = [one.example.name for one in asked]
    table(["recipe", ">tokens/s", ">cache", *names, "text of base"], rows)


def _measured(model: CompiledModel, asked: list[Asked]) -> tuple[list[str], list[str]]:
    """The texts; tokens per second in decoding, the largest cache, and the verdicts."""
    model.generate(asked[0].ids, 2)
    outs = [model.generate(one.ids, one.new_tokens) for one in asked]
    texts = [_text(out) for out in outs]
    decoded = sum(len(out.tokens[0]) - 1 for out in outs)
    speed = decoded / sum(out.stats["decode_seconds"] for out in outs)
    cache = max(out.stats["kv_bytes"] for out in outs)
    verdicts = [one.example.verdict(text) for one, text in zip(asked, texts, strict=True)]
    return texts, [f"{speed:.0f}", size(cache), *verdicts]


def _gap(model: Any, prefix: list[int]) -> float:
    """How far the best logit after a prefix is above the second."""
    import torch

    with torch.no_grad():
        best = model(torch.tensor([prefix])).logits[0, -1].topk(2).values
    return float(best[0] - best[1])
