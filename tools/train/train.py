"""Train the part of a method that has one, beside a model that stays as it is.

    python tools/train/train.py trim-kv --out trim-kv.safetensors                    # for the bundled model
    python tools/train/train.py trim-kv MODEL --text FILE --out gates.safetensors    # for yours
    python tools/train/train.py specdec-pp MODEL --draft DRAFT --text FILE --out head.safetensors

Then a recipe names the file: `trained = "gates.safetensors"`. What is trained for the graph makes the model, run
softly as the method will run it, give what the model alone gives (KL), predict its text, and stay within
`--budget`; what has an aim of its own (`threshold-evict`) comes near to it; what absorbs evicted tokens, as `less`,
makes up for them in each layer; what foretells attention (`tokenbutler`) or changes it (`leank`) learns from what
the model reads of the text; the coprocessor of `cache-augment` predicts the text behind random places of it;
a length's head (`specdec-pp`) tells what of a draft stands. Each kind is a file in `runs/`.
`OUT.run` holds the state of a run; SIGTERM and Ctrl-C save it, `--resume` goes on.

A table is measured instead, on `--samples` batches, and a recipe names it as `table`:

    python tools/train/train.py q-filter MODEL --text FILE --out filters.safetensors
    python tools/train/train.py kv-prediction MODEL --aux SMALL --text FILE --out maps.safetensors
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from reference_data import REFERENCE
from run import kind_of
from texts import read_text

from accel.ir.axis import find_axes
from accel.ir.errors import AccelError, InputError, unknown


def trained_methods() -> dict[str, type[Any]]:
    """Every method with a trained part or a table, by name."""
    every = ((name, axis.method(name)) for axis in find_axes().values() for name in axis.names())
    return {name: method for name, method in every if kind_of(method) is not None}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("method", help="a method with a trained part or a table, as trim-kv")
    folder = "a model folder (default: the bundled one)"
    parser.add_argument("model", nargs="?", type=Path, default=REFERENCE, help=folder)
    parser.add_argument("--out", type=Path, required=True, help="the safetensors file to write")
    parser.add_argument("--draft", type=Path, help="the draft model's folder, for lengths")
    parser.add_argument("--aux", type=Path, help="a smaller model's folder, for kv-prediction")
    parser.add_argument(
        "--text", type=Path, help="what to train on; needed but for the bundled model"
    )
    parser.add_argument("--minutes", type=float, default=30, help="training time, all sessions")
    parser.add_argument("--budget", type=int, default=128, help="tokens that a head should hold")
    parser.add_argument(
        "--pressure", type=float, default=1.0, help="weight of what goes beyond the budget"
    )
    parser.add_argument("--length", type=int, default=768, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=1, help="rows of a step")
    parser.add_argument("--samples", type=int, default=64, help="steps that a table is measured on")
    inner = "width of a gate or a head, or rank of a coprocessor's products"
    parser.add_argument("--inner", type=int, default=128, help=inner)
    parser.add_argument("--latents", type=int, default=4, help="embeddings of cache-augment")
    parser.add_argument("--rate", type=float, default=2e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--resume", action="store_true", help="go on from OUT.run")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    methods = trained_methods()
    try:
        if options.method not in methods:
            raise InputError(unknown("method with a trained part", options.method, methods))
        if options.text is None and options.model != REFERENCE:
            raise InputError("give the text to train on, as --text FILE")
        if any(
            getattr(options, n) <= 0
            for n in ("minutes", "budget", "length", "rows", "samples", "inner", "latents", "rate")
        ):
            raise InputError(
                "minutes, budget, length, rows, samples, inner, latents and rate must be more than 0"
            )
        kind = kind_of(methods[options.method])
        assert kind is not None
        if lacking := kind.lacks(options):
            raise InputError(lacking)
        ids = None if options.text is None else read_text(options)
        told = kind.make(methods[options.method], ids, options)
    except (AccelError, OSError) as error:
        raise SystemExit(f"train: {error}") from None
    print(f"{options.out}: {told}")


if __name__ == "__main__":
    main()
