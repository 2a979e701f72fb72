"""Train the bundled reference model; stop it at any moment, and go on with the same command.

    python tools/train/reference.py --run DIR --resume              # train, from the newest whole checkpoint
    python tools/train/reference.py --run DIR --release TOKENS      # decay a copy over so many tokens, and export it
    python tools/train/reference.py --evaluate                      # measure api/reference

The rate is warmed up and then held (warm-up, stable, decay): every stable checkpoint can be prolonged, or
decayed into a release. DIR holds the encoded corpus, two checkpoints, `log.jsonl` (a line a minute), `curves.png`.
Where DIR is new, training goes on from the release in api/reference.
A run yields to everything else on the machine (nice 19); SIGTERM and Ctrl-C save it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import corpus
import reference_export
import torch
from ahead import ahead
from checkpoints import Checkpoints, lock
from curves import draw
from half import faster_in_half
from losses import head_distance, head_loss
from reference_data import REFERENCE
from reference_model import Llama, Shape, optimisers
from rows import KINDS, STAGES, Batch, Rows, Stage
from tokenizers import Tokenizer
from torch import Tensor

WORKERS = 8  # processes that draw rows while a GPU works
WARMUP = 100  # steps, of a run and after a start from weights alone
EXITS, DROP = (
    0.3,
    0.1,
)  # the scale of the early-exit loss and the last layer's dropout, as LayerSkip has them


@dataclass
class Counters:
    """How far a run is; `seconds` is training time over all of its sessions, `warm` steps since the last start."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    warm: int = 0


@dataclass
class Decay:
    """The rate falls to zero from `start` over `tokens`."""

    start: int
    tokens: int

    def rate(self, at: int) -> float:
        return max(0.0, 1 - (at - self.start) / self.tokens)


@dataclass(frozen=True)
class Plan:
    """What is trained, on which rows, and how often it is saved and told of (seconds)."""

    shape: Shape = Shape()
    stages: tuple[Stage, ...] = STAGES
    save: float = 240.0
    tell: float = 60.0


@dataclass
class Run:
    folder: Path
    plan: Plan
    device: torch.device
    tokenizer: Tokenizer
    rows: Rows
    model: Llama
    half: bool  # products in bfloat16; weights and sums stay float32
    optimisers: list[torch.optim.Optimizer] = field(init=False)
    count: Counters = field(default_factory=Counters)
    decay: Decay | None = None
    stopping: bool = False

    def __post_init__(self) -> None:
        self.optimisers = optimisers(self.model)
        self.peaks = [[group["lr"] for group in o.param_groups] for o in self.optimisers]
        self.checkpoints = Checkpoints(self.folder)
        self.saved = -1  # the step of the newest checkpoint
        # of losses and of tokens, by kind
        self.sums = torch.zeros(len(KINDS), 2, dtype=torch.float64, device=self.device)

    def save(self) -> None:
        if self.saved == self.count.step:
            return
        self.checkpoints.save(
            self.count.step,
            {
                "shape": asdict(self.model.shape),
                "tokenizer": self.tokenizer.to_str(),
                "count": asdict(self.count),
                "decay": asdict(self.decay) if self.decay else None,
                "model": self.model.state_dict(),
                "optimisers": [o.state_dict() for o in self.optimisers],
                "torch": torch.get_rng_state(),
            },
        )
        self.saved = self.count.step

    def load(self, state: dict[str, Any]) -> None:
        """Raises `SystemExit` where the checkpoint is of another shape or tokenizer."""
        if state["shape"] != asdict(self.model.shape):
            raise SystemExit(
                f"{self.folder} holds a model of another shape, {state['shape']}: give another --run"
            )
        if state["tokenizer"] != self.tokenizer.to_str():
            raise SystemExit(
                f"{self.folder} was trained with another tokenizer: give another --run"
            )
        self.count = Counters(**state["count"])
        self.saved = self.count.step
        self.decay = Decay(**state["decay"]) if state["decay"] else None
        self.model.load_state_dict(state["model"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        torch.set_rng_state(state["torch"])

    @cached_property
    def glance(self) -> Tensor:
        """[5,1025] of the held-out files: they are measured whole by --evaluate."""
        return reference_export.windows(self.tokenizer)[::11]

    def stage(self, tokens: int) -> Stage:
        """By the tokens so far; the last one in the second half of a decay, whenever that comes."""
        *earlier, last = self.plan.stages
        if self.decay and self.decay.rate(tokens) <= 0.5:
            return last
        return next((s for s in earlier if tokens < s.until), last)

    def steps(self) -> Iterator[tuple[Stage, int]]:
        """What the batches from here on are drawn by, without an end."""
        step, tokens = self.count.step, self.count.tokens
        while True:
            stage = self.stage(tokens)
            yield stage, step
            step, tokens = step + 1, tokens + self.rows.scale * stage.tokens

    @property
    def done(self) -> bool:
        return self.decay is not None and self.decay.rate(self.count.tokens) == 0


def prepare(folder: Path, plan: Plan, seed: int = 0, device: str = "cpu", scale: int = 1) -> Run:
    """The run of a folder: at its newest checkpoint; where it has none, at the newest release, or at step 0."""
    tokenizer = reference_export.load_tokenizer()
    texts = corpus.prepare(folder, tokenizer, seed)
    torch.manual_seed(seed)
    rows, model = Rows(tokenizer, texts, seed, scale), Llama(plan.shape).to(device)
    half = device != "cpu" or faster_in_half()
    run = Run(folder, plan, torch.device(device), tokenizer, rows, model, half)
    state = run.checkpoints.load()
    if state is not None:
        run.load(state)
    elif plan.shape == Shape():
        _begin_from_release(run)
    return run


def _begin_from_release(run: Run) -> None:
    """Weights, counts and log of api/reference."""
    told = json.loads((REFERENCE / "training.json").read_text())
    run.model.load_state_dict(reference_export.load().state_dict())
    count = told["trained"]
    run.count = Counters(count["step"], count["tokens"], count["seconds"])
    if not (run.folder / "log.jsonl").exists():
        lines = "".join(json.dumps(line) + "\n" for line in told["lines"])
        (run.folder / "log.jsonl").write_text(lines)
    print(f"goes on at {run.count.tokens / 1e6:.1f} M tokens", flush=True)


def exit_share(layer: int, layers: int) -> float:
    """LayerSkip's e(l), normalised over one early layer and the last: the early one's share."""
    early = EXITS * layer * (layer + 1) / 2
    last = layers - 1 + EXITS * (layers - 2) * (layers - 1) / 2
    return early / (early + last)


def loss_of(run: Run, batch: Batch) -> Tensor:
    """The loss to descend: the last layer's on the text, and the distance from it of one early exit, in turn, at a
    quarter of the positions. What drafts by an exit, or stops there, wants what the last layer says, not the text.
    """
    model, head = run.model, run.model.embed_tokens.weight
    ids, weights, kinds, known = batch
    states = list(model.states(ids[:, :-1], DROP))
    target, weight = ids[:, 1:].flatten()[known], weights.flatten()[known]
    normed = model.norm(states[-1].flatten(0, 1)[known])
    last, each = head_loss(normed, head, target, weight / weight.sum())
    of = kinds.flatten()[known]
    run.sums[:, 0].index_add_(0, of, each.double())
    run.sums[:, 1].index_add_(0, of, torch.ones_like(each, dtype=torch.float64))
    layers = len(states)
    early = 1 + run.count.step % (layers - 2)
    few = slice(run.count.step // (layers - 2) % min(4, max(1, len(known))), None, 4)
    own = model.norm(states[early].flatten(0, 1)[known[few]])
    share = exit_share(early, layers)
    return (1 - share) * last + share * head_distance(own, head, normed[few])


def train_step(run: Run, batch: Batch) -> None:
    batch = Batch(*(part.to(run.device, non_blocking=True) for part in batch))
    rate = min(1.0, (run.count.warm + 1) / WARMUP) * (
        run.decay.rate(run.count.tokens) if run.decay else 1.0
    )
    for optimiser, peaks in zip(run.optimisers, run.peaks, strict=True):
        for group, peak in zip(optimiser.param_groups, peaks, strict=True):
            group["lr"] = rate * peak
    half = torch.autocast(run.device.type, torch.bfloat16, enabled=run.half)
    with half:
        loss = loss_of(run, batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    for optimiser in run.optimisers:
        with half:
            optimiser.step()
        optimiser.zero_grad()
    run.count.step += 1
    run.count.warm += 1
    run.count.tokens += batch.weights.numel()


@torch.no_grad()
def agreement(run: Run) -> tuple[list[float], float]:
    """How often each layer's exit chooses the last layer's token on held-out text, and the loss there."""
    window = run.glance.to(run.device)
    states = list(run.model.states(window[:, :-1]))
    logits = [run.model.head(state) for state in states]
    chosen = logits[-1].argmax(-1)
    loss = torch.nn.functional.cross_entropy(logits[-1].flatten(0, 1), window[:, 1:].flatten())
    return [round(float((one.argmax(-1) == chosen).float().mean()), 3) for one in logits], round(
        float(loss), 4
    )


def log_line(run: Run, rate: float) -> dict[str, Any]:
    losses, tokens = run.sums.cpu().unbind(1)
    told = {
        kind: round(float(losses[i] / tokens[i]), 4) for i, kind in enumerate(KINDS) if tokens[i]
    }
    run.sums.zero_()
    exits, loss = agreement(run)
    line = asdict(run.count) | {"rate": round(rate), "loss": told, "held_out": loss, "exits": exits}
    return line | ({"decay": run.decay.tokens} if run.decay else {})


def train(run: Run, until: int | None = None) -> None:
    """Train until stopped, decayed, or at `until` tokens; the log and the checkpoints are kept meanwhile."""

    def stop(*_: object) -> None:
        run.stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    begun = saved = told = time.monotonic()
    base, before = run.count.seconds, run.count.tokens
    batches = ahead(run.rows.draw, run.steps(), 0 if run.device.type == "cpu" else WORKERS)
    try:
        with (run.folder / "log.jsonl").open("a") as log:
            while not (run.stopping or run.done or (until and run.count.tokens >= until)):
                train_step(run, next(batches))
                now = time.monotonic()
                run.count.seconds = base + now - begun
                if now - told >= run.plan.tell or run.done:
                    line = log_line(run, (run.count.tokens - before) / (now - told))
                    told, before = time.monotonic(), run.count.tokens
                    print(json.dumps(line), file=log, flush=True)
                    print(*(f"{key} {value}" for key, value in line.items()), flush=True)
                if now - saved >= run.plan.save:
                    run.save()
                    saved = time.monotonic()
        run.save()
    except OSError as error:
        told = (
            f"training stopped: {error}; the checkpoint before is whole: make room, then --resume"
        )
        raise SystemExit(told) from error
    draw(run.folder)


def release(folder: Path, tokens: int, options: argparse.Namespace) -> None:
    """A copy of the run's newest checkpoint, decayed over `tokens`, exported to api/reference; resumable, too."""
    out = folder / "release"
    out.mkdir(exist_ok=True)
    if not list(out.glob("checkpoint-*.json")):
        digests_last = sorted(folder.glob("checkpoint-*"), key=lambda path: path.suffix == ".json")
        for path in [*folder.glob("corpus*"), *folder.glob("log.jsonl"), *digests_last]:
            shutil.copy2(path, out / path.name)
    run = opened(out, options)
    if run.saved < 0:
        raise SystemExit(f"{folder} has no checkpoint to release: train first")
    run.decay = run.decay or Decay(run.count.tokens, tokens)
    train(run)
    if run.done:
        reference_export.export(out)
        shutil.copy2(out / "curves.png", REFERENCE / "curves.png")
        shutil.rmtree(out)


def yield_to_others(nice: int) -> None:
    """Run at this niceness. Linux weighs the processes of a session together where autogroups are on, and niceness
    counts only within one: then the session's group is made to yield.
    """
    os.nice(max(0, nice - os.nice(0)))
    with contextlib.suppress(OSError):  # no autogroups
        Path("/proc/self/autogroup").write_text(str(nice))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, help="folder of the run, outside the checkout")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest whole checkpoint"
    )
    parser.add_argument("--until", type=float, help="stop at so many million tokens")
    parser.add_argument(
        "--release", type=float, metavar="TOKENS", help="decay over so many million tokens, export"
    )
    parser.add_argument("--evaluate", action="store_true", help="measure api/reference and stop")
    parser.add_argument(
        "--prompts", type=int, default=100, help="prompts per task and length, of --evaluate"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads")
    parser.add_argument(
        "--nice", type=int, default=19, help="how much to yield to others (19: all the time)"
    )
    parser.add_argument(
        "--scale", type=int, default=1, help="times the rows of every step (on a GPU)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="cpu or cuda: a run may change it")
    parser.add_argument(
        "--no-compile", action="store_true", help="leave torch.compile out (no C++ compiler)"
    )
    return parser.parse_args()


def main() -> None:
    options = arguments()
    yield_to_others(options.nice)
    torch.set_num_threads(options.threads)
    if options.evaluate:
        reference_export.evaluate(options.prompts)
        return
    if options.run is None:
        raise SystemExit("give --run DIR, a folder outside the checkout")
    options.run.mkdir(parents=True, exist_ok=True)
    with lock(options.run):
        if options.release:
            release(options.run, round(options.release * 1e6), options)
            return
        if not options.resume and list(options.run.glob("checkpoint-*.json")):
            raise SystemExit(
                f"{options.run} holds a run: add --resume to go on with it, or give another --run"
            )
        train(opened(options.run, options), round(options.until * 1e6) if options.until else None)


def opened(folder: Path, options: argparse.Namespace) -> Run:
    """The run of a folder, its layers compiled."""
    run = prepare(folder, Plan(), options.seed, options.device, options.scale)
    if not options.no_compile and (options.device != "cpu" or shutil.which("g++")):
        torch._dynamo.config.recompile_limit = 64  # a graph for each length of rows
        for layer in run.model.layers:
            layer.compile(dynamic=False)
    return run


if __name__ == "__main__":
    main()
