"""What a known prefix saves, what reading blocks costs, and editing and reusing documents against recomputing; side by
side.

python tools/bench/bench_reuse.py MODEL [--prefix 1024] [--rounds 5]
python tools/bench/bench_reuse.py MODEL --blocks 2048 8192 [--batches 1 8]
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from turns import median_range, ratios, seconds

import accel
from accel.lowering.onnx.variants import native


def milliseconds(work: Callable[[], Any]) -> float:
    return 1e3 * seconds(work)


def show(name: str, found: list[float]) -> None:
    print(f"{name:42} {median_range(found, 1)} ms")


def prefixes(dense: Any, paged: Any, prefix: int, rounds: int, rng: np.random.Generator) -> None:
    """A prompt of `prefix` + 16 tokens, the prefix known or not; then tokens after it, by turns."""
    vocab = dense.facts.vocab_size
    common = rng.integers(3, vocab, prefix)
    first: dict[str, list[float]] = {"first token, recomputed": [], "first token, prefix known": []}
    after: dict[str, list[float]] = {
        "a token after it, own slots": [],
        "a token after it, in blocks": [],
    }
    with paged.session() as session:
        session.prompt(common[None])
    for _ in range(rounds):
        prompt = np.concatenate([common, rng.integers(3, vocab, 16)])[None]
        token = prompt[:, -1:]
        for model, a, b in zip((dense, paged), first, after, strict=True):
            with model.session() as session:
                first[a].append(milliseconds(lambda s=session, p=prompt: s.prompt(p)))
                session.run(token)
                after[b] += [milliseconds(lambda s=session, t=token: s.run(t)) for _ in range(16)]
    for name, found in {**first, **after}.items():
        show(name, found)


def memory(dense: Any, paged: Any, prefix: int, rng: np.random.Generator, count: int = 8) -> None:
    """Bytes that so many sessions hold whose prompts share a prefix."""
    common = rng.integers(3, dense.facts.vocab_size, prefix)
    for model in (dense, paged):
        sessions = [model.session() for _ in range(count)]
        for session in sessions:
            session.prompt(
                np.concatenate([common, rng.integers(3, model.facts.vocab_size, 16)])[None]
            )
            session.run(common[None, :1])
        pool = model.pool["used"] * model.pool["bytes"] // model.pool["filled"] if model.pool else 0
        held = sum(int(s.stats["kv_bytes"]) for s in sessions)
        print(
            f"{count} sessions, {'blocks' if model.pool else 'own slots'}: {(held + pool) / 2**20:.1f} MiB"
        )
        for session in sessions:
            session.close()


def edits(pie: Any, length: int, rounds: int, rng: np.random.Generator) -> None:
    """Eight tokens inserted in the middle, against running what follows them again."""
    tokens = rng.integers(3, pie.facts.vocab_size, (1, length))
    found: dict[str, list[float]] = {
        "8 tokens inserted, recomputed": [],
        "8 tokens inserted, moved": [],
    }
    half, new = length // 2, tokens[0, :8]
    for _ in range(rounds):
        with pie.session() as session, pie.session() as again:
            again.run(tokens[:, :half])
            rest = np.concatenate([tokens[:, :8], tokens[:, half:]], axis=1)
            session.run(tokens)
            times = (
                milliseconds(lambda s=again, r=rest: s.run(r, last_only=True)),
                milliseconds(lambda s=session: s.edit(half, half, new)),
            )
        for each, spent in zip(found.values(), times, strict=True):
            each.append(spent)
    for name, each in found.items():
        show(name, each)


def documents(dense: Any, blend: Any, length: int, rounds: int, rng: np.random.Generator) -> None:
    """Four documents that were run before, in another order behind 8 new tokens and before 16, by turns."""
    vocab = dense.facts.vocab_size
    texts = rng.integers(3, vocab, (4, length // 4))
    for text in texts:
        with blend.session() as session:
            session.prompt(text[None])
    found: dict[str, list[float]] = {
        "first token behind documents, recomputed": [],
        "first token behind documents, reused": [],
    }
    for number in range(rounds + 1):  # the first opens the graphs
        new = rng.integers(3, vocab, 24)
        prompt = np.concatenate([new[:8], *rng.permutation(texts), new[8:]])[None]
        times = []
        for model in (dense, blend):
            with model.session() as session:
                times.append(milliseconds(lambda s=session, p=prompt: s.prompt(p)))
        if number:
            for each, spent in zip(found.values(), times, strict=True):
                each.append(spent)
    for name, each in found.items():
        show(name, each)
    print(f"times as fast: {median_range(ratios(*found.values()))}")


def blocks(
    options: argparse.Namespace, prefixes: Sequence[int], batches: Sequence[int], rng: Any
) -> None:
    """A token of rows whose prefix lies in blocks: native attention over gathered blocks against the blocks in place,
    by turns in one process. The model is said to take so long a context, whatever it writes then.
    """
    folder = Path(tempfile.mkdtemp())
    for file in Path(options.model).resolve().iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    told_to = config | {"max_position_embeddings": max(prefixes) + 256}
    (folder / "config.json").write_text(json.dumps(told_to))
    ways = {"gathered": lambda b, x: (x, None), "in place": native._in_place}
    made, built = [], {}
    for name, way in ways.items():
        with patch.object(native, "_in_place", way):
            model = accel.optimize(
                folder,
                "paged-prefix",
                max_context=max(prefixes) + 256,
                max_batch=max(batches),
                verify=False,
            )
        made.append(model)  # whose artifact goes with it
        built[name] = accel.load(model.artifact.path, kernels="native")
    for prefix, batch in ((p, b) for p in prefixes for b in batches):
        common = rng.integers(3, built["in place"].facts.vocab_size, prefix)
        prompts = np.concatenate(
            [np.tile(common, (batch, 1)), rng.integers(3, 50, (batch, 8))], axis=1
        )
        sessions = {}
        for name, model in built.items():
            with model.session() as session:
                session.prompt(common[None])
            sessions[name] = model.session(batch)
            sessions[name].prompt(prompts)
            assert sessions[name].stats["reused"] == batch * prefix
        found: dict[str, list[float]] = {name: [] for name in built}
        for number in range(2 + 8 * options.rounds):  # the first two make room
            names = list(built) if number % 2 else list(built)[::-1]
            times = {
                n: milliseconds(lambda s=sessions[n], t=prompts[:, :1]: s.run(t)) for n in names
            }
            for name, spent in times.items() if number > 1 else ():
                found[name].append(spent)
        for name, each in found.items():
            show(f"prefix {prefix}, {batch} rows, {name}", each)
            sessions[name].close()
        print(f"times as fast: {median_range(ratios(found['gathered'], found['in place']))}")
    for model in built.values():
        model.close()
    shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--prefix", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, nargs="+", help="prefixes of shared blocks alone")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()
    if options.blocks:
        return blocks(options, options.blocks, options.batches, np.random.default_rng(0))
    built = {
        name: accel.optimize(options.model, name, max_context=options.prefix + 256, verify=False)
        for name in ("base", "paged-prefix", "pie", "cacheblend")
    }
    rng = np.random.default_rng(0)
    print(f"prefix {options.prefix}, kernels {built['paged-prefix'].tuning.kernels}")
    prefixes(built["base"], built["paged-prefix"], options.prefix, options.rounds, rng)
    memory(built["base"], built["paged-prefix"], options.prefix, rng)
    edits(built["pie"], options.prefix, options.rounds, rng)
    documents(built["base"], built["cacheblend"], options.prefix, options.rounds, rng)


if __name__ == "__main__":
    main()
