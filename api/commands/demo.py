"""demo: compile and run a model that people know, and compare it with PyTorch and recipes with each other."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accel.commands.console import fetching, paced, progress, size, table
from accel.ir.errors import AccelError, InputError, extra
from accel.ir.recipe import Recipe
from accel.ir.version import VERSION
from accel.reference.examples import Example, bundled, smollm2

if TYPE_CHECKING:
    from accel.compiler.choose.builds import Builds
    from accel.runtime.model.compiled import CompiledModel
    from accel.runtime.model.output import Output

EXAMPLES = """\b
Examples:
  accel-compile demo
  accel-compile demo --out ./artifact
"""


@dataclass(frozen=True)
class Beside:
    """A recipe that is built beside base, and asked one example, which shows what it is for."""

    label: str
    recipe: Any
    example: str
    why: str


def _snapkv(tokens: int) -> Beside:
    kept = {"score": {"use": "snapkv"}, "budget": {"use": "uniform", "tokens_kept": tokens}}
    why = "a bounded cache; it may forget"
    return Beside(f"snapkv, {tokens} kept", {"kv": kept}, "key", why)


INT4 = Beside("int4", "int4", "function", "a small file, few bytes a token")
KV_INT8 = Beside("kv-int8", "kv-int8", "key", "more context in the same memory")
LOOKUP = Beside("prompt-lookup", "prompt-lookup", "edit", "speed where the text repeats")
RECYCLING = Beside("token-recycling", "token-recycling", "edit", "speed without a draft model")
LAYERSKIP = Beside("layerskip", "layerskip", "function", "speed, if trained for it")


@dataclass(frozen=True)
class Subject:
    """The model of the demo: a folder of float32 weights, what it is asked, and the recipes that it shows."""

    folder: Path
    name: str
    examples: list[Example]
    compared: tuple[Beside, ...]


LINES, END = 14, 4  # of a text that is shown, and of the end of a longer prompt
WIDTH = 90  # of a message's line
SLOWER = 0.97  # of base's speed: less is said
NEAR_TIE = 1e-4  # two logits closer than this may swap places by rounding alone

_FRESH = """
import json, sys, time
start = time.perf_counter()
import accel
with accel.load(sys.argv[1]) as model:
    model.session().close()
    loaded = time.perf_counter() - start
    outs = [model.generate(ids, new) for ids, new in json.loads(sys.argv[2])]
heavy = sorted({"torch", "transformers"} & sys.modules.keys())
tokens, texts = [list(out.tokens[0]) for out in outs], [out.text[0] for out in outs]
print(json.dumps({"seconds": loaded, "tokens": tokens, "texts": texts, "heavy": heavy}))
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
    """Compile and run a model, and show what recipes are for.

    Fetches SmolLM2-135M-Instruct (93 MB, once, into the user's cache; where it cannot be had, the bundled model goes
    in its place). Compiles it and asks it, in a new process, for an answer, a function, a key in a long prompt and an
    edit; compares the tokens and the speed with PyTorch; then builds other recipes and shows each on the prompt that
    it is for. Takes some two minutes on two cores, after the download.
    """
    with extra("compile"):
        from accel.compiler.assemble import assemble
        from accel.compiler.build_options import BuildOptions
        from accel.compiler.choose.builds import Builds

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="accel-demo-")))
        subject = _subject(folder / "model")
        start = time.perf_counter()
        with progress("build") as show:
            show("capture", 0.0)
            builds = Builds(subject.folder, BuildOptions())
            out = out or folder / "artifact"
            model = stack.enter_context(builds.build(assemble(Recipe.load("base")), out, show))
        _built(subject, model, time.perf_counter() - start)
        asked = [Asked(example, _encode(model, example)) for example in subject.examples]
        tokens = _answers(out, asked)
        plain = _side_by_side(subject.folder, model, asked)
        _check(plain, asked, tokens)
        _recipes(builds, subject, model, asked, folder)
    typer.echo(f"\ndone in {time.perf_counter() - start:.0f} s")


def _subject(folder: Path) -> Subject:
    """SmolLM2, its weights as floats in a folder that is made; or the bundled model, and why."""
    from accel.compiler.load.fetch.models import DEMO, OWN, fetch, read_models
    from accel.compiler.load.floats import write

    row = read_models(OWN, "accel-compile demo")[DEMO]
    try:
        with fetching(row) as watch:
            file = fetch(row, watch=watch)
    except (InputError, OSError) as error:
        typer.echo(f"SmolLM2 cannot be fetched: {error}")
        typer.echo(
            "   so the bundled model is shown, which is small and made for tests: it knows code-like text, no chat\n"
        )
        beside = (INT4, KV_INT8, _snapkv(256), LOOKUP, LAYERSKIP)
        return Subject(reference(), "the bundled model", bundled(), beside)
    with paced("weights") as show:
        write(file, folder, watch=lambda done, total: show("to float32", done / total))
    beside = (INT4, KV_INT8, _snapkv(512), LOOKUP, RECYCLING)
    name = f"{row.what.partition(',')[0]} ({row.licence}), the weights of its GGUF file in float32,"
    return Subject(folder, name, smollm2(), beside)


def reference() -> Path:
    """The folder of the bundled model. Raises InputError where it was not installed."""
    import accel.reference

    folder = Path(next(iter(accel.reference.__path__)))
    if not (folder / "model.safetensors").is_file():
        raise InputError(
            f"the bundled model is missing from {folder}; install accel {VERSION} again"
        )
    return folder


def _built(subject: Subject, model: CompiledModel, seconds: float) -> None:
    facts = model.report["model"]
    typer.echo(
        f"1. built: {subject.name} with {facts['num_layers']} layers and "
        f"{facts['parameters'] / 1e6:.1f} M parameters -> an ONNX artifact of "
        f"{size(model.report['bytes']['total'])} in {seconds:.0f} s"
    )


def _encode(model: CompiledModel, example: Example) -> list[int]:
    if (tokenizer := model.tokenizer) is None:
        raise InputError("the model has no tokenizer.json; install accel-compile again")
    before = ""
    if example.message:
        turns = [{"role": "user", "content": example.message}]
        before = str(tokenizer.apply_chat_template(turns, tokenize=False))
    return list(tokenizer.encode(before + example.prompt))


def _answers(artifact: Path, asked: list[Asked]) -> list[list[int]]:
    """Print what a new process writes after each prompt, and whether it is what it should be. Returns its tokens."""
    found = _in_fresh_process(artifact, asked)
    typer.echo(
        f"2. a new process, without torch and transformers, loaded it in {found['seconds']:.1f} s; asked, greedily:"
    )
    for one, text in zip(asked, found["texts"], strict=True):
        example = one.example
        verdict = example.verdict(text)
        typer.echo(f"\n   {example.about}, in a prompt of {len(one.ids)} tokens: {verdict}\n")
        for line in _last(_short(example.message)):
            typer.echo(f"   > {line}".rstrip())
        _quote("".join(_last(example.prompt.splitlines(keepends=True))) + example.shown(text))
        if verdict == "wrong":
            typer.echo("\n   the right answer:\n")
            _quote(example.expected)
    typer.echo("")
    tokens: list[list[int]] = found["tokens"]
    return tokens


def _last(lines: list[str]) -> list[str]:
    return lines if len(lines) <= LINES else ["…\n", *lines[-END:]]


def _short(message: str) -> list[str]:
    """A message's lines, each no longer than a terminal's; what is left out of a long one is its middle."""
    return [
        line if len(line) <= WIDTH else f"{line[: WIDTH // 2]} … {line[-WIDTH // 2 :]}"
        for line in message.splitlines()
    ]


def _text(out: Output) -> str:
    assert out.text is not None, "the model has a tokenizer"
    return out.text[0]


def _quote(text: str) -> None:
    """Print a text apart from what is said of it; no more than its first lines."""
    lines = text.splitlines()
    more = ["…"] if len(lines) > LINES else []
    for line in lines[:LINES] + more:
        typer.echo(f"   | {line}".rstrip())


def _in_fresh_process(artifact: Path, asked: list[Asked]) -> dict[str, Any]:
    """The tokens and texts that a new Python gives, which has seen nothing but the artifact."""
    arguments = [str(artifact), json.dumps([(one.ids, one.new_tokens) for one in asked])]
    run = subprocess.run(
        [sys.executable, "-c", _FRESH, *arguments], capture_output=True, text=True, check=False
    )
    if run.returncode:
        raise AccelError(f"the new process failed: {run.stderr.strip()[-500:]}")
    found: dict[str, Any] = json.loads(run.stdout)
    if found["heavy"]:
        raise AccelError(f"the new process imported {' and '.join(found['heavy'])}")
    return found


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
    logging.set_verbosity_error()
    plain = _Plain(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval())
    _greedy(plain.model, asked[0].ids, 2)  # both warm up
    model.generate(asked[0].ids, 2)
    mine, count = 0.0, 0
    for one in asked:
        start = time.perf_counter()
        plain.tokens.append(_greedy(plain.model, one.ids, one.new_tokens))
        middle = time.perf_counter()
        count += len(model.generate(one.ids, one.new_tokens).tokens[0])
        plain.seconds += middle - start
        mine += time.perf_counter() - middle
    theirs = sum(map(len, plain.tokens)) / plain.seconds
    rows = [["accel", f"{count / mine:.0f}"], ["transformers generate", f"{theirs:.0f}"]]
    typer.echo("3. the same prompts in both, prefill included:")
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
        f"4. the new process gives the same tokens as PyTorch on {len(asked) - ties} of {len(asked)} prompts, "
        f"{sum(map(len, tokens))} tokens in total" + (f" ({ties} differ at a tie)" if ties else "")
    )


def _recipes(
    builds: Builds, subject: Subject, model: CompiledModel, asked: list[Asked], folder: Path
) -> None:
    """Build other recipes, ask each the example that it is for, and print what came and what it took beside base's."""
    from accel.compiler.assemble import assemble

    of = {one.example.name: one for one in asked}
    shown = dict.fromkeys(beside.example for beside in subject.compared)
    base = {name: _measured(model, of[name]) for name in shown}
    rows = {name: [_row(name, "base", base[name], base[name], "")] for name in shown}
    with progress("recipes") as show:
        for at, beside in enumerate(subject.compared):
            show(beside.label, at / len(subject.compared))
            name, place = beside.example, folder / "recipe"
            with builds.build(assemble(Recipe.load(beside.recipe)), place) as other:
                found = _measured(other, of[name])
            shutil.rmtree(place)
            rows[name].append(_row("", beside.label, found, base[name], beside.why))
    typer.echo("5. recipes beside base, each on the prompt that shows what it is for:")
    columns = ("prompt", "recipe", ">files", ">cache", ">tokens/s", "answer", "as base", "what for")
    table(columns, [row for group in rows.values() for row in group])
    typer.echo(
        "   tokens/s: in decoding, after the prompt; as base: whether the text is base's to the letter"
    )


@dataclass(frozen=True)
class _Measured:
    text: str
    verdict: str
    files: int  # bytes
    cache: int  # bytes, at most
    speed: float  # tokens per second, after the first


def _measured(model: CompiledModel, asked: Asked) -> _Measured:
    """One example's text, and what it took. It goes on after the model's own end: short answers are a poor measure."""
    from accel.runtime.decode.sampling_params import SamplingParams

    model.generate(asked.ids[-8:], 4)
    out = model.generate(
        asked.ids, sampling_params=SamplingParams(asked.new_tokens, ignore_eos=True)
    )
    text, stats = _text(out), out.stats
    return _Measured(
        text, asked.example.verdict(text), model.report["bytes"]["total"], stats["kv_bytes"],
        stats["tokens_per_second"],
    )  # fmt: skip


def _row(name: str, label: str, measured: _Measured, base: _Measured, why: str) -> list[str]:
    if measured.speed < SLOWER * base.speed:
        why += "; slower here"
    same = "" if measured is base else "yes" if measured.text == base.text else "no"
    return [
        name, label, size(measured.files), size(measured.cache), f"{measured.speed:.0f}", measured.verdict, same, why,
    ]  # fmt: skip


def _gap(model: Any, prefix: list[int]) -> float:
    """How far the best logit after a prefix is above the second."""
    import torch

    with torch.no_grad():
        best = model(torch.tensor([prefix])).logits[0, -1].topk(2).values
    return float(best[0] - best[1])
