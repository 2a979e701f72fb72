"""What the bundled model reads: permissively licensed Python that is installed anyway, without doubles.

Three parts: `library` (Python's standard library), `packages` (installed distributions whose licence permits it)
and `prose` (their docstrings and documentation). The held-out files are left out by name and by content: eight
lines in a row that a held-out file, or an earlier text, has as well are dropped wherever they stand.
"""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from reference_data import EOS, sources
from rich.progress import track
from tokenizers import Tokenizer

PERMISSIVE = re.compile(
    r"\b(MIT|BSD|Apache|PSF|Python Software Foundation|ISC|HPND|0BSD|Zlib)\b|matplotlib",
    re.IGNORECASE,
)
COPYLEFT = re.compile(r"\b(L?A?GPL|MPL|Mozilla|EUPL|CC-BY-SA)\b", re.IGNORECASE)
OWN = "accel-compile"
WINDOW = 8  # lines
MOST_BYTES = 10_000_000  # of one distribution: the rest of a large one is left out, by chance
LONGEST_LINE = 400  # characters; longer ones are data
LEAST = 200  # characters that are left of a text; of prose, half as many more
DOCUMENTS = {".md", ".rst"}


def licence(distribution: importlib.metadata.Distribution) -> str:
    """What a distribution says of its licence, in one line."""
    told = distribution.metadata
    classifiers = [c for c in told.get_all("Classifier") or [] if c.startswith("License ::")]
    names = [
        told.get("License-Expression") or "",
        *(c.rsplit("::", 1)[1].strip() for c in classifiers),
    ]
    first = (told.get("License") or "").strip().splitlines()[:1]
    return ", ".join(name for name in [*names, *first] if name)


def permitted(name: str) -> bool:
    return bool(PERMISSIVE.search(name)) and not COPYLEFT.search(name)


class Doubles:
    """Drops lines that stand in a window of lines which an earlier text had."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def strip(self, text: str) -> str:
        """`text` without the windows seen before; its own windows count from now on."""
        lines = text.splitlines(keepends=True)
        bare = [" ".join(line.split()) for line in lines]
        filled = [i for i, line in enumerate(bare) if line]
        windows = [
            (filled[i : i + WINDOW], hash(tuple(bare[j] for j in filled[i : i + WINDOW])))
            for i in range(max(1, len(filled) - WINDOW + 1))
        ]
        doubled: set[int] = set()
        for rows, key in windows:
            if key in self._seen:
                doubled.update(rows)
        self._seen.update(key for _, key in windows)
        return "".join(line for i, line in enumerate(lines) if i not in doubled)


def docstrings(source: str) -> Iterator[str]:
    """The docstrings of a module that are prose: three lines or more, most of them letters."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if (
                text
                and text.count("\n") >= 2
                and sum(c.isalpha() or c == " " for c in text) > 0.75 * len(text)
            ):
                yield inspect.cleandoc(text) + "\n"


def _readable(path: Path) -> str:
    text = path.read_text(encoding="utf-8", errors="ignore")
    return "" if max(map(len, text.splitlines()), default=0) > LONGEST_LINE else text


def _package_texts(
    distribution: importlib.metadata.Distribution, rng: random.Random
) -> Iterator[tuple[str, str]]:
    """`(suffix, text)` of a distribution's files, tests left out, in an order of `rng`, up to `MOST_BYTES`."""
    files = [f for f in distribution.files or [] if f.suffix in {".py", *DOCUMENTS}]
    files = sorted(f for f in files if {"test", "tests", "testing", "_vendor"}.isdisjoint(f.parts))
    rng.shuffle(files)
    room = MOST_BYTES
    for file in files:
        path = Path(str(file.locate()))
        if not path.is_file() or "LICENSE" in path.name.upper():
            continue
        text = _readable(path)
        room -= len(text)
        if room < 0:
            return
        yield file.suffix, text


def collect(seed: int) -> tuple[dict[str, list[str]], dict[str, str]]:
    """The texts of each part of the corpus, and the licence of each distribution in it.

    Raises `SystemExit` where nothing was found to read.
    """
    rng, doubles = random.Random(seed), Doubles()
    try:
        train, held_out = sources()
    except OSError as error:
        raise SystemExit(f"{error}: is this Python's library installed with its sources?") from None
    for text in held_out:
        doubles.strip(text)
    parts: dict[str, list[str]] = {"library": [], "packages": [], "prose": []}
    licences = {"python": "PSF-2.0"}

    def add(part: str, text: str) -> None:
        left = doubles.strip(text)
        if len(left) >= LEAST:
            parts[part].append(left)

    rng.shuffle(train)
    for text in track(train, "standard library"):
        add("library", text)
    found = {
        d.metadata["Name"] or "": d for d in reversed(list(importlib.metadata.distributions()))
    }
    for name, distribution in track(
        sorted(found.items(), key=lambda item: item[0].lower()), "packages"
    ):
        terms = licence(distribution)
        if name in ("", OWN) or not permitted(terms):
            continue
        licences[name] = terms
        for suffix, text in _package_texts(distribution, rng):
            add("prose" if suffix in DOCUMENTS else "packages", text)
    prose = Doubles()  # docstrings stand in the code, too: only among themselves are they doubles
    for text in held_out:
        for one in docstrings(text):
            prose.strip(one)
    for source in [*parts["library"], *parts["packages"]]:
        for one in docstrings(source):
            left = prose.strip(one)
            if len(left) >= 1.5 * LEAST:
                parts["prose"].append(left)
    empty = [name for name, texts in parts.items() if not texts]
    if empty:
        raise SystemExit(
            f"no text found for {', '.join(empty)}: is this Python's library installed with its sources?"
        )
    return parts, licences


def encoded(tokenizer: Tokenizer, texts: list[str], rng: random.Random) -> np.ndarray:
    """All texts in one row of ids in an order of `rng`, each after <|bos|> and before <|eos|>."""
    order = rng.sample(range(len(texts)), len(texts))
    ids: list[np.ndarray] = []
    for start in track(range(0, len(order), 256), "tokens"):
        batch = tokenizer.encode_batch([texts[i] for i in order[start : start + 256]])
        ids += [np.array([*row.ids, EOS], dtype=np.int16) for row in batch]
    return np.concatenate(ids)


def prepare(folder: Path, tokenizer: Tokenizer, seed: int) -> dict[str, np.ndarray]:
    """The corpus of a run, int16 ids by part; made once per folder, then memory-mapped."""
    folder.mkdir(parents=True, exist_ok=True)
    told = folder / "corpus.json"
    if not told.exists():
        parts, licences = collect(seed)
        rng, counts = random.Random(seed), {}
        for name, texts in parts.items():
            ids = encoded(tokenizer, texts, rng)
            np.save(folder / f"corpus-{name}.npy", ids)
            counts[name] = {"texts": len(texts), "tokens": len(ids)}
        new = told.with_suffix(".new")
        new.write_text(json.dumps({"parts": counts, "licences": licences}, indent=1) + "\n")
        new.replace(told)
    names = json.loads(told.read_text())["parts"]
    return {name: np.load(folder / f"corpus-{name}.npy", mmap_mode="r") for name in names}
