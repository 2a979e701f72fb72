"""Make a datastore out of text, for drafters that look tokens up (`rest`), or with --trigrams a table (`aded`).

    python tools/datastore.py MODEL --text FILE ... --out FOLDER [--trigrams] [--shard 4194304]

MODEL: a model's folder, an artifact, or a tokenizer.json. Each FILE is a text of its own. FOLDER holds the tokens and
the order of their suffixes (8 bytes a token), or how often tokens followed two others (16 bytes each). Both are
memory-mapped, and say whose vocabulary it is. Name it in a recipe: `draft.use = "rest"`, `datastore = "FOLDER"`, or
`draft.use = "aded"`, `corpus = "FOLDER"`; a build copies it into the artifact.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from accel.compiler.load.tokenizer import read_tokenizer
from accel.ir.errors import AccelError, InputError
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.speculation.datastore import Datastore
from accel.runtime.speculation.texts import GAP
from accel.runtime.speculation.trigrams import Trigrams


def tokens_of(tokenizer: Tokenizer, files: Sequence[Path]) -> list[int]:
    """The tokens of texts, each after a gap. Raises InputError."""
    tokens: list[int] = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise InputError(
                f"{file} cannot be read as text: {error}; give a UTF-8 file"
            ) from error
        tokens += [GAP, *tokenizer.encode(text, special=False)]
    return tokens


def make(
    model: Path, texts: Sequence[Path], out: Path, shard: int, trigrams: bool = False
) -> Datastore | Trigrams:
    """Write a datastore, or trigrams. Raises AccelError."""
    if out.exists():
        raise InputError(f"{out} exists; give another folder, or remove it")
    tokenizer = read_tokenizer(model)
    assert tokenizer is not None, "a path was given"
    tokens = np.array(tokens_of(tokenizer, texts), np.int32)
    store = Trigrams.of(tokens) if trigrams else Datastore.of(tokens, shard)
    size = 1 + max(tokenizer.vocabulary.values())
    store.save(out, size, tokenizer.digest)
    return store


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--shard", type=int, default=1 << 22, help="tokens that are ordered at once"
    )
    parser.add_argument("--trigrams", action="store_true", help="a table for aded, no datastore")
    options = parser.parse_args(given)
    try:
        store = make(options.model, options.text, options.out, options.shard, options.trigrams)
    except AccelError as error:
        sys.exit(str(error))
    print(f"{options.out}: {store.bytes:,} bytes")


if __name__ == "__main__":
    main()
