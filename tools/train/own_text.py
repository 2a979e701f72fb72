"""Text that a chat model writes itself, for heads that draft for it: answers to questions about installed packages.

    python tools/train/own_text.py MODEL OUT.txt --minutes 15

The questions are about permissively licensed code and documentation (`corpus.py`), drawn by a seed: explain, go on,
rewrite, answer. OUT.txt gets whole conversations in the model's chat template, one behind another. Rows decode
together, half of them greedily and half at a temperature of 1; on a GPU with `--target triton`.
"""

from __future__ import annotations

import ast
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import typer
from corpus import collect
from rich.progress import Progress

import accel
from accel.runtime.inputs.text import Tokenizer

ROWS, CONTEXT, NEW = 16, 1024, 256
PIECE, SHORTEST = 1200, 150  # characters of a text, and of a function, in a question
ASKED = {
    "code": (
        "Explain what this function does:\n\n{}",
        "Write a docstring for this function:\n\n{}",
        "Write a test for this function:\n\n{}",
        "Rewrite this function with clearer names:\n\n{}",
        "Complete this Python code:\n\n{}",
    ),
    "prose": (
        "Summarize this text:\n\n{}",
        "Explain this to a beginner:\n\n{}",
        "What are the main points of this text?\n\n{}",
        "Continue this text:\n\n{}",
        "Write three questions about this text, and answer them:\n\n{}",
    ),
}


def pieces(kind: str, text: str) -> list[str]:
    """What questions are about: the functions of a module, or the beginning of a text."""
    if kind == "prose":
        return [text[:PIECE]]
    try:
        nodes = ast.walk(ast.parse(text))
    except (SyntaxError, ValueError, RecursionError):
        return []
    found = (ast.get_source_segment(text, n) for n in nodes if isinstance(n, ast.FunctionDef))
    return [one[:PIECE] for one in found if one is not None and len(one) > SHORTEST]


def questions(seed: int) -> Iterator[str]:
    """For ever, in an order of the seed; half of them about code. No held-out file of the corpus is in one."""
    rng = random.Random(seed)
    parts, _ = collect(seed)
    texts = {"code": [*parts["library"], *parts["packages"]], "prose": parts["prose"]}
    while True:
        for kind, asked in ASKED.items():
            if found := pieces(kind, rng.choice(texts[kind])):
                yield rng.choice(asked).format(rng.choice(found))


def written(prompt: str, text: str, ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """A conversation: what was asked, and the answer with the token that ended it, if one did."""
    last = ids[-1] if ids else -1
    end = tokenizer.token(last) if last in tokenizer.special else None
    return f"{prompt}{text}{end or ''}\n"


def main(
    model: Path,
    out: Path,
    minutes: float = 15.0,
    seed: int = 0,
    target: str = "onnx",
) -> None:
    built = accel.optimize(model, target=target, max_context=CONTEXT, max_batch=ROWS)
    if (tokenizer := built.tokenizer) is None:
        raise typer.BadParameter(f"{model} has no tokenizer")
    asked, end, tokens = questions(seed), time.monotonic() + 60 * minutes, 0
    with built, out.open("a", encoding="utf-8") as file, Progress() as bar:
        shown = bar.add_task("answers", total=minutes * 60)
        for turn in itertools.count():
            if (left := end - time.monotonic()) <= 0:
                break
            bar.update(shown, completed=minutes * 60 - left, description=f"{tokens:,} tokens")
            prompts: list[str] = []
            while len(prompts) < ROWS:
                chat = [{"role": "user", "content": next(asked)}]
                text = tokenizer.apply_chat_template(chat, tokenize=False)
                if len(tokenizer.encode(text)) < CONTEXT - NEW:
                    prompts.append(text)
            params = accel.SamplingParams(max_tokens=NEW, temperature=turn % 2, seed=turn)
            found = built.generate(prompts, sampling_params=params)
            for prompt, text, ids in zip(prompts, found.text or [], found.tokens, strict=True):
                tokens += len(ids)
                file.write(written(prompt, text, ids, tokenizer))
            file.flush()


if __name__ == "__main__":
    typer.run(main)
