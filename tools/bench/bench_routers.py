"""What trained routers of layers cost in quality, beside routers that draw by chance.

    python tools/bench/bench_routers.py mod gateskip first-router
    python tools/bench/bench_routers.py gateskip --part FILE --ratio 0.1
    python tools/bench/bench_routers.py duo-llm --oracle 32

On the bundled model and held-out Python: the loss of a token, how often its likeliest next one is the whole model's,
and the share of what has a router that runs. `by chance`: each token (of `first-router`, each row) draws, with one
share in all layers; `as much of each`: with the share that each layer or branch has by its router; medians of three
draws. `first-router` reads the first half of a row as its prompt, and the second half is measured; of the others all of
it. `without adapters`: `first-router` with its routers alone. `gates alone`: `gateskip` where nothing is left out.

Of `duo-llm`, `nothing in place`: tokens that do not take the big MLP have none; `the best layers`: for all tokens big
are those, as many as the router takes in the mean, rounded down and up, that are best on two of the rows to calibrate
on; `--oracle N`: as many layers, the best for each of N tokens of one row, each with the cache of those chosen before,
and beside it the layers that are best for all of these tokens. The text so far is run again for each token and choice,
so the time grows with the square of N: with 32 all is a minute of a core.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "train"))
import numpy as np
import torch
import typer
from reference_data import REFERENCE, encode, sources
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from accel.compiler.load.source import open_source
from accel.compiler.train.runs.routers import SoftLayers
from accel.compiler.train.source import Source
from accel.ir.axis import find_axes
from accel.ir.calibration import Calibration
from accel.passes.depth._routed import Branch, Learns, Routed, of_target, unit
from accel.passes.gradients import References
from accel.passes.stream import Stream

ROWS, LENGTH, DRAWS = 8, 256, 3
Choose = Callable[[Any, Tensor], Tensor]  # the rows or tokens that run: of a site, and its shares


def held_out() -> tuple[Tensor, Tensor]:
    """Rows to calibrate on and rows to measure on [n,T]."""
    tokenizer = Tokenizer.from_file(str(REFERENCE / "tokenizer.json"))
    texts = sources()[1]
    np.random.default_rng(1).shuffle(texts)  # type: ignore[arg-type]
    ids = torch.from_numpy(np.asarray(encode(tokenizer, texts)[: 4 * ROWS * LENGTH], np.int64))
    rows = ids.view(-1, LENGTH)
    return rows[::4], rows[1::4]


class Measured:
    """A model's rows, run as a method's routers say."""

    def __init__(self, soft: SoftLayers, method: Learns, tokens: Tensor):
        self.soft, self.method, self.tokens = soft, method, tokens
        self.parts = soft.program.parts[method.key]
        self.instead = self.adapters = True
        self.half = tokens.shape[1] // 2 if not isinstance(method, Routed) else 0

    def stream(self) -> Stream:
        stream = Stream(self.soft.program, self.soft.calls, self.tokens, References().value)
        stream.params = self.soft.fixed
        return stream

    def base(self) -> Tensor:
        return self._run(lambda _, x: torch.ones(()), {}, plain=True)

    def run(self, shares: dict[str, float], draw: torch.Generator | None = None) -> Tensor:
        """Logits; `shares` gets the share that runs of each site, or where `draw` is given says it."""

        def choose(site: Any, taken: Tensor) -> Tensor:
            if draw is None:
                shares[site] = float(taken.float().mean())
                return taken
            return torch.rand(taken.shape, generator=draw) < shares[site]

        return self._run(choose, shares)

    def fixed(self, big: Tensor) -> Tensor:
        """Logits where of each row and token the layers big [n,T,L] run."""
        number = {s.name: s.layer for sites in self.soft.sites for s in sites}
        return self._run(lambda site, _: big[:, :, number[site]], {})

    def always(self, big: Tensor) -> Tensor:
        """Logits where of all tokens the layers big [L] run."""
        return self.fixed(big.expand(*self.tokens.shape, -1))

    def _run(self, choose: Choose, shares: dict[str, float], plain: bool = False) -> Tensor:
        stream = self.stream()
        x = stream.start
        method = self.method
        if not plain and not isinstance(method, Routed):
            return self._by_prompt(choose)
        for index, sites in enumerate(self.soft.sites):
            if plain:
                x = stream.layer(index, x)
            elif not sites:
                router = of_target(self.parts[index], "layer")
                kept = choose(index, ~(method.spare(unit(x), **router) > method.limit))[..., None]  # type: ignore[attr-defined]
                after = stream.layer(index, x, replaced=self.soft.hole(kept.float()))
                x = torch.where(kept, after, x)
            else:

                def change(site: Branch, before: Tensor, value: Tensor) -> Tensor:
                    router, read = of_target(self.parts[site.layer], site.target), unit(before)
                    taken = ~(method.spare(read, **router) > method.limit)
                    scale = method.scale(read, **router)
                    other = method.instead(read, **router) if self.instead else None
                    kept = choose(site.name, taken)[..., None]
                    scaled = value if scale is None else value * scale
                    return torch.where(kept, scaled, torch.zeros(()) if other is None else other)

                x = stream.changed(index, x, [(s, s.before, s.term.value) for s in sites], change)
        return stream.logits(x)

    def _by_prompt(self, choose: Choose) -> Tensor:
        """Logits where the first half of each row chooses the layers of the second."""
        keep = self.soft.chosen(self.tokens[:, : self.half], self.parts)
        for index in range(1, keep.shape[1] - 1):
            keep[:, index] = choose(index, keep[:, index])
        return self.soft.after(self.tokens, self.half, keep, self.parts if self.adapters else None)


def main(
    methods: list[str],
    part: Annotated[Path | None, typer.Option(help="By default the bundled one.")] = None,
    ratio: Annotated[float | None, typer.Option(help="Of gateskip.")] = None,
    target: Annotated[str | None, typer.Option(help="Of mod.")] = None,
    oracle: Annotated[int, typer.Option(help="Tokens, of duo-llm.")] = 0,
) -> None:
    torch.set_num_threads(1)
    quiet: Any = lambda *_: None  # noqa: E731
    source = Source(REFERENCE, open_source(REFERENCE).tokenizer, None, quiet, quiet)
    read, tokens = held_out()
    axis = find_axes()["depth"]
    print("| method | share that runs | loss | agrees |\n|---|---:|---:|---:|")
    for name in methods:
        options: dict[str, Any] = {"trained": str(part)} if part else {}
        options |= {"ratio": ratio} if ratio is not None and name == "gateskip" else {}
        options |= {"target": target} if target is not None and name == "mod" else {}
        method = axis.build(name, **options)
        soft = SoftLayers(source.program, method)
        reads = method.steps()[0]
        known = source.program.copy()
        reads.run(known)
        soft.program.parts = known.parts
        soft.program.calibration = Calibration(read, read, "given")
        if isinstance(method, Routed):
            parts = soft.program.parts[method.key]
            soft.program.parts[method.key] = method.measured(
                soft.program, soft.calls, soft.sites, parts
            )
        with torch.no_grad():
            one = Measured(soft, method, tokens)
            whole = one.base()
            tell("the whole model", {}, whole, one, whole)
            shares: dict[str, float] = {}
            tell(f"`{name}`", shares, one.run(shares), one, whole)
            level = dict.fromkeys(shares, sum(shares.values()) / len(shares))
            for words, some in (("… by chance", level), ("… as much of each", shares)):
                drawn = [one.run(some, torch.Generator().manual_seed(s)) for s in range(DRAWS)]
                middle = sorted(drawn, key=lambda logits: loss(one, logits))[DRAWS // 2]
                tell(words, some, middle, one, whole)
            if name == "duo-llm":
                duo(one, read, shares, whole, oracle)
            if name == "first-router":
                one.adapters = False
                tell("… without adapters", shares, one.run(dict(shares)), one, whole)
                drawn = [one.run(level, torch.Generator().manual_seed(s)) for s in range(DRAWS)]
                middle = sorted(drawn, key=lambda logits: loss(one, logits))[DRAWS // 2]
                tell("… … by chance", level, middle, one, whole)
                one.adapters = True
            if name == "gateskip":
                open_ = dict.fromkeys(shares, 2.0)
                tell("… gates alone", open_, one.run(open_, torch.Generator()), one, whole)


def duo(one: Measured, read: Tensor, shares: dict[str, float], whole: Tensor, oracle: int) -> None:
    """What is said of duo-llm alone."""
    one.instead, alone = False, dict(shares)
    tell("… nothing in place", alone, one.run(alone), one, whole)
    one.instead = True
    total, found = sum(shares.values()), dict[int, Tensor]()
    for count in (0, math.floor(total), math.ceil(total)):
        found[count] = best_for_all(one, read[:2], len(shares), count)
        tell_fixed(one, found[count], shares, whole)
    if oracle:
        few = Measured(one.soft, one.method, one.tokens[:1, : oracle + 1])
        every = few.base()
        choices = patterns(len(shares), round(total))
        level = dict.fromkeys(shares, round(total) / len(shares))
        tell(
            f"an oracle, {oracle} tokens", level, best_of_each(one, few.tokens, choices), few, every
        )
        tell("… the whole model", {}, every, few, every)
        for best in (found[round(total)], best_for_all(few, few.tokens, len(shares), round(total))):
            tell_fixed(few, best, shares, every)
        routed: dict[str, float] = {}
        logits = few.run(routed)
        tell(f"… `{one.method.key}`", routed, logits, few, every)


def patterns(layers: int, count: int) -> Tensor:
    """All choices of so many layers, bools [N,L]."""
    chosen = torch.tensor(list(combinations(range(layers), count)), dtype=torch.int64)
    found: Tensor = F.one_hot(chosen, layers).sum(1) > 0
    return found


def best_for_all(one: Measured, read: Tensor, layers: int, count: int) -> Tensor:
    """So many layers [L] with which rows have the least loss."""
    some = Measured(one.soft, one.method, read)
    return min(patterns(layers, count), key=lambda big: loss(some, some.always(big)))


def tell_fixed(one: Measured, big: Tensor, shares: dict[str, float], whole: Tensor) -> None:
    level = {name: float(on) for name, on in zip(shares, big, strict=True)}
    words = "the best layers: " + ", ".join(str(i) for i, on in enumerate(big) if on)
    tell(f"… {words if big.any() else 'all small'}", level, one.always(big), one, whole)


def best_of_each(one: Measured, tokens: Tensor, choices: Tensor) -> Tensor:
    """Logits [1,T,V] of one row: for each token that of choices [N,L] by which the next is likeliest."""
    chosen, found = choices[:, None][:, :0], []
    for place in range(tokens.shape[1] - 1):
        rows = Measured(one.soft, one.method, tokens[:, : place + 1].expand(len(choices), -1))
        logits = rows.fixed(torch.cat((chosen, choices[:, None]), 1))[:, -1].float()
        best = int(logits.log_softmax(-1)[:, tokens[0, place + 1]].argmax())
        chosen = torch.cat((chosen, choices[best].expand(len(choices), 1, -1)), 1)
        found.append(logits[best])
    return torch.stack([*found, found[-1]])[None]


def loss(one: Measured, logits: Tensor) -> float:
    odds, target = logits[:, one.half : -1].float(), one.tokens[:, one.half + 1 :]
    return float(F.cross_entropy(odds.flatten(0, 1), target.flatten()))


def tell(name: str, shares: dict[str, float], logits: Tensor, one: Measured, whole: Tensor) -> None:
    same = (logits.argmax(-1) == whole.argmax(-1))[:, one.half :].float().mean()
    share = min(1.0, sum(shares.values()) / len(shares)) if shares else 1.0
    print(f"| {name} | {share:.0%} | {loss(one, logits):.3f} | {same:.1%} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
