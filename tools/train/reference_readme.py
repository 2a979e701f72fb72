"""The text of `api/reference/README.md`: every figure in it comes from the JSON files there."""

from __future__ import annotations

from typing import Any

from reference_model import Shape

TEMPLATE = """\
# The bundled reference model

A small Llama ({parameters:.2f} M parameters, {layers} layers of width {hidden}, {heads} query and
{kv_heads} key-value heads, byte-level BPE of {vocab}, tied embedding, {positions} positions) that
`accel` uses in its tests and demonstrations. What it writes looks like Python, and does seldom what
it says; it recalls from its prompt as measured below. `transformers` loads it as any other checkpoint.

## How it was made

{tokens:.2f} M tokens in {steps} steps and {seconds} s by `tools/train/reference.py`, in float32; stored in float16.
Muon and AdamW train all weights, with LayerSkip's layer dropout; one early exit in turn learns, by the shared head,
what the last layer says. The rate was warmed up and held for 51.5 M tokens, 8192 a step, on 2 CPU cores; then it fell
to zero over 400 M tokens, 65,536 a step, in 4 minutes of one H100 (`--release 400 --device cuda --scale 8`). The
small steps were what held it up: at four times their tokens and the held rate, 6 M tokens brought the loss of the
packages from 2.17 to 1.97. `training.json` is the log, and these are its curves, where held out from 51.5 M on are six
windows of Python 3.12's files; the figures that follow are those of the end, on Python 3.11's.

![Losses and exits by tokens](curves.png)

## What it does

Perplexity on {files} held-out files of the standard library ({held} tokens, windows of 1024):
**{perplexity}**.

Of {asked} heads of functions of these files, completed greedily, **{parse}** parse.

Exact answers, greedy, in percent of {prompts} prompts per cell, by prompt length in tokens:

{recall}

Each layer's exit (final norm and head on its output) chooses the last layer's token at this share
of the held-out positions:

{agreement}

Measured on the float16 weights widened to float32, by `--evaluate`, into `evaluation.json`.

What was aimed at, and what came:

{aims}

## Its draft model

`draft/`: a Llama of {draft_parameters:.2f} M parameters ({draft_layers} layers of width {draft_hidden})
over the same tokens (this folder's `tokenizer.json`), for `draft = model`. It begins as the bundled
model's first layers, in the {draft_hidden} directions that its embedding uses most, and learns the
bundled model's distributions over rows of the kinds that this was trained on (KL; DistillSpec). The
second run keeps only the {keep:.0%} of the tokens of each step at which it is most behind the first
one (AdaSPEC). Both took {draft_steps} steps of {draft_rows} rows of {draft_length} tokens, the same rows in
the same order, {draft_seconds} s in all.

    python tools/train/draft.py --out RUN --steps {draft_steps} --rows {draft_rows}
    python tools/train/draft.py --out RUN2 --steps {draft_steps} --rows {draft_rows} --corpus RUN \\
        --reference RUN --keep {keep}
    python tools/train/draft.py --out {shipped_run} --reference {other_run} --export

Over the held-out files, {held} tokens: the chance that a token drawn from the draft stands (the mean of
sum min(p, q)), and how often both would choose the same token:

{acceptance}

`draft/` holds the {shipped} one.

## To train it further

In a checkout with its packages:

    python tools/train/reference.py --run RUN --resume       # stop it at any moment; the same command goes on

A release, and what is made of its weights, in this order:

    python tools/train/reference.py --run RUN --release 60   # decay a copy over 60 M tokens, and export it here
    python tools/train/draft.py, diffusion.py, block_diffusion.py   # as above and below: the models beside it
    python tools/train/again.py                              # the trained parts of methods, each as it was made
    python tools/tree_template.py --out api/reference/stand.json
    python tools/pages/all.py                                # all pages that tell of these models, this one too

On a GPU add `--device cuda`, and to `reference.py` `--scale 8`. The text is Python's standard library, the installed
packages whose licence permits it, and their documentation, without doubles and without the files held out; an eighth
of the rows are the tasks of `tasks.py`. `RUN/corpus.json` lists the packages and their licences.

## The masked-diffusion model beside it

`diffusion/` is the same model after it was taught to fill masks: it sees both ways, `<|pad|>` is
the mask, and the logits of a token say what follows it (`logit_shift`, as in Dream). It began with
the weights above.

    python tools/train/diffusion.py --out RUN --device cuda
    python tools/train/diffusion.py --out RUN --export
    python tools/train/diffusion.py --out MORE --begin api/reference/diffusion --minutes 50 --threads 1 --seed 7
    python tools/train/diffusion.py --out MORE --export

It read {before_tokens:.2f} M tokens in {before_seconds} s of a GPU, then {filled_tokens:.2f} M in
{filled_seconds} s of a processor's core, in rows of {shortest} to {longest} (the tasks above, one with answers of
up to 144 tokens, `tasks.rest`, and a little code): prompt and answer should be no longer together.
`diffusion/training.json` is its log. What it answers, and in how many calls, is in
docs/figures/details/diffusion.md, by `python tools/bench/bench_diffusion.py`.

## The block-diffusion model beside it

`blocks/` is the same model after it was taught to fill blocks of masks behind a text, too: it stays causal, a
block of up to {block_size} tokens sees the text and itself, and `<|pad|>` is the mask (`block_size`, `logit_shift`).
It began with the weights above.

    python tools/train/block_diffusion.py --out RUN
    python tools/train/block_diffusion.py --out RUN --export

It read {block_tokens:.2f} M tokens in {block_seconds} s of a processor, in rows of the same tasks.
`blocks/training.json` is its log; its figures are by
`python tools/bench/bench_diffusion.py --model api/reference/blocks`.
"""


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _aims(found: dict[str, Any], draft: dict[str, Any]) -> str:
    """What a release should reach, beside what this one does."""
    worst = min(found["recall"], key=lambda task: found["recall"][task]["1000"])
    stands = draft["runs"][draft["shipped"]]["held_out"]["alpha"]
    rows = [
        ["perplexity", "9 at most", str(found["held_out"]["perplexity"])],
        [
            "exact answers at 1000 tokens, each task",
            "95%",
            f"{100 * found['recall'][worst]['1000']:.0f}% (`{worst}`)",
        ],
        [
            "heads that parse",
            "80%",
            f"{found['functions']['parse'] / found['functions']['asked']:.0%}",
        ],
        ["the draft's tokens that stand", "75%", f"{stands:.1%}"],
    ]
    return _table(["What", "Aim", "Came"], rows)


def _draft(told: dict[str, Any]) -> dict[str, Any]:
    """What the README says of the draft model, by `draft/training.json`."""
    runs = told["runs"]
    rows = [
        [name, *(f"{100 * run['held_out'][key]:.1f}%" for key in ("alpha", "greedy"))]
        for name, run in runs.items()
    ]
    adaspec = told["shipped"] == "adaspec"
    return {
        **{f"draft_{key}": told[key] for key in ("layers", "hidden", "rows", "length")},
        "draft_parameters": told["parameters"] / 1e6,
        "draft_steps": runs["plain"]["steps"],
        "draft_seconds": sum(run["seconds"] for run in runs.values()),
        "keep": runs["adaspec"]["keep"],
        "shipped": told["shipped"],
        "shipped_run": "RUN2" if adaspec else "RUN",
        "other_run": "RUN" if adaspec else "RUN2",
        "acceptance": _table(["Distilled", "Stands", "Agrees"], rows),
    }


def readme(
    shape: Shape,
    training: dict[str, Any],
    found: dict[str, Any],
    draft: dict[str, Any],
    diffusion: dict[str, Any],
    blocks: dict[str, Any],
) -> str:
    trained = training["trained"]
    lengths = list(next(iter(found["recall"].values())))
    rows = [
        [f"`{task}`", *(f"{100 * share[length]:.0f}" for length in lengths)]
        for task, share in found["recall"].items()
    ]
    exits = [f"{100 * share:.0f}%" for share in found["held_out"]["agreement"]]
    return TEMPLATE.format(
        **_draft(draft),
        aims=_aims(found, draft),
        tokens=trained["tokens"] / 1e6,
        steps=trained["step"],
        seconds=round(trained["seconds"]),
        before_tokens=diffusion["before"]["tokens"] / 1e6,
        before_seconds=round(diffusion["before"]["seconds"]),
        filled_tokens=diffusion["trained"]["tokens"] / 1e6,
        filled_seconds=round(diffusion["trained"]["seconds"]),
        block_tokens=blocks["trained"]["tokens"] / 1e6,
        block_seconds=round(blocks["trained"]["seconds"]),
        block_size=blocks["block_size"],
        shortest=min(diffusion["rows"]),
        longest=max(diffusion["rows"]),
        parameters=found["parameters"] / 1e6,
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        vocab=shape.vocab,
        positions=shape.positions,
        files=found["held_out"]["files"],
        held=found["held_out"]["tokens"],
        perplexity=found["held_out"]["perplexity"],
        asked=found["functions"]["asked"],
        parse=found["functions"]["parse"],
        prompts=found["prompts"],
        recall=_table(["Task", *lengths], rows),
        agreement=_table(
            ["Layer", *(str(at + 1) for at in range(len(exits)))], [["Agrees", *exits]]
        ),
    )
