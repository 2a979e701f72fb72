"""A chat with a hybrid on the server: time to the first token of each turn, and prompt tokens that run, where earlier
turns are reused and where they are not.

    python tools/bench/bench_turns.py [--turns 5] [--prompt 600] [--new 48] [--rounds 3] [--layers 12] [--hidden 768]

The model has the shape of Qwen3.5's text models (three layers of gated delta rule to one of attention) and random
weights. `accel-compile serve` runs it twice, built with `base` and with `paged-prefix`; both are up, and take turns. A
turn's prompt is that of the turn before, its answer and a few new tokens.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer
from turns import REFERENCE, head, in_turns, median_range, row

import accel

RECIPES = ("base", "paged-prefix")
ASKED = 60  # tokens of each later question
START = 120.0  # seconds that a server has until it answers


def hybrid(hidden: int, layers: int, context: int, folder: Path) -> float:
    """Write a checkpoint with the bundled tokenizer: millions of parameters."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    tokenizer = AutoTokenizer.from_pretrained(REFERENCE)
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    config = Qwen3_5TextConfig(
        vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=3 * hidden,
        num_hidden_layers=layers, layer_types=(kinds * layers)[:layers], num_attention_heads=hidden // 128,
        num_key_value_heads=2, head_dim=128, linear_num_key_heads=hidden // 128, linear_num_value_heads=hidden // 128,
        linear_key_head_dim=128, linear_value_head_dim=128, max_position_embeddings=context,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(weight.numel() for weight in model.parameters()) / 1e6


@contextmanager
def served(artifact: Path) -> Iterator[str]:
    """The address of a server of an artifact, in a process of its own."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    words = [sys.executable, "-m", "accel.cli", "serve", str(artifact), "--port", str(port)]
    log = artifact.with_suffix(".log")
    with log.open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out)
    try:
        url, until = f"http://127.0.0.1:{port}", time.monotonic() + START
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > until:
                    text = log.read_text(encoding="utf-8", errors="replace")
                    raise SystemExit(f"the server did not start: {text[-2000:]}") from None
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def turn(url: str, prompt: list[int], new: int) -> tuple[float, int, list[int]]:
    """Seconds to the first token of an answer, tokens of the prompt that did not run, and the answer."""
    body = {
        "prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True, "stream": True,
        "return_token_ids": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    data = json.dumps(body).encode()
    request = urllib.request.Request(
        f"{url}/v1/completions", data, {"Content-Type": "application/json"}
    )
    start, first, known, answer = time.perf_counter(), 0.0, 0, list[int]()
    with urllib.request.urlopen(request, timeout=120) as reply:
        for line in reply:
            if not line.startswith(b"data: {"):
                continue
            told = json.loads(line[6:])
            for choice in told["choices"]:
                answer += choice.get("token_ids") or []
            first = first or (time.perf_counter() - start if answer else 0.0)
            if told.get("usage"):
                known = told["usage"]["prompt_tokens_details"]["cached_tokens"]
    return first, known, answer


def chat(url: str, seed: int, turns: int, prompt: int, new: int, vocabulary: int) -> list[Any]:
    """The turns of a conversation that no other begins as: seconds, prompt tokens, those reused, answer."""
    draw = np.random.default_rng(seed)
    text, found = draw.integers(3, vocabulary, prompt).tolist(), list[Any]()
    for _ in range(turns):
        first, known, answer = turn(url, text, new)
        found.append((first, len(text), known, answer))
        text += [*answer, *draw.integers(3, vocabulary, ASKED).tolist()]
    return found


def snapshots(artifact: Path, prompt: int, new: int) -> dict[str, float]:
    """What a session of a prompt and its answer says of its snapshots."""
    with accel.load(artifact) as model, model.session() as session:
        session.prompt(np.random.default_rng(1).integers(3, model.facts.vocab_size, (1, prompt)))
        for _ in range(new):
            session.run([[5]])
        return {**session.stats, "state": sum(x.state_bytes for x in model.facts.layers)}


def main(
    turns: Annotated[int, typer.Option(min=1)] = 5,
    prompt: Annotated[int, typer.Option(min=4)] = 600,
    new: Annotated[int, typer.Option(min=1)] = 48,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    layers: Annotated[int, typer.Option(min=4)] = 12,
    hidden: Annotated[int, typer.Option(min=128)] = 768,
    folder: Annotated[Path | None, typer.Option(help="where builds are kept")] = None,
) -> None:
    """Print the table."""
    context = prompt + turns * (ASKED + new) + 16
    with ExitStack() as stack:
        where = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        size = hybrid(hidden, layers, context, where / "model")
        for name in RECIPES:
            if not (where / name).exists():
                sizes = {"max_context": context, "max_batch": 2, "verify": False}
                accel.optimize(where / "model", name, out=where / name, **sizes).close()
        with accel.load(where / RECIPES[0]) as model:
            vocabulary = model.facts.vocab_size
        told = snapshots(where / RECIPES[1], prompt, new)
        urls = {name: stack.enter_context(served(where / name)) for name in RECIPES}
        seeds = dict.fromkeys(RECIPES, 0)

        def conversation(name: str) -> list[Any]:
            seeds[name] += 1
            return chat(urls[name], seeds[name], turns, prompt, new, vocabulary)

        ways = {name: (lambda name=name: conversation(name)) for name in RECIPES}
        found = in_turns(ways, rounds, warm=1, quiet=0.5)
    same = all(
        [one[3] for one in a] == [one[3] for one in b] for a, b in zip(*found.values(), strict=True)
    )
    print(f"{size:.0f} million parameters, {layers} layers; answers equal: {same}")
    print(
        f"a snapshot: {told['state'] / 1e6:.2f} MB, "
        f"{1e3 * told['snapshot_seconds'] / max(1, told['snapshots']):.2f} ms"
    )
    head(
        "turn",
        ">prompt tokens",
        ">run",
        ">run, reused",
        ">first token, ms",
        ">reused, ms",
        ">ratio",
    )
    plain, shared = found.values()
    for i in range(turns):
        before, after = ([1e3 * chat[i][0] for chat in way] for way in (plain, shared))
        tokens, known = plain[0][i][1], int(median(chat[i][2] for chat in shared))
        cells = (median_range(before, 0), median_range(after, 0))
        row(
            i + 1, tokens, tokens - plain[0][i][2], tokens - known, *cells, f"{median(after) / median(before):.2f}"
        )  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
