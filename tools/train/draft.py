"""Distil the draft of the bundled model (arXiv:2310.08461), all of its tokens or the learnable ones (arXiv:2510.19779).

    python tools/train/draft.py --out RUN                                           # plainly
    python tools/train/draft.py --out RUN2 --corpus RUN --reference RUN --keep 0.4  # AdaSPEC: RUN is what it goes by
    python tools/train/draft.py --out RUN2 --evaluate                               # acceptance on held-out text
    python tools/train/draft.py --out RUN2 --reference RUN --export                 # RUN2 -> api/reference/draft

The draft is a Llama over the same tokens. It begins as the bundled model's first layers, seen through the main
directions of its embedding. Runs of one seed read the same rows in the same order. `--corpus` is a folder that holds
the encoded text already, as the bundled model's own run does; else it is made in OUT. SIGTERM and Ctrl-C save a run;
`--resume` goes on as if nothing had been.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import corpus
import torch
from half import faster_in_half
from reference_data import REFERENCE
from reference_export import config, load, load_tokenizer, windows, write_json, write_readme
from reference_export import replace as write_over
from reference_model import Llama, Shape, optimisers
from rows import Rows, Stage
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

DRAFT = REFERENCE / "draft"
SHAPE = Shape(hidden=128, layers=2, ffn=352)
LENGTH = 768  # of a row
WARMUP, DECAY = 20, 0.4
SAVE = 50  # steps


class Taught:
    """Rows as the bundled model was trained on, and what it says of them."""

    def __init__(self, corpus_folder: Path, half: bool, options: argparse.Namespace):
        self.device = torch.device(options.device)
        self.teacher, self.half = load().to(self.device), half
        tokenizer = load_tokenizer()
        self.rows = Rows(tokenizer, corpus.prepare(corpus_folder, tokenizer, 0), options.seed)
        self.stage = Stage(options.rows * LENGTH, {LENGTH: 1.0})
        self.head = self.teacher.embed_tokens.weight.detach()

    @torch.no_grad()
    def batch(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows [B,T] of one step, which of their places [B,T] tell something, the states [N,E] at those."""
        drawn = self.rows.draw(self.stage, step)
        tokens = drawn.ids[:, :-1].to(self.device)
        known = (drawn.weights > 0).to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            states = self.teacher.norm(last_state(self.teacher, tokens)[known])
        return tokens, known, states


def divergence(found: Tensor, want: Tensor) -> Tensor:
    """KL(target, draft) of each place [N], of logits [N,V]."""
    target = want.float().log_softmax(-1)
    return (target.exp() * (target - found.float().log_softmax(-1))).sum(-1)


def learnable(loss: Tensor, reference: Tensor, keep: float) -> Tensor:
    """AdaSPEC's filter: the places [N] whose loss exceeds the reference's most, a share `keep` of them."""
    excess = loss.detach() - reference
    return excess >= torch.quantile(excess, 1 - keep)


@torch.no_grad()
def beginning(teacher: Llama, shape: Shape) -> Llama:
    """The teacher's first layers in the directions that its embedding uses most; of its neurons, the strongest."""
    draft = Llama(shape)
    _, _, axes = torch.linalg.svd(teacher.embed_tokens.weight, full_matrices=False)
    basis = axes[: shape.hidden].T  # [E, e]
    draft.embed_tokens.weight.copy_(teacher.embed_tokens.weight @ basis)
    draft.norm.weight.fill_(float(teacher.norm.weight.mean()))
    for mine, other in zip(draft.layers, teacher.layers, strict=False):
        inner = other.input_layernorm.weight[:, None] * basis
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(mine.self_attn, name).weight.copy_(
                getattr(other.self_attn, name).weight @ inner
            )
        mine.self_attn.o_proj.weight.copy_(basis.T @ other.self_attn.o_proj.weight)
        inner = other.post_attention_layernorm.weight[:, None] * basis
        gate, up = other.mlp.gate_proj.weight @ inner, other.mlp.up_proj.weight @ inner
        down = basis.T @ other.mlp.down_proj.weight
        strong = (gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)).topk(shape.ffn).indices
        mine.mlp.gate_proj.weight.copy_(gate[strong])
        mine.mlp.up_proj.weight.copy_(up[strong])
        mine.mlp.down_proj.weight.copy_(down[:, strong])
    return draft


def last_state(model: Llama, tokens: Tensor) -> Tensor:
    *_, state = model.states(tokens)
    return state


@dataclass
class Run:
    """A run that can be left and taken up again."""

    taught: Taught
    draft: Llama
    options: argparse.Namespace
    reference: Llama | None
    step: int = 0
    seconds: float = 0.0
    stopping: bool = False
    optimisers: list[torch.optim.Optimizer] = field(init=False)

    def __post_init__(self) -> None:
        self.optimisers = optimisers(self.draft)
        self.peaks = [
            [self.options.rate * g["lr"] for g in o.param_groups] for o in self.optimisers
        ]

    def save(self) -> None:
        state = {
            "shape": asdict(self.draft.shape),
            "model": self.draft.state_dict(),
            "optimisers": [o.state_dict() for o in self.optimisers],
            "step": self.step,
            "seconds": self.seconds,
            "rows": self.options.rows,
            "keep": 1.0 if self.reference is None else self.options.keep,
        }
        file = checkpoint(self.options.out)
        torch.save(state, file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)

    def load(self) -> None:
        state = torch.load(checkpoint(self.options.out), "cpu", weights_only=True)
        self.draft.load_state_dict(state["model"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.step, self.seconds = state["step"], state["seconds"]

    def learn(self) -> dict[str, float]:
        """One step."""
        tokens, known, states = self.taught.batch(self.step)
        half = torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.taught.half)
        with half:
            want = states @ self.taught.head.T
            loss = divergence(self.draft.head(last_state(self.draft, tokens)[known]), want)
        told = {"kl": float(loss.detach().mean())}
        if self.reference is not None:
            with torch.no_grad(), half:
                other = divergence(
                    self.reference.head(last_state(self.reference, tokens)[known]), want
                )
            loss = loss[learnable(loss, other, self.options.keep)]
            told |= {"reference": float(other.mean()), "kept": float(loss.detach().mean())}
        loss.mean().backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0)
        rate = min(
            1.0, (self.step + 1) / WARMUP, max(0.02, (1 - self.step / self.options.steps) / DECAY)
        )
        for optimiser, peaks in zip(self.optimisers, self.peaks, strict=True):
            for group, peak in zip(optimiser.param_groups, peaks, strict=True):
                group["lr"] = rate * peak
            with half:
                optimiser.step()
            optimiser.zero_grad()
        self.step += 1
        return told


def checkpoint(folder: Path) -> Path:
    return folder / "checkpoint.pt"


def stored(folder: Path) -> Llama:
    """The draft of a run."""
    state = torch.load(checkpoint(folder), "cpu", weights_only=True)
    draft = Llama(Shape(**state["shape"]))
    draft.load_state_dict(state["model"])
    return draft.eval()


def train(run: Run) -> None:
    """Until the steps are done, or a signal comes."""

    def stop(*_: object) -> None:
        run.stopping = True

    for kind in (signal.SIGTERM, signal.SIGINT):
        signal.signal(kind, stop)
    means: dict[str, float] = {}
    with (run.options.out / "log.jsonl").open("a") as log:
        while not run.stopping and run.step < run.options.steps:
            start = time.monotonic()
            found = run.learn()
            run.seconds += time.monotonic() - start
            means = {n: v if not means else 0.9 * means[n] + 0.1 * v for n, v in found.items()}
            if run.step % 10 == 0:
                line = {
                    "step": run.step,
                    "seconds": round(run.seconds),
                    **{n: round(v, 4) for n, v in means.items()},
                }
                print(json.dumps(line), file=log, flush=True)
                print(*(f"{key} {value}" for key, value in line.items()), flush=True)
            if run.step % SAVE == 0:
                run.save()
    run.save()


@torch.no_grad()
def acceptance(teacher: Llama, tokenizer: Tokenizer, draft: Llama) -> dict[str, float]:
    """Over held-out text: the chance that a token drawn from the draft stands (the mean of sum min(p, q)), and how
    often the two would choose the same.
    """
    alpha = agree = count = 0.0
    for window in windows(tokenizer):
        p, q = (m.head(last_state(m, window[None, :-1])[0]) for m in (teacher, draft))
        agree += float((p.argmax(-1) == q.argmax(-1)).sum())
        alpha += float(torch.minimum(p.softmax(-1), q.softmax(-1)).sum())
        count += len(p)
    return {"alpha": round(alpha / count, 4), "greedy": round(agree / count, 4), "tokens": count}


def told(folder: Path) -> dict[str, Any]:
    """What a run was and what its draft reaches."""
    state = torch.load(checkpoint(folder), "cpu", weights_only=True)
    found = acceptance(load(), load_tokenizer(), stored(folder))
    return {
        "steps": state["step"],
        "seconds": round(state["seconds"]),
        "keep": state["keep"],
        "held_out": found,
    }


def export(folder: Path, other: Path) -> None:
    """The run's draft as float16 weights, with its configuration and how it compares with the other run's."""
    draft = stored(folder)
    weights = {
        f"model.{name}": value.half().contiguous() for name, value in draft.state_dict().items()
    }
    DRAFT.mkdir(exist_ok=True)
    write_json(DRAFT / "config.json", config(draft.shape))
    write_over(DRAFT / "model.safetensors", lambda path: save_file(weights, path, {"format": "pt"}))
    runs = {"plain" if run["keep"] == 1 else "adaspec": run for run in (told(folder), told(other))}
    state = torch.load(checkpoint(folder), "cpu", weights_only=True)
    shape = {
        "layers": draft.shape.layers,
        "hidden": draft.shape.hidden,
        "rows": state["rows"],
        "length": LENGTH,
    }
    count = sum(p.numel() for p in draft.parameters())
    shipped = "plain" if state["keep"] == 1 else "adaspec"
    write_json(
        DRAFT / "training.json", {"parameters": count, **shape, "shipped": shipped, "runs": runs}
    )
    write_readme()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument(
        "--corpus", type=Path, help="folder that holds the encoded text (default: OUT)"
    )
    parser.add_argument("--steps", type=int, default=2000, help="in all sessions")
    parser.add_argument("--rows", type=int, default=8, help=f"of {LENGTH} tokens, of a step")
    parser.add_argument(
        "--rate", type=float, default=1.0, help="times the bundled model's learning rates"
    )
    parser.add_argument(
        "--reference",
        type=Path,
        help="another run: keep the tokens where this one is most behind it",
    )
    parser.add_argument(
        "--keep", type=float, default=0.4, help="share of the tokens to keep, with --reference"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads")
    parser.add_argument("--device", default="cpu", help="cpu or cuda: a run may change it")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--evaluate", action="store_true", help="measure the run's draft and stop")
    parser.add_argument("--export", action="store_true", help="write api/reference/draft and stop")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    if options.evaluate:
        print(json.dumps(told(options.out)))
        return
    if options.export:
        if options.reference is None:
            raise SystemExit("name the run to compare with, as --reference RUN")
        export(options.out, options.reference)
        return
    if checkpoint(options.out).exists() != options.resume:
        what, act = (
            ("is not there", "leave --resume out") if options.resume else ("exists", "add --resume")
        )
        raise SystemExit(f"{checkpoint(options.out)} {what}: {act}, or choose another --out")
    options.out.mkdir(parents=True, exist_ok=True)
    half = options.device != "cpu" or faster_in_half()
    taught = Taught(options.corpus or options.out, half, options)
    torch.manual_seed(options.seed)
    reference = None if options.reference is None else stored(options.reference)
    if reference is not None:
        reference.to(options.device)
    run = Run(taught, beginning(load(), SHAPE).to(options.device), options, reference)
    if options.device != "cpu" or shutil.which("g++"):
        for layer in (*taught.teacher.layers, *run.draft.layers):
            layer.compile(dynamic=False)
    if options.resume:
        run.load()
    train(run)


if __name__ == "__main__":
    main()
