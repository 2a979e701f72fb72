"""Train the bundled masked-diffusion model from the bundled one's weights, restartably.

    python tools/train/diffusion.py --out RUN --minutes 60       # train, or continue with --resume
    python tools/train/diffusion.py --out RUN --begin api/reference/diffusion    # train that one on
    python tools/train/diffusion.py --out RUN --export           # RUN -> api/reference/diffusion

The weights begin as those of `api/reference` and see both ways from then on; the logits of token i
stay a prediction of token i + 1 (Dream's shift), so that copying what follows works from the first
step on. A row is a prompt, its answer, and <|eos|> up to the row's end; of all that follows the prompt a
share is masked, and the model learns what stood there (LLaDA, arXiv:2502.09992). Half of the rows
are masked as decoding in blocks meets them: all known before a block, nothing behind it. Answers have up
to 128 tokens, in rows of 96 to 288. SIGTERM saves the run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import reference_export
import torch
from checkpoints import Checkpoints
from half import faster_in_half
from losses import head_loss
from reference_data import BOS, EOS, PAD, REFERENCE, encode, sources, tasks
from reference_model import Llama, Shape, optimisers
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

MASK = PAD  # the id that no text has; nothing is padded here
BLOCKS = (16, 32, 64)  # that decoding may go by
CODE = 0.2  # what a token of a program counts: there are many, and few can be known
MIX = {"copy": 2.0, "key_value": 2.0, "rest": 4.0, "pass_key": 0.5, "code": 0.5}
LENGTHS = {96: 0.3, 160: 0.3, 288: 0.4}  # tokens of a row: how often
TOKENS = 4608  # of a step
LINES = 4  # times four lines at most are the answer of `rest`, of nine tokens each
PEAK = 0.5  # times the bundled model's learning rates: the weights have learnt already
WARMUP, DECAY = 20, 0.25


class Masked:
    """Rows `(ids [B,T], given [B,T], weights [B,T])`: the text, what the model is shown of it, and
    how much each masked token counts; a function of the seed and of the step.
    """

    def __init__(self, tokenizer: Tokenizer, corpus: np.ndarray, seed: int) -> None:
        self.tokenizer, self.corpus, self.seed = tokenizer, corpus, seed
        self.rng = random.Random(seed)

    def draw(self, step: int) -> tuple[Tensor, ...]:
        self.rng.seed(f"{self.seed} {step}")
        length = self.rng.choices(list(LENGTHS), list(LENGTHS.values()))[0]
        kinds = self.rng.choices(list(MIX), list(MIX.values()), k=TOKENS // length)
        drawn = [self._masked(*self.row(kind, length)) for kind in kinds]
        ids, given, weights = (torch.tensor(np.stack(part)) for part in zip(*drawn, strict=True))
        code = torch.tensor([kind == "code" for kind in kinds])
        return ids, given, torch.where(code[:, None], CODE * weights, weights)

    def row(self, kind: str, length: int) -> tuple[np.ndarray, int, int]:
        """A row [length], where its answer begins, and where its end marks begin."""
        if kind == "code":
            start = self.rng.randrange(len(self.corpus) - length)
            return self.corpus[start : start + length].astype(np.int64), 8, length
        room = self.rng.randrange(24, length // 2 + 8 if kind == "rest" else length - 24)
        lines = tasks.lines_for("copy" if kind == "rest" else kind, room)
        pieces = (
            tasks.rest(self.rng, lines, LINES)
            if kind == "rest"
            else tasks.TASKS[kind](self.rng, lines, 1)
        )
        end = next(at for at, (_, is_answer) in enumerate(pieces) if is_answer)
        prompt = [BOS, *self._ids("".join(text for text, _ in pieces[:end]))]
        answer = self._ids(pieces[end][0])[: length - len(prompt)]
        row = np.full(length, EOS, dtype=np.int64)
        row[: len(prompt) + len(answer)] = [*prompt, *answer]
        return row, len(prompt), len(prompt) + len(answer) + 1

    def _ids(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def _masked(self, row: np.ndarray, start: int, end: int) -> tuple[np.ndarray, ...]:
        """Masks a share t of what follows `start`, or of one block of it and all behind that. A masked
        token counts 1/t, one of many end marks a tenth of it.
        """
        size = len(row)
        share = 1 - self.rng.random() * 0.8
        places = np.arange(size)
        hidden = np.array([self.rng.random() < share for _ in row])
        weights = np.where(hidden, 1 / share, 0.0)
        if self.rng.random() < 0.5:
            block = self.rng.choice(BLOCKS)
            first = start + block * self.rng.randrange(1 + (min(end, size - 1) - start) // block)
            hidden = (hidden & (places >= first)) | (places >= first + block)
            weights = np.where(hidden, np.where(places < first + block, 1 / share, 0.3), 0.0)
        hidden &= places >= start
        weights = weights * hidden * np.where(places >= end, 0.1, 1.0)
        return row, np.where(hidden, MASK, row), weights.astype(np.float32)


@dataclass
class Run:
    """A run that can be left and taken up again; `minutes` of training pace it."""

    folder: Path
    rows: Masked
    model: Llama
    minutes: float
    half: bool  # products in bfloat16; weights and sums stay float32
    device: torch.device = torch.device("cpu")
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0  # of this machine's processors on a processor; else as time passes
    before: dict[str, Any] = field(
        default_factory=dict
    )  # what the run did whose model it began with
    stopping: bool = False

    told: ClassVar[str | None] = __doc__
    default: ClassVar[str] = "diffusion"  # the model's folder in api/reference
    made_of: ClassVar[type[Masked]] = Masked
    fills: ClassVar[dict[str, Any]] = {
        "is_causal": False,
        "mask_token_id": MASK,
        "logit_shift": True,
    }

    def __post_init__(self) -> None:
        self.optimisers = optimisers(self.model)
        self.peaks = [[PEAK * group["lr"] for group in o.param_groups] for o in self.optimisers]
        self.checkpoints = Checkpoints(self.folder)

    def loss(self, ids: Tensor, given: Tensor, weights: Tensor) -> Tensor:
        *_, state = self.model.states(given)
        counts = weights[:, 1:].flatten()
        at = counts.nonzero().squeeze(1)
        normed = self.model.norm(state[:, :-1].flatten(0, 1)[at])
        shares = counts[at] / counts.sum()
        head = self.model.embed_tokens.weight
        return head_loss(normed, head, ids[:, 1:].flatten()[at], shares)[0]

    @torch.no_grad()
    def probe(self) -> dict[str, list[float]]:
        """The share of right tokens by place in the answer (1, 2, 4, ... 128), all of it masked."""
        rows = self.made_of(self.rows.tokenizer, self.rows.corpus, self.step)
        found = {}
        for kind in MIX:
            right: dict[int, list[float]] = {}
            for _ in range(24):
                row, start, end = rows.row(kind, max(LENGTHS))
                chosen = self.guess(row, start)
                for place in (1, 2, 4, 8, 16, 32, 64, 128):
                    if place <= len(chosen) and start + place <= min(end, len(row)):
                        same = chosen[place - 1] == row[start + place - 1]
                        right.setdefault(place, []).append(same)
            found[kind] = [round(float(np.mean(right[p])), 2) for p in sorted(right)]
        return found

    def guess(self, row: np.ndarray, start: int) -> np.ndarray:
        """What the model says of the tokens of a row from `start` on, of which it sees none."""
        given = row.copy()
        given[start:] = MASK
        *_, state = self.model.states(torch.tensor(given[None]).to(self.device))
        found: np.ndarray = self.model.head(state[0, start - 1 : -1]).argmax(-1).cpu().numpy()
        return found

    @property
    def progress(self) -> float:
        return self.seconds / 60 / self.minutes

    def save(self) -> None:
        state = {
            "shape": asdict(self.model.shape),
            "count": {"step": self.step, "tokens": self.tokens, "seconds": self.seconds},
            "before": self.before,
            "model": self.model.state_dict(),
            "optimisers": [o.state_dict() for o in self.optimisers],
        }
        self.checkpoints.save(self.step, state)

    def load(self, state: dict[str, Any]) -> None:
        self.step, self.tokens, self.seconds = (
            state["count"][name] for name in ("step", "tokens", "seconds")
        )
        self.before = state["before"]
        self.model.load_state_dict(state["model"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)


def prepare(
    kind: type[Run], folder: Path, minutes: float, seed: int, device: str, begin: Path = REFERENCE
) -> Run:
    """A run at step 0: the weights of the model in `begin`."""
    start, tokenizer = reference_export.load(begin), reference_export.load_tokenizer()
    torch.manual_seed(seed)
    model = Llama(replace(start.shape, causal=kind.fills.get("is_causal", True)))
    model.load_state_dict(start.state_dict())
    model.to(device)
    if shutil.which("g++"):
        torch._dynamo.config.recompile_limit = 64  # a graph for each length of rows
        for layer in model.layers:
            layer.compile(dynamic=False)
    rows = kind.made_of(tokenizer, encode(tokenizer, sources()[0]), seed)
    half = device != "cpu" or faster_in_half()
    run = kind(folder, rows, model, minutes, half, torch.device(device))
    if begin != REFERENCE:
        run.before = json.loads((begin / "training.json").read_text(encoding="utf-8"))["trained"]
    return run


def train_step(run: Run) -> float:
    batch = [part.to(run.device) for part in run.rows.draw(run.step)]
    rate = min(1.0, (run.step + 1) / WARMUP, max(0.02, (1 - run.progress) / DECAY))
    for optimiser, peaks in zip(run.optimisers, run.peaks, strict=True):
        for group, peak in zip(optimiser.param_groups, peaks, strict=True):
            group["lr"] = rate * peak
    half = torch.autocast(run.device.type, torch.bfloat16, enabled=run.half)
    with half:
        loss = run.loss(*batch)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    for optimiser in run.optimisers:
        with half:
            optimiser.step()
        optimiser.zero_grad()
    run.step += 1
    run.tokens += batch[0].numel()
    return float(loss.detach())


def train(run: Run) -> None:
    """Until the minutes are over, or a signal comes; a log line every 20 steps."""

    def stop(*_: object) -> None:
        run.stopping = True

    for kind in (signal.SIGTERM, signal.SIGINT):
        signal.signal(kind, stop)
    losses: list[float] = []
    clock = time.process_time if run.device.type == "cpu" else time.monotonic
    with (run.folder / "log.jsonl").open("a") as log:
        while not run.stopping and run.progress < 1:
            start = clock()
            losses.append(train_step(run))
            run.seconds += clock() - start
            if run.step % 20 == 0:
                loss = round(sum(losses) / len(losses), 4)
                line: dict[str, Any] = {
                    "step": run.step,
                    "seconds": round(run.seconds),
                    "loss": loss,
                }
                losses.clear()
                if run.step % 100 == 0:
                    line["accuracy"] = run.probe()
                    run.save()
                print(json.dumps(line), file=log, flush=True)
                print(*(f"{key} {value}" for key, value in line.items()), flush=True)
    run.save()


def export(kind: type[Run], folder: Path, out: Path) -> None:
    """The run's newest checkpoint as float16 weights, with all that loading them by path needs."""
    state = Checkpoints(folder).load()
    if state is None:
        raise SystemExit(f"{folder} has no checkpoint to export: train first")
    shape = Shape(**state["shape"])
    texts = {
        "config.json": json.dumps({**reference_export.config(shape), **kind.fills}, indent=2)
        + "\n",
        "training.json": reference_export.compact(
            {
                "trained": state["count"],
                "before": state["before"],
                "rows": list(LENGTHS),
                **kind.fills,
            },
            folder / "log.jsonl",
        ),
    }
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        texts[name] = (REFERENCE / name).read_text(encoding="utf-8")
    out.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (out / name).write_text(text, encoding="utf-8")
    weights = {f"model.{k}": v.half().contiguous() for k, v in state["model"].items()}
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    reference_export.write_readme()
    print(f"exported step {state['count']['step']} to {out}")


def main(kind: type[Run]) -> None:
    parser = argparse.ArgumentParser(
        description=kind.told, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--minutes", type=float, default=60, help="training time, all sessions")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="cpu or cuda: a run may change it")
    parser.add_argument(
        "--begin", type=Path, default=REFERENCE, help="a model of this form to train on"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--export", action="store_true", help="write the model and stop")
    parser.add_argument("--to", type=Path, default=REFERENCE / kind.default, help="where to")
    options = parser.parse_args()
    if options.export:
        return export(kind, options.out, options.to)
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    run = prepare(kind, options.out, options.minutes, options.seed, options.device, options.begin)
    state = run.checkpoints.load()
    if (state is None) == options.resume:
        what, act = (
            ("has no checkpoint", "leave --resume out")
            if state is None
            else ("holds a run", "add --resume")
        )
        raise SystemExit(f"{options.out} {what}: {act}, or choose another --out")
    if state is not None:
        run.load(state)
    train(run)


if __name__ == "__main__":
    main(Run)
