"""What a float folder predicts against llama.cpp on the GGUF file that it was made of.

    python tools/bench/bench_floats.py                       every GGUF file of tools/models/real.py that was fetched
    python tools/bench/bench_floats.py smollm2-135m --dtype bfloat16

The folder computes in float32 on what it holds, llama.cpp rounds to 8 bits what its blocks multiply: a KL divergence
of some thousandths is that, rows in a wrong order are a thousand times more. The first token stands alone: what 8 bits
leave beside its massive activations may be little. Needs llama-cpp-python.
"""

from __future__ import annotations

import heapq
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated

sys.path.append(str(Path(__file__).resolve().parents[1] / "models"))
import floats
import real
import torch
import typer
from floats import Dtype
from torch import Tensor

from accel.cli import error_text
from accel.commands import console
from accel.compiler.load.source import open_source
from accel.ir.errors import AccelError, InputError
from accel.ir.weights import reading

_ROWS = 32  # tokens at a time: log-probabilities of 262144 words are large


def texts() -> dict[str, str]:
    """Of Python's own library: what it says of its language, and a module."""
    return {
        "prose": topics["naming"] + topics["objects"],
        "code": Path(heapq.__file__).read_text(encoding="utf-8"),
    }


@dataclass(frozen=True)
class Agreement:
    """Of llama.cpp with the floats: KL divergence from their predictions after the first token, and after each of the
    others (mean, 99 % quantile); the share of tokens after which both take the same next one for the likeliest; both
    perplexities.
    """

    tokens: int
    first: float
    kl: float
    kl99: float
    top1: float
    perplexity: float
    peer: float


def agreement(folder: Path, file: Path, text: str, tokens: int) -> Agreement:
    """On the first tokens of a text, as the file's tokenizer gives them. Raises AccelError."""
    from llama_logits import Peer

    tokenizer = open_source(folder).tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(text)[:tokens]
    wanted = _logits(folder, ids)
    return compared(wanted, Peer(file).logits(ids), torch.tensor(ids))


def compared(wanted: Tensor, found: Tensor, ids: Tensor) -> Agreement:
    """Logits [T,V] of the floats and of the peer, after tokens [T]."""
    kl, own, other = list[Tensor](), 0.0, 0.0
    for start in range(0, len(ids), _ROWS):
        rows = slice(start, start + _ROWS)
        p, q = wanted[rows].log_softmax(-1), found[rows].log_softmax(-1)
        kl.append((p.exp() * (p - q)).sum(-1))
        after = ids[start + 1 : start + 1 + _ROWS, None]
        own -= float(p[: len(after)].gather(1, after).double().sum())
        other -= float(q[: len(after)].gather(1, after).double().sum())
    whole, count = torch.cat(kl), max(1, len(ids) - 1)
    same = wanted.argmax(-1) == found.argmax(-1)
    return Agreement(
        tokens=len(ids),
        first=float(whole[0]),
        kl=float(whole[1:].mean()),
        kl99=float(whole[1:].quantile(0.99)),
        top1=float(same.float().mean()),
        perplexity=math.exp(own / count),
        peer=math.exp(other / count),
    )


def _logits(folder: Path, ids: list[int]) -> Tensor:
    loaded = open_source(folder).load()
    with torch.no_grad(), reading(loaded.stored):
        found: Tensor = loaded.model.eval()(torch.tensor([ids]), use_cache=False).logits[0]
    return found


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Of tools/models/real.py.")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Of each text.")] = 512,
    dtype: Annotated[Dtype, typer.Option(help="Of the folder's weights.")] = Dtype.float32,
) -> None:
    """Print a row for each model and text."""
    there = [m.name for m in real.models().values() if m.complete and m.path.endswith(".gguf")]
    rows = []
    try:
        if not (names or there):
            raise InputError(f"no GGUF file is fetched: {real.find('smollm2-135m').command}")
        for name in names or there:
            folder = floats.folder(name, dtype)
            for kind, text in texts().items():
                found = agreement(folder, real.path(name), text, tokens)
                figures = [
                    (found.first, ".4f"), (found.kl, ".4f"), (found.kl99, ".4f"), (found.top1, ".3f"),
                    (found.perplexity, ".3f"), (found.peer, ".3f"),
                ]  # fmt: skip
                rows.append((name, kind, found.tokens, *(f"{v:{form}}" for v, form in figures)))
                print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    except (AccelError, OSError) as error:
        raise SystemExit(f"bench_floats: {error_text(error)[0]}") from None
    except ModuleNotFoundError as error:
        raise SystemExit(f"bench_floats: {error}; pip install llama-cpp-python") from None
    heads = "model,text,>tokens,>first KL,>KL,>KL 99 %,>same top,>perplexity,>llama.cpp's"
    console.table(heads.split(","), rows, f"{dtype} folders against llama.cpp")


if __name__ == "__main__":
    typer.run(main)
