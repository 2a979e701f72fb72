"""What a rejected draft costs a model with recurrent state: a round that checks a draft of which some tokens stand,
where the recurrences alone are replayed, and where the tokens that stood run again.

    python tools/bench/bench_rewind.py [--drafted 4] [--rounds 9] [--layers 12] [--hidden 768] [--weights int4]

The model is that of bench_turns.py. A snapshot's bytes and time are printed, too.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from bench_turns import hybrid
from turns import head, in_turns, median_range, ratios, row, seconds

import accel
from accel.runtime.session.session import Session
from accel.runtime.session.state.recurrent_history import RecurrentHistory

PROMPT, CONTEXT = 200, 1024


def rounds_of(session: Session, drafted: int, stood: int, replays: bool) -> float:
    """Seconds of a round: one token and a draft are checked, of which some stand; and what that costs the next."""
    history = session.observer(RecurrentHistory)
    assert history is not None
    history._replays = replays
    length = int(session.lengths[0])
    ids = np.random.default_rng(length).integers(3, session.vocab_size, (1, 1 + drafted))

    def whole() -> None:
        session.run(ids)
        if stood < drafted:
            session.rewind(length + 1 + stood)
        session._core.catch_up()

    return seconds(whole)


def main(
    drafted: Annotated[int, typer.Option(min=1)] = 4,
    rounds: Annotated[int, typer.Option(min=1)] = 9,
    layers: Annotated[int, typer.Option(min=4)] = 12,
    hidden: Annotated[int, typer.Option(min=128)] = 768,
    weights: Annotated[str, typer.Option(help="a recipe of them")] = "",
    folder: Annotated[Path | None, typer.Option(help="where the build is kept")] = None,
) -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as made:
        where, recipes = folder or Path(made), [*filter(None, [weights]), "prompt-lookup"]
        out = where / "-".join(recipes)
        if not out.exists():
            hybrid(hidden, layers, CONTEXT, where / "model")
            sizes = {"max_context": CONTEXT, "max_batch": 1, "verify": False}
            accel.optimize(where / "model", recipes, out=out, **sizes).close()
        with accel.load(out) as model, model.session() as session:
            session.prompt(np.random.default_rng(0).integers(3, session.vocab_size, (1, PROMPT)))
            head(">of a draft stood", ">replayed, ms", ">run again, ms", ">ratio")
            for stood in range(drafted + 1):
                ways = {
                    how: lambda how=how, stood=stood: rounds_of(session, drafted, stood, how)  # type: ignore[misc]
                    for how in (True, False)
                }
                found = in_turns(ways, rounds, warm=2)
                cells = [median_range(found[how], 1, 1e3) for how in (True, False)]
                middle = ratios(found[False], found[True])[rounds // 2]
                row(f"{stood} of {drafted}", *cells, f"{middle:.2f}")
            told = session.stats
            print(
                f"a snapshot: {sum(x.state_bytes for x in model.facts.layers) / 1e6:.2f} MB, "
                f"{1e3 * told['snapshot_seconds'] / told['snapshots']:.2f} ms"
            )


if __name__ == "__main__":
    typer.run(main)
