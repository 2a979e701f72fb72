"""Train the part of a method that has one, beside a model that stays as it is.

    python tools/train/train.py trim-kv --out trim-kv.safetensors                    # for the bundled model
    python tools/train/train.py trim-kv MODEL --text FILE --out gates.safetensors    # for yours
    python tools/train/train.py specdec-pp MODEL --draft DRAFT --text FILE --out head.safetensors

Then a recipe names the file: `trained = "gates.safetensors"`. What is trained for the graph makes the model, run
softly as the method will run it, give what the model alone gives (KL), predict its text, and stay within
`--budget`; what has an aim of its own (`threshold-evict`) comes near to it; what absorbs evicted tokens, as `less`
(`absorb.py`), makes up for them in each layer; what foretells attention (`tokenbutler`) learns from what the model
reads of the text; `specdec-pp` (`head.py`) tells which tokens of a draft model stand.
`OUT.run` holds the state of a run; SIGTERM and Ctrl-C save it, `--resume` goes on.

A table is measured instead, on `--samples` batches, and a recipe names it as `table`:

    python tools/train/train.py q-filter MODEL --text FILE --out filters.safetensors
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from absorb import POOL, Absorbing
from head import forward, loss, open_pair
from reference_data import REFERENCE, encode, sources
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rows import Rows, Stage
from tokenizers import Tokenizer
from torch import Tensor, fx
from torch.nn import functional as F

from accel.compiler.load.checkpoint import load_model
from accel.compiler.optimize import pipeline
from accel.ir.axis import find_axes
from accel.ir.capture.capture import capture
from accel.ir.errors import AccelError, InputError, unknown
from accel.ir.ops.attention import Operands, attention, weights
from accel.ir.ops.op import REFERENCES
from accel.ir.program import Program, compute, operand
from accel.ir.tables import Observed, Tables
from accel.passes import Pass, run
from accel.passes.calibrate import feeds
from accel.passes.kv._shared.tables import appended, attentions, measured, observed
from accel.passes.kv.inputs import Site
from accel.passes.kv.inputs.output import weight_of
from accel.passes.kv.keep import Base as Keep
from accel.passes.state.head import Head
from accel.passes.trained import Fitted, Lesson, Parts, Trained, sample, source, write
from accel.runtime.length.specdec_pp import SpecdecPp

MIX = {"library": 4.0, "pass_key": 1.0, "key_value": 2.0, "copy": 1.0, "repeat": 1.0}
WARMUP = 20
AGAIN = (
    4  # times that a method with an aim learns from the same rows: the model takes most of the time
)


def keys_of(program: Program) -> dict[int, fx.Node]:
    """What each layer appends to its cache of keys."""
    return {layer: appended(node) for layer, node in attentions(program).items()}


class Soft:
    """A program's step over whole rows, its attention changed by what is trained."""

    def __init__(self, program: Program, method: Any):
        self.program, self.method = program, method
        self.fixed = {name: program.params[name] for name in program.params}
        self.keys = keys_of(program)
        self.hidden = {layer: source(node) for layer, node in self.keys.items()}

    @property
    def names(self) -> str:
        """By what the model is known again."""
        return sample(self.program, self.keys)

    def start(self, inner: int, seed: int) -> Parts:
        generator = torch.Generator().manual_seed(seed)
        shape = {
            i: (k.meta["val"].shape[1], self.hidden[i].meta["val"].shape[-1])
            for i, k in self.keys.items()
        }
        return {
            i: self.method.start(int(e), int(g), inner, generator) for i, (g, e) in shape.items()
        }

    def logits(
        self, tokens: Tensor, parts: Parts | None = None, budget: int = 0
    ) -> tuple[Tensor, Tensor]:
        """[B,T,V] of tokens [B,T], and the mean excess over the layers; without parts, the model's own."""
        inputs = feeds(self.program, "step", tokens)
        values: dict[fx.Node, Any] = {}
        excess = torch.zeros(())
        for node in self.program.step.graph.nodes:
            if node.op == "output":
                continue
            layer = node.meta.get("layer")
            if parts is not None and node.target is attention.default and layer in parts:
                values[node], over = self._attend(node, values, parts[layer], budget)
                excess = excess + over / len(parts)
            elif node.target in REFERENCES:
                args, kwargs = self._given(node, values)
                values[node] = REFERENCES[node.target](*args, **kwargs)
            else:
                values[node] = compute(node, self.fixed, inputs, values)
        return values[self.program.step.output_nodes()["logits"]], excess

    def lessons(self, tokens: Tensor) -> dict[int, Lesson]:
        """What each layer computes of tokens [B,T] and their repeat."""
        inputs = feeds(self.program, "step", torch.cat((tokens, tokens), 1))
        values: dict[fx.Node, Any] = {}
        found = {}
        for node in self.program.step.graph.nodes:
            if node.op == "output":
                continue
            if node.target not in REFERENCES:
                values[node] = compute(node, self.fixed, inputs, values)
                continue
            args, kwargs = self._given(node, values)
            values[node] = REFERENCES[node.target](*args, **kwargs)
            layer = node.meta.get("layer")
            if node.target is attention.default and layer in self.keys:
                x = Operands[Tensor](*args, **kwargs)
                weight = self.fixed[str(weight_of(Site(layer, node, {"v": node})).target)].float()
                output = weight.unflatten(1, (x.q.shape[1], -1)).permute(1, 2, 0)
                count = 2 * tokens.shape[1]
                found[layer] = Lesson(
                    values[self.hidden[layer]], x.q, x.k[:, :, :count], x.v[:, :, :count], output, x.scale
                )  # fmt: skip
        return found

    def _given(self, node: fx.Node, values: dict[fx.Node, Any]) -> tuple[Any, Any]:
        """The values of a node's operands."""
        args, kwargs = (
            fx.node.map_arg(a, lambda n: operand(n, self.fixed, values))
            for a in (node.args, node.kwargs)
        )
        return args, kwargs

    def _attend(
        self, node: fx.Node, values: dict[fx.Node, Any], part: dict[str, Tensor], budget: int
    ) -> tuple[Tensor, Tensor]:
        args, kwargs = self._given(node, values)
        x = Operands[Tensor](*args, **kwargs)
        notes = self.method.note(values[self.hidden[node.meta["layer"]]], **part).transpose(
            1, 2
        )  # [B,G,T]
        after = x.q_pos[:, :, None] - x.k_pos[:, None]
        repeat = x.q.shape[1] // x.k.shape[1]
        probs, mixed = weights(x, self.method.soften(notes, after).repeat_interleave(repeat, dim=1))
        return probs @ mixed, self.method.excess(notes, after, budget)


def state_of(out: Path) -> Path:
    """The file of a run that can be left."""
    return out.with_name(out.name + ".run")


@dataclass
class Run:
    """A run that can be left and taken up again."""

    soft: Any  # Soft, Fit or Pair
    parts: Parts
    options: argparse.Namespace
    step: int = 0
    seconds: float = 0.0
    stopping: bool = False
    optimiser: Any = field(init=False)

    def __post_init__(self) -> None:
        for tensor in self.tensors:
            tensor.requires_grad_(True)
        self.optimiser = torch.optim.AdamW(self.tensors, lr=self.options.rate, weight_decay=0.0)

    @property
    def tensors(self) -> list[Tensor]:
        return [t for part in self.parts.values() for t in part.values()]

    @property
    def file(self) -> Path:
        return state_of(self.options.out)

    def save(self) -> None:
        new = self.file.with_name(self.file.name + ".new")
        state = {"tensors": self.tensors, "optimiser": self.optimiser.state_dict()}
        torch.save({**state, "step": self.step, "seconds": self.seconds}, new)
        new.replace(self.file)

    def load(self) -> None:
        state = torch.load(self.file, weights_only=True)
        for mine, saved in zip(self.tensors, state["tensors"], strict=True):
            mine.data.copy_(saved)
        self.optimiser.load_state_dict(state["optimiser"])
        self.step, self.seconds = state["step"], state["seconds"]

    def descend(self, loss: Tensor) -> None:
        """One step."""
        progress = self.seconds / 60 / self.options.minutes
        for group in self.optimiser.param_groups:
            group["lr"] = self.options.rate * min(
                1.0, (self.step + 1) / WARMUP, max(0.05, (1 - progress) / 0.3)
            )
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.tensors, 1.0)
        self.optimiser.step()
        self.step += 1

    def learn(self, ids: Tensor, known: Tensor) -> dict[str, float]:
        """One step on rows [B,T+1], of which tokens with weight `known` [B,T] can be predicted."""
        tokens, target = ids[:, :-1], ids[:, 1:]
        with torch.no_grad():
            want = self.soft.logits(tokens)[0].log_softmax(-1)
        found, excess = self.soft.logits(tokens, self.parts, self.options.budget)
        found = found.log_softmax(-1)
        kl = F.kl_div(found, want, log_target=True, reduction="none").sum(-1).mean()
        wrong = F.nll_loss(found.flatten(0, 1), target.flatten(), reduction="none")
        text = (wrong * known.flatten()).sum() / known.sum().clamp(min=1)
        self.descend(kl + text + self.options.pressure * excess)
        return {"kl": kl.item(), "text": text.item(), "excess": excess.item()}


class AimedRun(Run):
    """The same of a method that learns what to note."""

    def learn(self, ids: Tensor, known: Tensor) -> dict[str, float]:
        """One step on rows [B,T+1]; of longer ones than half the model's context, on their first tokens."""
        method, most = self.soft.method, self.soft.program.facts.max_context // 2
        with torch.no_grad():
            lessons = self.soft.lessons(ids[:, :-1][:, :most])
            aims = {layer: method.aim(lesson) for layer, lesson in lessons.items()}
        start = self.step
        for _ in range(AGAIN):
            off = torch.zeros(())
            for layer, aim in aims.items():
                hidden = lessons[layer].hidden[:, : aim.shape[1]]
                told = method.note(hidden, **self.parts[layer])
                off = off + (told - aim).square().mean() / len(aims)
            self.descend(off)
            self.step = start
        self.step = start + 1
        spread = sum(aim.var() for aim in aims.values()) / len(aims)
        return {"loss": off.item(), "explained": 1 - off.item() / max(float(spread), 1e-9)}


@dataclass
class AbsorbRun(Run):
    """The same of what absorbs evicted tokens, layer by layer."""

    pool: list[dict[int, Observed]] = field(default_factory=list)

    def learn(self, ids: Tensor, known: Tensor) -> dict[str, float]:
        """One step on rows [B,T+1]."""
        if len(self.pool) < POOL:
            self.pool.append(self.soft.observe(ids, known))
        row = self.pool[self.step % len(self.pool)]
        lost = self.soft.loss(row, self.parts, self.options.seed + self.step)
        self.descend(lost)
        return {"left": lost.item()}


class Fit:
    """A program, and a method that foretells its attention."""

    def __init__(self, program: Program, method: Fitted):
        self.program, self.method = program, method

    @property
    def names(self) -> str:
        """By what the model is known again."""
        return sample(self.program, keys_of(self.program))

    def rows(self, ids: Tensor, known: Tensor) -> Any:
        """What each layer's attention reads of rows [B,T+1]."""
        return next(observed(self.program, [(ids, known)]))

    def start(self, inner: int, seed: int) -> Parts:
        """For what the program reads of a few tokens, of whatever kind."""
        ids = torch.arange(9)[None] % self.program.facts.vocab_size
        generator = torch.Generator().manual_seed(seed)
        return self.method.start(self.rows(ids, torch.ones(1, 8)), inner, generator)


class FitRun(Run):
    """The same of what a method foretells."""

    def learn(self, ids: Tensor, known: Tensor) -> dict[str, float]:
        """One step on rows [B,T+1]."""
        lost = self.soft.method.loss(self.parts, self.soft.rows(ids, known))
        self.descend(lost)
        return {"loss": lost.item()}


class HeadRun(Run):
    """The same of a head, beside a `Pair`."""

    def learn(self, ids: Tensor, known: Tensor) -> dict[str, float]:
        """One step on rows [B,T+1], at the tokens that can be predicted."""
        generator = torch.Generator().manual_seed(self.options.seed + self.step)
        x, stands = self.soft.examples(ids[:, :-1], known, generator)
        found = forward(self.parts[0], x)
        lost = loss(found, stands)
        self.descend(lost)
        right = ((found.argmax(-1) > 0) == (stands > 0.5)).float().mean()
        return {"loss": lost.item(), "stand": stands.mean().item(), "right": right.item()}


def read_text(options: argparse.Namespace) -> Tensor:
    """The tokens of the text. Raises InputError."""
    tokenizer = options.model / "tokenizer.json"
    try:
        text = options.text.read_text(encoding="utf-8")
        ids = torch.tensor(Tokenizer.from_file(str(tokenizer)).encode(text).ids)
    except Exception as error:  # tokenizers raises no other
        raise InputError(f"cannot read {options.text} with {tokenizer}: {error}") from error
    if len(ids) < options.length + 2:
        raise InputError(
            f"{options.text} has {len(ids)} tokens; give a text of more than {options.length + 1}, or a "
            "smaller --length"
        )
    return ids


def text_rows(ids: Tensor, length: int, rows: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Windows of a text, for ever."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(ids) - length - 1, (rows,), generator=generator).tolist()
        yield torch.stack([ids[s : s + length + 1] for s in starts]), torch.ones(rows, length)


def bundled_rows(length: int, rows: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """What the bundled model was trained on, for ever."""
    tokenizer = Tokenizer.from_file(str(REFERENCE / "tokenizer.json"))
    texts = sources()[0]
    np.random.default_rng(seed).shuffle(texts)  # type: ignore[arg-type]
    drawn = Rows(tokenizer, {"library": encode(tokenizer, texts[: len(texts) // 3])}, seed, mix=MIX)
    while True:
        batch = drawn.draw(Stage(rows * length, {length: 1.0}))
        yield batch.ids, batch.weights


def trained_methods() -> dict[str, type[Any]]:
    """Every method with a trained part or a table, by name."""
    found = {}
    for axis in find_axes().values():
        for name in axis.names():
            if issubclass(axis.method(name), Trained | Tables | SpecdecPp):
                found[name] = axis.method(name)
    return found


def over_state(program: Program) -> Program:
    """The program as a recipe's passes over the state find it."""
    steps = pipeline(program.facts.encoder is not None)
    run(program, steps[: shared(steps)])
    return program


def shared(steps: list[Pass]) -> int:
    """How many of a build's passes come before a recipe's own."""
    return 1 + next(i for i, step in enumerate(steps) if isinstance(step, Head))


def prepare(kind: type[Any], options: argparse.Namespace) -> Run:
    """The model, captured, or a pair of models; and parts that have not learnt yet."""
    if kind is SpecdecPp:
        pair = open_pair(options, REFERENCE)
        return HeadRun(pair, pair.start(options.inner, options.seed), options)
    soft = soft_of(opened_program(options), kind())
    run: type[Run] = AimedRun if hasattr(kind, "aim") else Run
    if isinstance(soft, Absorbing):
        run = AbsorbRun
    elif isinstance(soft, Fit):
        run = FitRun
    return run(soft, soft.start(options.inner, options.seed), options)


def soft_of(program: Program, method: Any) -> Soft | Fit | Absorbing:
    """A program beside which a method's part is trained, as the method runs it."""
    if isinstance(method, Keep) and method.absorbs:
        return Absorbing(program, method, keys_of(program))
    if isinstance(method, Fitted):
        return Fit(program, method)
    return Soft(program, method)


def opened_program(options: argparse.Namespace) -> Program:
    """The model, captured; rows are as long as it takes."""
    loaded = load_model(options.model)
    program = over_state(capture(loaded.model, stored=loaded.stored))
    options.length = min(options.length, program.facts.max_context)
    return program


def rows_of(ids: Tensor | None, options: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of a text's tokens; none: of what the bundled model was trained on."""
    shape = options.length, options.rows, options.seed
    return bundled_rows(*shape) if ids is None else text_rows(ids, *shape)


def measure(kind: type[Any], ids: Tensor | None, options: argparse.Namespace) -> None:
    """Write the table of a method."""
    program, method = opened_program(options), kind()
    parts = measured(method, program, islice(rows_of(ids, options), options.samples))
    told = {n: str(getattr(options, n)) for n in ("samples", "length", "rows", "seed")}
    write(method, options.out, parts, sample(program, keys_of(program)), told)
    print(f"{options.out}: {options.samples * options.rows} rows of {options.length} tokens")


def train(run: Run, rows: Iterator[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Until the minutes are over, or a signal comes; the last means of the losses."""

    def stop(*_: object) -> None:
        run.stopping = True

    for kind in (signal.SIGTERM, signal.SIGINT):
        signal.signal(kind, stop)
    for _ in range(run.step):
        next(rows)  # those that a run before saw
    means: dict[str, float] = {}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[told]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as bar, run.file.with_suffix(".jsonl").open("a") as log:
        task = bar.add_task(
            "training", total=run.options.minutes * 60, told="", completed=run.seconds
        )
        while not run.stopping and run.seconds < run.options.minutes * 60:
            start = time.monotonic()
            found = run.learn(*next(rows))
            run.seconds += time.monotonic() - start
            means = {n: v if not means else 0.95 * means[n] + 0.05 * v for n, v in found.items()}
            told = " ".join(f"{n} {v:.4f}" for n, v in means.items())
            bar.update(task, completed=run.seconds, told=f"step {run.step} {told}")
            if run.step % 20 == 0:
                print(
                    json.dumps({"step": run.step, "seconds": round(run.seconds), **means}),
                    file=log,
                    flush=True,
                )
                run.save()
    run.save()
    return means


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("method", help="a method with a trained part or a table, as trim-kv")
    folder = "a model folder (default: the bundled one)"
    parser.add_argument("model", nargs="?", type=Path, default=REFERENCE, help=folder)
    parser.add_argument("--out", type=Path, required=True, help="the safetensors file to write")
    parser.add_argument("--draft", type=Path, help="the draft model's folder, for specdec-pp")
    parser.add_argument(
        "--text", type=Path, help="what to train on; needed but for the bundled model"
    )
    parser.add_argument("--minutes", type=float, default=30, help="training time, all sessions")
    parser.add_argument("--budget", type=int, default=128, help="tokens that a head should hold")
    parser.add_argument(
        "--pressure", type=float, default=1.0, help="weight of what goes beyond the budget"
    )
    parser.add_argument("--length", type=int, default=768, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=1, help="rows of a step")
    parser.add_argument("--samples", type=int, default=64, help="steps that a table is measured on")
    parser.add_argument("--inner", type=int, default=128, help="width of a gate, or of a head")
    parser.add_argument("--rate", type=float, default=2e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--resume", action="store_true", help="go on from OUT.run")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    methods = trained_methods()
    try:
        if options.method not in methods:
            raise InputError(unknown("method with a trained part", options.method, methods))
        if options.text is None and options.model != REFERENCE:
            raise InputError("give the text to train on, as --text FILE")
        if (
            methods[options.method] is SpecdecPp
            and options.draft is None
            and options.model != REFERENCE
        ):
            raise InputError("give the draft model's folder, as --draft DRAFT")
        if any(
            getattr(options, n) <= 0
            for n in ("minutes", "budget", "length", "rows", "samples", "inner", "rate")
        ):
            raise InputError(
                "minutes, budget, length, rows, samples, inner and rate must be more than 0"
            )
        if state_of(options.out).exists() != options.resume:
            what, act = (
                ("is not there", "leave --resume out")
                if options.resume
                else ("exists", "add --resume")
            )
            raise InputError(f"{state_of(options.out)} {what}: {act}, or choose another --out")
        ids = None if options.text is None else read_text(options)
        if issubclass(methods[options.method], Tables):
            return measure(methods[options.method], ids, options)
        run = prepare(methods[options.method], options)
        if options.resume:
            run.load()
        means = train(run, rows_of(ids, options))
    except (AccelError, OSError) as error:
        raise SystemExit(f"train: {error}") from None
    told = {
        n: str(getattr(options, n))
        for n in ("budget", "pressure", "length", "rows", "inner", "rate", "seed")
    }
    told |= {"steps": str(run.step), "seconds": str(round(run.seconds))} | {
        n: f"{v:.4f}" for n, v in means.items()
    }
    write(run.soft.method, options.out, run.parts, run.soft.names, told)
    losses = ", ".join(f"{n} {v:.4f}" for n, v in means.items())
    print(f"{options.out}: {run.step} steps in {run.seconds:.0f} s; {losses}")


if __name__ == "__main__":
    main()
