"""Decoders of whole texts, and of any subset of a text, on how English words are pronounced: right words, calls, time.

    python tools/bench/bench_pronounce.py DICT FOLDER [--count 300]

FOLDER: what `tools/train/pronounce.py DICT FOLDER` made, of any of its kinds. The words are held out, one at a time.
Phones: those that would have to change, over those of the words. Calls: of the decoder, a word. Time: of the processor.
Drafts are those of the model `drafter` for `causal`: a block is one call more, of which the time alone counts. Drafting
goes on where it does not pay.
A word that arrives letter by letter is pronounced anew with each letter (`retranslate`).
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

sys.path.append(str(Path(__file__).resolve().parents[1] / "train"))
import numpy as np
import typer
from pronounce import END, LETTERS_MOST, MASK, START, TEXT, Pair, load, words
from rich.console import Console
from rich.progress import Progress
from turns import head, row

import accel
from accel.runtime.loop import speculative

LOOPS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "causal": [("greedy", {}), ("beam-patience", {"beams": 4})],
    "rewrite": [("ut5", {"steps": n}) for n in (1, 2, 4, 8)] + [("ut5", {"steps": 8, "starts": 4})],
    "graph": [
        ("da-transformer", {"path": path})
        for path in ("greedy", "lookahead", "viterbi", "joint-viterbi")
    ],
}
ARRIVES = {
    "causal": 0,
    "rewrite": 1,
    "graph": 1,
}  # which of them also with each letter that arrives
BLOCKS = (4, 8, 16)  # masks of a draft
DRAFTS = (1, 4, 15)
CONTEXT = 4 * (LETTERS_MOST + 1)  # of the longest: a graph
SEED = 1


def distance(a: list[int], b: list[int]) -> int:
    """Levenshtein's."""
    line = np.arange(len(b) + 1)
    for i, one in enumerate(a):
        cost = np.minimum(line[:-1] + (np.array(b) != one), line[1:] + 1)
        line = np.append(i + 1, cost)
        for j in range(1, len(line)):
            line[j] = min(line[j], line[j - 1] + 1)
    return int(line[-1])


@dataclass
class Score:
    right: int = 0
    wrong: int = 0
    phones: int = 0
    calls: int = 0
    written: int = 0  # tokens, ends too
    seconds: float = 0.0
    words: int = field(default=0)

    def add(self, tokens: list[int], text: list[int], calls: int, seconds: float) -> None:
        said = tokens[: tokens.index(END)] if END in tokens else tokens
        self.words += 1
        self.right += said == text
        self.wrong += distance(said, text)
        self.phones += len(text)
        self.written += len(tokens)
        self.calls += calls
        self.seconds += seconds

    def cells(self) -> str:
        return (
            f"{100 * self.right / self.words:.1f} % | {100 * self.wrong / self.phones:.1f} % "
            f"| {self.calls / self.words:.2f} | {1000 * self.seconds / self.words:.1f}"
        )


def built(module: Any, recipe: dict[str, Any]) -> Any:
    return accel.optimize(module, recipe, max_context=CONTEXT, verify=False)


def pronounced(model: Any, pairs: list[Pair], step: Any) -> Score:
    score = Score()
    for letters, text in pairs:
        start = time.process_time()
        out = model.generate(
            encoder_input=[[*letters, END]], max_new_tokens=TEXT, eos=[END], seed=SEED
        )
        spent = time.process_time() - start
        score.add(out.tokens[0], text, int(out.stats["calls"]) - 1, spent)
        step()
    return score


def arrived(model: Any, pairs: list[Pair], step: Any) -> str:
    """Erased phones for each of the last text, and how many letters behind it is."""
    erased, lag = [], []
    for letters, _ in pairs:
        one = model.retranslate(
            ([letter] for letter in letters), suffix=[END], max_new_tokens=TEXT, eos=[END], seed=SEED
        )  # fmt: skip
        list(one)
        erased.append(one.stats["normalized_erasure"])
        lag.append(one.stats["average_lagging"])
        step()
    return f"{np.mean(erased):.2f} | {np.mean(lag):.1f}"


def filled(model: Any, pairs: list[Pair], share: float | None, step: Any) -> Score:
    """Phones alone are masked (None), or a share of all tokens."""
    rng, score = np.random.default_rng(SEED), Score()
    for letters, text in pairs:
        whole = np.array([*letters, END, *text, END])
        hidden = np.arange(whole.size) > len(letters)
        if share is not None:
            hidden = rng.random(whole.size) < share
        hidden[[len(letters), -1]] = False
        if not hidden.any():
            hidden[len(letters) + 1] = True
        start = time.process_time()
        out = model.generate(
            [np.where(hidden, MASK, whole).tolist()], max_new_tokens=int(hidden.sum()), eos=[]
        )
        spent = time.process_time() - start
        score.add(out.tokens[0], whole[hidden].tolist(), int(out.stats["calls"]), spent)
        step()
    return score


Bar = Callable[
    [str, int], Callable[[], None]
]  # what is measured, of how many: what tells that one is done


def whole_texts(folder: Path, pairs: list[Pair], bar: Bar) -> None:
    """Print what loops make of the models of whole texts, and of words that arrive letter by letter."""
    later = []
    head("loop", "options", ">words right", ">phones wrong", ">calls", ">ms")
    for kind in there(folder, LOOPS):
        module = started(load(kind, folder))
        for at, (loop, options) in enumerate(LOOPS[kind]):
            model = built(module, {"loop": {"use": loop, **options}} if loop != "greedy" else {})
            told = ", ".join(f"{k} = {v}" for k, v in options.items())
            score = pronounced(model, pairs, bar(f"{loop} {told}", len(pairs)))
            row(f"`{loop}`", told, score.cells())
            if at == ARRIVES[kind]:
                some = pairs[: max(1, len(pairs) // 3)]
                said = arrived(model, some, bar(f"{loop}, letter by letter", len(some)))
                later.append((f"`{loop}`", told, said))
    print()
    head("loop", "options", ">normalised erasure", ">average lagging")
    for cells in later:
        row(*cells)


def drafts(folder: Path, pairs: list[Pair], bar: Bar) -> None:
    """Print what blocks of the drafter save the model that decodes token by token."""
    module = started(load("causal", folder))
    with tempfile.TemporaryDirectory() as made:
        path = Path(made) / "drafter"
        fills = {"loop": {"use": "dllm-lowconf"}}
        with built(started(load("drafter", folder)), fills) as one:
            one.save(path)
        print()
        head("recipe", "block", ">words right", ">phones wrong", ">calls", ">ms", ">tokens a call")
        draft = {"draft": {"use": "gad", "path": str(path)}}
        settings = [("plain", 0, {})]
        for name, verify in (("gad", "sample-match"), ("specdec-nar", "top-beta")):
            for block in BLOCKS:
                length = {"length": {"use": "fixed", "tokens": block}}
                settings.append((name, block, {**draft, **length, "verify": {"use": verify}}))
        for name, block, recipe in settings:
            with (
                built(module, recipe) as model,
                patch.object(speculative, "Guard", lambda *_: None),
            ):
                score = pronounced(model, pairs, bar(f"{name} {block}", len(pairs)))
            row(f"`{name}`", block or "", score.cells(), f"{score.written / score.calls:.2f}")


def subsets(folder: Path, pairs: list[Pair], bar: Bar) -> None:
    """Print what drafts of an any-order model save."""
    module = load("subset", folder)
    print()
    head("masked", ">drafts", ">words right", ">tokens wrong", ">calls", ">ms", ">tokens a call")
    for share in (None, 0.5):
        for count in DRAFTS:
            with built(module, {"loop": {"use": "assd", "mask": MASK, "drafts": count}}) as model:
                score = filled(model, pairs, share, bar(f"assd {count}", len(pairs)))
            hidden = "phones" if share is None else "half of all"
            row(hidden, count, score.cells(), f"{score.written / score.calls:.2f}")


def there(folder: Path, kinds: Iterable[str]) -> list[str]:
    return [kind for kind in kinds if (folder / f"{kind}.safetensors").exists()]


def started(module: Any) -> Any:
    """A T5 with the token that its texts start from."""
    if hasattr(module, "generation_config"):
        module.generation_config.decoder_start_token_id = START
    return module


def main(
    dictionary: Path,
    folder: Path,
    count: Annotated[int, typer.Option(min=1)] = 300,
) -> None:
    pairs = words(dictionary)[1]
    chosen = np.random.default_rng(SEED).permutation(len(pairs))[:count]
    pairs = [pairs[i] for i in chosen]
    with Progress(console=Console(stderr=True)) as progress:

        def bar(told: str, total: int) -> Callable[[], None]:
            task = progress.add_task(told, total=total)
            return lambda: progress.advance(task)

        whole_texts(folder, pairs, bar)
        if len(there(folder, ("causal", "drafter"))) == 2:
            drafts(folder, pairs, bar)
        if there(folder, ["subset"]):
            subsets(folder, pairs, bar)


if __name__ == "__main__":
    typer.run(main)
