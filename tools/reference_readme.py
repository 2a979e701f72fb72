"""The text of `api/reference/README.md`: every figure in it comes from the two JSON files there."""

from __future__ import annotations

from typing import Any

from reference_model import Shape

TEMPLATE = """\
# The bundled reference model

A small Llama ({parameters:.2f} M parameters, {layers} layers of width {hidden}, {heads} query and
{kv_heads} key-value heads, byte-level BPE of {vocab}, tied embedding, {positions} positions) that
`accel` uses in its tests and demonstrations. It has seen little text: what it writes looks like
Python and is not, and it recalls from its prompt as measured below. `transformers` loads it as any
other checkpoint.

## How it was made

    python tools/train_reference.py --out RUN --minutes {minutes:.0f}
    python tools/train_reference.py --out RUN --export --evaluate

{tokens:.2f} M tokens in {steps} steps and {seconds} s on 2 CPU cores that other work kept busy, in
float32; stored in float16. Stages and the embedding's rate were adjusted during that run, so the
commands repeat the recipe, not the weights. The text is Python's standard library (without tests
and the files held out; PSF licence) and the synthetic tasks of `tasks.py`, in rows of 256 to 1536
tokens. An induction circuit is placed in the first three layers before training, since so short a
run does not form one (`tools/reference_init.py`); then Muon and AdamW train all weights, with
LayerSkip's layer dropout and early-exit loss on the shared head. `training.json` is the log.

## What it does

Perplexity on {files} held-out files of the standard library ({held} tokens, windows of 1024):
**{perplexity}**.

Exact answers, greedy, in percent of {prompts} prompts per cell, by prompt length in tokens:

{recall}

Each layer's exit (final norm and head on its output) chooses the last layer's token at this share
of the held-out positions:

{agreement}

Measured on the float16 weights widened to float32, by `--evaluate`, into `evaluation.json`.

## To train it further

The aim is 95 of 100 exact answers at 1000 tokens in every task. On a GPU, in a checkout with the
same Python and torch, start anew (a `RUN` can also be copied there and resumed):

    python tools/train_reference.py --out RUN --device cuda --scale 16 --minutes 60 --compile
    python tools/train_reference.py --out RUN --export --evaluate --prompts 100

SIGTERM saves the run; the same command with `--resume` (and more minutes) goes on with it.
"""


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def readme(shape: Shape, trained: dict[str, Any], found: dict[str, Any]) -> str:
    lengths = list(next(iter(found["recall"].values())))
    rows = [
        [f"`{task}`", *(f"{100 * share[length]:.0f}" for length in lengths)]
        for task, share in found["recall"].items()
    ]
    exits = [f"{100 * share:.0f}%" for share in found["held_out"]["agreement"]]
    return TEMPLATE.format(
        parameters=found["parameters"] / 1e6,
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        vocab=shape.vocab,
        positions=shape.positions,
        minutes=trained["seconds"] / 60,
        tokens=trained["tokens"] / 1e6,
        steps=trained["step"],
        seconds=round(trained["seconds"]),
        files=found["held_out"]["files"],
        held=found["held_out"]["tokens"],
        perplexity=found["held_out"]["perplexity"],
        prompts=found["prompts"],
        recall=_table(["Task", *lengths], rows),
        agreement=_table(
            ["Layer", *(str(at + 1) for at in range(len(exits)))], [["Agrees", *exits]]
        ),
    )
