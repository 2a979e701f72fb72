"""What each way to store weights costs the bundled model, or yours: a table for docs/figures/details/weights.md.

    python tools/bench/weights_loss.py
    python tools/bench/weights_loss.py --model my-model --recall 0 int8 int4 int4-gptq
    python tools/bench/weights_loss.py --gguf model.gguf --cache build/weights int4 mixed int8

Each recipe is built, and reports bits per weight, KL from float32 and perplexity on its held-out text;
`--recall` asks so many prompts of 500 tokens of each recall task of the bundled model, and counts the
exact answers. With `--gguf`, of the floats of a llama or qwen2 file: accel's artifacts beside the files
that llama.cpp makes of the same floats (needs llama-cpp-python and gguf), on text of this Python's library.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "train"))
import llama_files
import numpy as np
import turns
from bench_cases import Spec
from bench_peers import Peer, Where
from reference_data import REFERENCE, tasks
from rich.console import Console
from rich.progress import track

import accel
from accel.compiler.quality.divergence import log_odds
from accel.runtime.model.compiled import CompiledModel

RECIPES = ("base", "float16", "int8", "mixed", "int4", "int4-awq", "int4-gptq")
TASKS = ("pass_key", "key_value", "copy")
PROMPT = 500  # tokens
WHOLE = "float32's"  # where its perplexity goes, which other recipes' reports tell


def recall(compiled: CompiledModel, task: str, count: int) -> int:
    """How many of `count` prompts of a task are answered exactly, in greedy decoding."""
    right = 0
    for seed in range(count):
        prompt, answer = tasks.make(task, random.Random(seed), PROMPT)
        assert compiled.tokenizer is not None
        length = len(compiled.tokenizer.encode(answer, special=False))
        right += compiled.generate([prompt], max_new_tokens=length).text == [answer]
    return right


def row(model: Path, recipe: Any, prompts: int) -> tuple[list[str], float | None]:
    """Cells of a line of the table, and the perplexity of float32 on the same text; None where nothing was rounded."""
    with accel.optimize(model, recipe) as compiled:
        bits = compiled.report.get("weights", {}).get("bits_per_weight", 32)
        lost = compiled.report.get("loss", {})
        told = [f"{lost['kl']:.4f}", f"{lost['perplexity']:.2f}"] if lost else ["0", WHOLE]
        cells = [f"{bits:.2f}", *told]
        if prompts:
            cells += [f"{100 * recall(compiled, task, prompts) / prompts:.0f}" for task in TASKS]
        return cells, lost["perplexity_float32"] if lost else None


class Peers:
    """accel's artifacts and llama.cpp's files of the same floats, and how far each is from them."""

    def __init__(self, source: Path, cache: Path):
        self.cache = cache / source.stem
        self.cache.mkdir(parents=True, exist_ok=True)
        self.floats = self.cache / "floats.gguf"
        if not self.floats.exists():
            part = self.cache / "floats.part"
            llama_files.write_floats(source, part)
            part.rename(self.floats)

    def artifact(self, recipe: str) -> Path:
        out = self.cache / recipe
        if not out.exists():
            start = time.perf_counter()
            accel.optimize(self.floats, recipe, out=out, max_context=1024, verify=False).close()
            print(f"{recipe}: built in {time.perf_counter() - start:.0f} s", file=sys.stderr)
        return out

    def files(self, calibration: Any) -> dict[str, Path]:
        """llama.cpp's, by name; those that end in +imatrix go by the calibration text."""
        matrix = None
        found = {}
        for name in ("Q4_0", "Q4_K_M", "Q4_0+imatrix", "Q4_K_M+imatrix"):
            found[name] = out = self.cache / f"{name}.gguf"
            kind, _, by = name.partition("+")
            if not out.exists():
                if by and matrix is None:
                    matrix = llama_files.importance(self.floats, calibration)
                llama_files.quantise(self.floats, out, kind, matrix if by else None)
        return found


def texts(encode: Callable[[str], list[int]], rows: int, length: int = 512) -> dict[str, Any]:
    """Token ids [rows,length] of prose and of code of this Python's library, on which nothing is calibrated."""
    import heapq
    import textwrap
    from pydoc_data.topics import topics

    prose = "\n\n".join(topics[name] for name in sorted(topics))
    code = "".join(Path(str(m.__file__)).read_text(encoding="utf-8") for m in (heapq, textwrap))
    found = {}
    for name, text in (("prose", prose), ("code", code)):
        found[name] = np.array(encode(text[: 12 * rows * length])[: rows * length]).reshape(
            rows, length
        )
    return found


def far(odds: Any, got: Any, ids: Any) -> list[str]:
    """KL from log-probabilities [n,T,V], its 99 % quantile, and the perplexity of logits on token ids [n,T]."""
    other = log_odds(got)
    kl = (np.exp(odds) * (odds - other)).sum(-1)
    surprise = -np.take_along_axis(other[:, :-1], ids[:, 1:, None], -1)
    return [
        f"{max(0.0, kl.mean()):.4f}",
        f"{np.quantile(kl, 0.99):.2f}",
        f"{np.exp(surprise.mean()):.2f}",
    ]


def artifact_logits(path: Path, rows: Any) -> Any:
    """[n,T,V] of token ids [n,T] by the artifact."""
    with accel.load(path) as model:
        found = []
        for row in rows:
            with model.session() as session:
                found.append(np.array(session.run(row[None]))[0])
    return np.stack(found)


def speeds(paths: dict[str, Path], cache: Path, rounds: int) -> dict[str, list[float]]:
    """Tokens per second of decoding after 128 tokens, of one turn each round; the engines take turns."""
    where, peers = Where((), (), cache, 2), {}
    try:
        for name, path in paths.items():
            spec = Spec("llama_cpp" if path.suffix == ".gguf" else "accel", name, path)
            peers[name] = Peer(spec, sys.executable, path, where, cache / f"{name}.log")
        found: dict[str, list[float]] = {name: [] for name in peers}
        for seed in range(rounds):
            for name, peer in peers.items():
                time.sleep(0.25)  # threads of the one before may spin for a while
                steps = peer.turn(tokens=128, batch=1, new=24, seed=seed)["steps"]
                found[name].append(1 / statistics.median(steps))
        return found
    finally:
        for peer in peers.values():
            peer.close()


def compare(source: Path, cache: Path, recipes: list[str], rows: int, rounds: int) -> None:
    """The table of accel's recipes and llama.cpp's files of one model's floats."""
    made = Peers(source, cache)
    paths = {recipe: made.artifact(recipe) for recipe in recipes}
    with accel.load(next(iter(paths.values()))) as model:
        assert model.tokenizer is not None
        encode = model.tokenizer.encode
        given = texts(lambda text: encode(text, special=False), rows)
        calibration = encode((REFERENCE / "calibration.txt").read_text("utf-8"), special=False)
    import torch

    paths |= made.files(torch.tensor(calibration[:4096]).view(-1, 256))
    losses: dict[str, list[str]] = {name: [] for name in paths}
    whole = []
    for ids in given.values():
        odds = log_odds(llama_files.logits(made.floats, ids))
        whole += far(odds, odds, ids)
        for name, path in paths.items():
            read = llama_files.logits if path.suffix == ".gguf" else artifact_logits
            losses[name] += far(odds, read(path, ids), ids)
            print(name, *losses[name], file=sys.stderr)
    speed = speeds(paths, made.cache, rounds) if rounds else {}
    first = next(iter(paths))
    names = ["", "MB", *(f"{what}, {t}" for t in given for what in ("KL", "p99", "perplexity"))]
    names += ["tokens/s", f"of {first}"] if rounds else []
    turns.head(names[0], *(f">{name}" for name in names[1:]))
    floats = [size(made.floats), *whole, *([""] * (len(names) - 8))]
    turns.row("float32", *floats)
    for name, path in paths.items():
        own = speed.get(name, [])
        ratio = [a / b for a, b in zip(own, speed.get(first, []), strict=False)]
        fast = [f"{statistics.median(v):.{d}f}" for v, d in ((own, 1), (ratio, 2)) if own]
        turns.row(name, size(path), *losses[name], *fast)


def size(path: Path) -> str:
    files = path.rglob("*") if path.is_dir() else [path]
    return f"{sum(f.stat().st_size for f in files if f.is_file()) / 1e6:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*", default=list(RECIPES))
    parser.add_argument("--model", type=Path, default=REFERENCE, help="a model directory")
    parser.add_argument("--recall", type=int, default=20, metavar="N", help="prompts of each task")
    parser.add_argument(
        "--gguf", type=Path, help="a llama or qwen2 file: beside llama.cpp's of its floats"
    )
    parser.add_argument(
        "--cache", type=Path, default=Path("build/weights"), help="of what --gguf makes"
    )
    parser.add_argument(
        "--rows", type=int, default=2, help="of 512 tokens, of each text, with --gguf"
    )
    parser.add_argument("--rounds", type=int, default=9, help="of speed, with --gguf; 0: none")
    given = parser.parse_args()
    if given.gguf:
        return compare(given.gguf, given.cache, given.recipes, given.rows, given.rounds)
    names = ["recipe", "bits per weight", "KL", "perplexity", *(TASKS if given.recall else ())]
    rows, whole = [], ""
    for recipe in track(given.recipes, "recipes", console=Console(stderr=True)):
        cells, perplexity = row(given.model, recipe, given.recall)
        rows.append([recipe, *cells])
        whole = whole if perplexity is None else f"{perplexity:.2f}"
    turns.head(names[0], *(f">{name}" for name in names[1:]))
    for cells in rows:
        turns.row(*(cell.replace(WHOLE, whole) for cell in cells))


if __name__ == "__main__":
    main()
