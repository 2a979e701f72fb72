"""What edits of a held text and reuse of documents cost, beside computing everything: two tables for
docs/figures/details/cache.md.

    python tools/bench/reuse_loss.py [--model FOLDER] [--places 16]

At each of so many places of the bundled calibration text: 1024 tokens are held, 8 are inserted, deleted or replaced in
the middle by `session.edit`, and the 16 tokens that follow are looked at; 512 tokens are read that were run before in
four parts, each alone, or (kvshare) in one prompt with other words in three places.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from turns import REFERENCE, head, row

import accel
from accel.compiler.quality.divergence import divergence, log_odds
from accel.ir.recipe import Recipe

HELD, EDIT, DOCUMENTS, PARTS, AFTER = 1024, 8, 512, 4, 16  # tokens, but for PARTS
Ids = npt.NDArray[Any]


def windows(model: Any, count: int) -> list[Ids]:
    """Places of the text, evenly over it, with room for what is held, edited and looked at."""
    ids = np.array(
        model.tokenizer.encode((REFERENCE / "calibration.txt").read_text(), special=False)
    )
    size = HELD + EDIT + AFTER
    return [ids[s : s + size] for s in np.linspace(0, len(ids) - size, count).astype(int)]


def edits(text: Ids, other: Ids) -> Iterator[tuple[str, Ids, tuple[int, int, Ids], int]]:
    """What is done, what is held before, the edit, and how many tokens of `text` it makes."""
    at = HELD // 2
    new = text[at : at + EDIT]
    rest = text[at + EDIT : HELD]
    yield "8 inserted", np.concatenate([text[:at], rest]), (at, at, new), HELD
    held = np.concatenate([text[:at], other, text[at:HELD]])
    yield "8 deleted", held, (at, at + EDIT, new[:0]), HELD
    yield "8 replaced by 8", np.concatenate([text[:at], other, rest]), (at, at + EDIT, new), HELD


def looked_at(session: Any, after: Ids) -> Any:
    return log_odds(session.run(after[None])[0])


def edited(model: Any, places: list[Ids]) -> list[list[str]]:
    sums: dict[str, npt.NDArray[Any]] = {}
    for number, text in enumerate(places):
        other = places[number - 1][:EDIT]
        for told, held, (start, stop, new), length in edits(text, other):
            after = text[length : length + AFTER]
            found = []
            for way in ("edited", "as it was", "recomputed"):
                with model.session() as session:
                    session.prompt((text[:length] if way == "recomputed" else held)[None])
                    if way == "edited":
                        session.edit(start, stop, new)
                    found.append(looked_at(session, after))
            moved, stale = (divergence(found[2], x) for x in found[:2])
            sums[told] = sums.get(told, np.zeros(3)) + [moved.kl, moved.same, stale.kl]
    tokens = len(places) * AFTER
    return [
        [told, f"{kl / tokens:.4f}", f"{same / tokens:.0%}", f"{stale / tokens:.4f}"]
        for told, (kl, same, stale) in sums.items()
    ]


def reused(folder: Path, base: Any, places: list[Ids]) -> Iterator[list[str]]:
    ways: list[tuple[str, dict[str, Any]]] = [
        (f"`cacheblend`, {ratio:.0%} of the reused tokens computed again", {"use": "cacheblend", "ratio": ratio})
        for ratio in (0.0, 0.16, 0.5, 1.0)
    ]  # fmt: skip
    for told, table in [*ways, ("`kvshare`, three places differ", {"use": "kvshare"})]:
        recipe = Recipe(table["use"], tables={"kv.reuse": table})
        kl = same = 0.0
        with accel.optimize(folder, recipe, max_context=HELD, verify=False) as model:
            for text in places:
                prompt, after = text[:DOCUMENTS], text[DOCUMENTS : DOCUMENTS + AFTER]
                for before in stored(prompt, whole=table["use"] == "kvshare"):
                    with model.session() as session:
                        session.prompt(before[None])
                with model.session() as session, base.session() as plain:
                    session.prompt(prompt[None])
                    plain.prompt(prompt[None])
                    found = divergence(looked_at(plain, after), looked_at(session, after))
                kl, same = kl + found.kl, same + found.same
        tokens = len(places) * AFTER
        yield [told, f"{kl / tokens:.4f}", f"{same / tokens:.1%}"]


def stored(prompt: Ids, whole: bool) -> list[Ids]:
    """What was run before a prompt: its parts, each alone; or one like it."""
    if not whole:
        return np.split(prompt, PARTS)
    like = prompt.copy()
    for place in (DOCUMENTS // 4, DOCUMENTS // 2, 3 * DOCUMENTS // 4):
        like[place : place + EDIT] = prompt[:EDIT]
    return [like]


def show(names: list[str], rows: Any) -> None:
    head(names[0], *(f">{name}" for name in names[1:]))
    for cells in rows:
        row(*cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=REFERENCE)
    parser.add_argument("--places", type=int, default=16)
    options = parser.parse_args()
    if options.places < 2:
        parser.error(f"--places is {options.places}; give 2 or more")
    context = HELD + 2 * EDIT + AFTER
    with accel.optimize(options.model, "pie", max_context=context, verify=False) as pie:
        places = windows(pie, options.places)
        names = ["`pie`, 1024 tokens held", "KL of the edit", "same best token", "KL of no edit"]
        show(names, edited(pie, places))
    print()
    with accel.optimize(options.model, "base", max_context=HELD, verify=False) as base:
        names = ["512 tokens, stored in parts", "KL to recomputing", "same best token"]
        show(names, reused(options.model, base, places))


if __name__ == "__main__":
    main()
