"""Train the bundled reference model, restartably, on a CPU or a GPU.

    python tools/train_reference.py --out RUN --minutes 100      # train, or continue with --resume
    python tools/train_reference.py --out RUN --export           # RUN -> api/reference
    python tools/train_reference.py --out RUN --evaluate         # measure api/reference

`RUN` holds the tokenizer, the encoded corpus, `log.jsonl` and one checkpoint (weights, optimisers,
random states, counters). SIGTERM saves it before leaving; `--resume` goes on as if nothing was.
`--minutes` counts all sessions of a run and paces it: the stages of the curriculum are shares of
it, and the learning rate is held, then falls to zero over the last quarter. More minutes with
`--resume` raise the rate again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import reference_export
import torch
from reference_data import Batches, Stage, encode, sources, stage_at, train_tokenizer
from reference_init import place_induction
from reference_model import Llama, Shape, optimisers
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

WARMUP, DECAY = 20, 0.25


@dataclass
class Counters:
    """How far a run is; `seconds` is training time summed over sessions.

    `depth` is how many layers have joined: more minutes may lead back to an earlier stage, which
    must not silence layers that have learnt.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    depth: int = 0


@dataclass
class Run:
    folder: Path
    device: torch.device
    tokenizer: Tokenizer
    batches: Batches
    model: Llama
    optimisers: list[torch.optim.Optimizer]
    count: Counters = field(default_factory=Counters)
    stopping: bool = False
    peaks: list[list[float]] = field(init=False)

    def __post_init__(self) -> None:
        self.peaks = [[group["lr"] for group in o.param_groups] for o in self.optimisers]

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    def save(self) -> None:
        state = {
            "shape": asdict(self.model.shape),
            "count": asdict(self.count),
            "model": self.model.state_dict(),
            "optimisers": [o.state_dict() for o in self.optimisers],
            "torch": torch.get_rng_state(),
            "rows": self.batches.rng.getstate(),
        }
        new = self.checkpoint.with_suffix(".new")
        torch.save(state, new)
        new.replace(self.checkpoint)

    def load(self) -> None:
        state = torch.load(self.checkpoint, map_location=self.device, weights_only=False)
        self.count = Counters(**state["count"])
        self.model.load_state_dict(state["model"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        torch.set_rng_state(state["torch"].cpu())
        self.batches.rng.setstate(state["rows"])


def prepare(folder: Path, seed: int, device: torch.device, scale: int = 1) -> Run:
    """A run at step 0; tokenizer and corpus are made once per folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens, vocabulary = folder / "corpus.npy", folder / "tokenizer.json"
    if not (tokens.exists() and vocabulary.exists()):
        train, _ = sources()
        random.Random(seed).shuffle(train)
        tokenizer = train_tokenizer(train, Shape().vocab)
        np.save(tokens, encode(tokenizer, train))
        tokenizer.save(str(vocabulary))
    tokenizer = Tokenizer.from_file(str(vocabulary))
    torch.manual_seed(seed)
    model = Llama(Shape())
    place_induction(model)
    model.to(device)
    batches = Batches(tokenizer, np.load(tokens), seed, scale)
    return Run(folder, device, tokenizer, batches, model, optimisers(model))


def exit_share(layer: int, layers: int, scale: float) -> float:
    """LayerSkip's e(l), normalised over one early layer and the last: the early one's share."""
    early = scale * layer * (layer + 1) / 2
    last = layers - 1 + scale * (layers - 2) * (layers - 1) / 2
    return early / (early + last)


def loss_of(run: Run, ids: Tensor, weights: Tensor, stage: Stage) -> tuple[Tensor, Tensor]:
    """The loss to descend and the last layer's own; heads run on predictable positions only.

    One early exit per step, in turn, on a random quarter of those positions: a head costs as much
    as one and a half layers here.
    """
    states = list(run.model.states(ids[:, :-1], run.count.depth, stage.drop))
    known = weights.flatten().nonzero().squeeze(1)
    target = ids[:, 1:].flatten()

    def at(state: Tensor, where: Tensor) -> Tensor:
        return F.cross_entropy(run.model.head(state.flatten(0, 1)[where]).float(), target[where])

    last = at(states[-1], known)
    if not stage.exits:
        return last, last.detach()
    layers = len(states)
    early = 1 + run.count.step % (layers - 2)
    share = exit_share(early, layers, stage.exits)
    few = known[torch.randperm(len(known))[: max(1, len(known) // 4)].to(known.device)]
    return (1 - share) * last + share * at(states[early], few), last.detach()


def set_rate(run: Run, progress: float) -> None:
    rate = min(1.0, (run.count.step + 1) / WARMUP, max(0.02, (1 - progress) / DECAY))
    for optimiser, peaks in zip(run.optimisers, run.peaks, strict=True):
        for group, peak in zip(optimiser.param_groups, peaks, strict=True):
            group["lr"] = rate * peak


def train_step(run: Run, stage: Stage, progress: float) -> float:
    ids, weights = (part.to(run.device) for part in run.batches.draw(stage))
    set_rate(run, progress)
    half = (
        torch.autocast("cuda", torch.bfloat16)
        if run.device.type == "cuda"
        else contextlib.nullcontext()
    )
    with half:
        loss, last = loss_of(run, ids, weights, stage)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    for optimiser in run.optimisers:
        optimiser.step()
        optimiser.zero_grad()
    run.count.step += 1
    run.count.tokens += weights.numel()
    return float(last)


def probe(run: Run, stage: Stage) -> dict[str, float]:
    """Token accuracy on fresh answers, by kind of row and at the present stage's length."""
    batches = Batches(run.tokenizer, run.batches.corpus, run.count.step)
    found = {}
    for kind in stage.mix:
        rows = max(2, 2048 // stage.length)
        ids, weights = batches.draw(replace(stage, rows=rows, mix={kind: 1}))
        with torch.no_grad():
            *_, state = run.model.states(ids[:, :-1].to(run.device), run.count.depth)
            right = run.model.head(state).argmax(-1).cpu() == ids[:, 1:]
        found[kind] = round(float(right[weights > 0].float().mean()), 3)
    return found


def progress_lines(run: Run, minutes: float) -> Iterator[dict[str, Any]]:
    """Trains; yields a line for the log every 20 steps."""
    losses: list[float] = []
    started, base = time.monotonic(), run.count.seconds
    while not run.stopping:
        run.count.seconds = base + time.monotonic() - started
        progress = run.count.seconds / 60 / minutes
        if progress >= 1:
            return
        stage = stage_at(progress)
        run.count.depth = max(run.count.depth, stage.depth)
        losses.append(train_step(run, stage, progress))
        if run.count.step % 20 == 0:
            line: dict[str, Any] = {**asdict(run.count), "length": stage.length}
            line["loss"] = round(sum(losses) / len(losses), 4)
            losses.clear()
            if run.count.step % 100 == 0:
                line["accuracy"] = probe(run, stage)
            yield line


def train(run: Run, lines: Iterator[dict[str, Any]]) -> None:
    """Keep the log and a checkpoint while `lines` train; SIGTERM ends it and saves."""

    def stop(*_: object) -> None:
        run.stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    with (run.folder / "log.jsonl").open("a") as log:
        for line in lines:
            line["seconds"] = round(line["seconds"])
            print(json.dumps(line), file=log, flush=True)
            print(*(f"{key} {value}" for key, value in line.items()), flush=True)
            if "accuracy" in line:
                run.save()
    run.save()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--minutes", type=float, default=100, help="training time, all sessions")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--scale", type=int, default=1, help="times the rows of every step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="torch.compile each layer")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--export", action="store_true", help="write api/reference and stop")
    parser.add_argument("--evaluate", action="store_true", help="measure api/reference and stop")
    parser.add_argument("--prompts", type=int, default=20, help="prompts per task and length")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    if options.export:
        reference_export.export(options.out)
    if options.evaluate:
        reference_export.evaluate(options.prompts)
    if options.export or options.evaluate:
        return
    run = prepare(options.out, options.seed, torch.device(options.device), options.scale)
    if run.checkpoint.exists() and not options.resume:
        raise SystemExit(f"{run.checkpoint} exists: add --resume, or choose another --out")
    if options.resume:
        run.load()
    if options.compile:
        torch._dynamo.config.recompile_limit = 64  # five lengths, and the probe's batch sizes
        for layer in run.model.layers:
            layer.compile(dynamic=False)
    train(run, progress_lines(run, options.minutes))


if __name__ == "__main__":
    main()
