"""What `tools/bench/bench.py peers` measures, and what it prints of it: ratios of rounds, a table, a picture."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from statistics import median

CASES = "decode@32,decode@512,decode@4096,decode@128x8,prefill@128,prefill@512,prefill@2048,load,memory@512,bytes"
Rounds = dict[str, list[float]]  # by engine, a figure per round
BEST = "+best"  # after a variant: it and its settings are measured, and of each case the best one counts


@dataclass(frozen=True)
class Case:
    """`decode@TOKENS`, `prefill@TOKENS` or `memory@TOKENS` (with `xBATCH` for rows), `load` or `bytes`."""

    kind: str
    tokens: int = 0
    batch: int = 1

    def __str__(self) -> str:
        rows = f"x{self.batch}" if self.batch > 1 else ""
        return f"{self.kind}@{self.tokens}{rows}" if self.tokens else self.kind

    @property
    def label(self) -> str:
        rows = f", batch {self.batch}" if self.batch > 1 else ""
        return {
            "decode": f"decode after {self.tokens} tokens{rows}, tokens/s",
            "prefill": f"prefill of {self.tokens} tokens{rows}, tokens/s",
            "load": "load until the first token, s",
            "memory": f"peak memory after {self.tokens} tokens{rows}, MB",
            "bytes": "files, MB",
        }[self.kind]

    def figure(self, times: list[float]) -> float:
        """Tokens/s of one turn: of its median step, or of its prompts."""
        if self.kind == "decode":
            return self.batch / median(times)
        return self.batch * self.tokens / times[0]

    @property
    def is_speed(self) -> bool:
        return self.kind in ("decode", "prefill")

    def ratio(self, ours: float, theirs: float) -> float:
        """How many times better ours is: of speeds the higher, of costs the lower."""
        return ours / theirs if self.is_speed else theirs / ours

    def best(self, rounds: Rounds) -> str:
        """Whose median is best; of equal ones the first."""
        middle = {name: median(figures) for name, figures in rounds.items()}
        return (max if self.is_speed else min)(middle, key=middle.__getitem__)


def parse_case(text: str) -> Case:
    """Raises ValueError with what to write."""
    if text in ("load", "bytes"):
        return Case(text)
    if found := re.fullmatch(r"(decode|prefill|memory)@([1-9]\d*)(?:x([1-9]\d*))?", text):
        return Case(found[1], int(found[2]), int(found[3] or 1))
    raise ValueError(
        f"{text!r} is no case: write decode@TOKENS, prefill@TOKENS or memory@TOKENS, with xBATCH for "
        "rows at once, or load, or bytes"
    )


@dataclass(frozen=True)
class Spec:
    """`ENGINE:VARIANT`, with `=PATH` where its model is ready."""

    engine: str
    variant: str
    path: Path | None = None

    @property
    def name(self) -> str:
        return f"{self.engine}:{self.variant}" if self.variant else self.engine


def parse_spec(text: str, variants: dict[str, tuple[str, ...]]) -> Spec:
    """`variants` by engine, the first its default. Raises ValueError with what to write."""
    name, _, path = text.partition("=")
    engine, _, variant = name.partition(":")
    if engine not in variants:
        raise ValueError(f"{text!r}: no engine {engine!r}; there are {', '.join(sorted(variants))}")
    known = variants[engine]
    if not variant and not known:
        raise ValueError(f"{text!r}: give a variant, {engine}:RECIPE")
    if variant.endswith(BEST) and settings_of(variant, known):
        return Spec(engine, variant, Path(path) if path else None)
    if variant and known and variant not in known:
        raise ValueError(
            f"{text!r}: {engine} has no variant {variant!r}; it has {', '.join(known)}"
        )
    return Spec(engine, variant or known[0], Path(path) if path else None)


def settings_of(variant: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """The variants that one stands for: itself, or of `BASE+best` the base with each of its settings."""
    if not variant.endswith(BEST):
        return (variant,)
    base = variant.removesuffix(BEST)
    return tuple(name for name in known if name == base or name.startswith(f"{base}+"))


def expand(specs: list[Spec], variants: dict[str, tuple[str, ...]]) -> dict[str, list[Spec]]:
    """By the name of each spec, those that are measured for it."""
    return {
        s.name: [Spec(s.engine, v, s.path) for v in settings_of(s.variant, variants[s.engine])]
        for s in specs
    }


def choose_best(
    results: dict[Case, Rounds], members: dict[str, list[Spec]]
) -> tuple[dict[Case, Rounds], dict[Case, dict[str, str]]]:
    """The rounds of each spec, by case; and where it has several settings, which one they are of."""
    found: dict[Case, Rounds] = {}
    chosen: dict[Case, dict[str, str]] = {}
    for case, rounds in results.items():
        found[case], chosen[case] = {}, {}
        for name, specs in members.items():
            best = case.best({s.name: rounds[s.name] for s in specs})
            found[case][name] = rounds[best]
            if name.endswith(BEST):
                base = name.removesuffix(BEST)
                chosen[case][name] = best.removeprefix(base).removeprefix("+") or "plain"
    return found, chosen


def worse(results: dict[Case, Rounds]) -> list[str]:
    """Where the first engine is worse than another, by the median of the rounds' ratios."""
    lines = []
    for case, rounds in results.items():
        ours, *peers = rounds
        for peer in peers:
            middle, least, most = ratios(case, rounds[ours], rounds[peer])
            if middle < 1:
                how = "slower" if case.kind not in ("memory", "bytes") else "larger"
                name = ours.partition(":")[0]
                spread = f" ({least:.2f}..{most:.2f})" if least != most else ""
                what = case.label.rpartition(", ")[0]
                lines.append(f"{name} is {how}: {what}, {middle:.2f}{spread} of {peer}")
    return lines


def ratios(case: Case, ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Median, least and most of the rounds' ratios."""
    all_ = [case.ratio(a, b) for a, b in zip(ours, theirs, strict=True)]
    return median(all_), min(all_), max(all_)


def shown(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def table(results: dict[Case, Rounds], chosen: dict[Case, dict[str, str]] | None = None) -> str:
    """Markdown: a row per case; the first engine's median, then each other's and the ratios to it. chosen: the settings
    that figures are of, by case and engine.
    """
    ours, *peers = next(iter(results.values()))
    head = ["", ours, *(word for p in peers for word in (p, "times better"))]
    lines = [head, ["---"] * len(head)]
    for case, rounds in results.items():
        line = [case.label, shown(median(rounds[ours]))]
        for peer in peers:
            middle, least, most = ratios(case, rounds[ours], rounds[peer])
            spread = f" ({least:.2f}..{most:.2f})" if least != most else ""
            setting = (chosen or {}).get(case, {}).get(peer)
            figure = shown(median(rounds[peer])) + (f" ({setting})" if setting else "")
            line += [figure, f"**{middle:.2f}**{spread}"]
        lines.append(line)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def plot(results: dict[Case, Rounds], title: str, out: Path) -> None:
    """A dot per case and peer at the median ratio, its line from least to most; right of 1 ours is better."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FormatStrFormatter, NullLocator

    ours, *peers = next(iter(results.values()))
    height = 1.6 + max(0.5, 0.25 * len(peers)) * len(results)
    figure, axes = pyplot.subplots(figsize=(9, height), layout="constrained")
    for i, peer in enumerate(peers):
        found = [ratios(case, rounds[ours], rounds[peer]) for case, rounds in results.items()]
        middle, least, most = zip(*found, strict=True)
        places = [row + 0.6 * ((i + 0.5) / len(peers) - 0.5) for row in range(len(found))]
        spread = [[m - a for m, a, _ in found], [b - m for m, _, b in found]]
        axes.errorbar(middle, places, xerr=spread, fmt="o", capsize=3, label=peer)
        for ratio, most_, place in zip(middle, most, places, strict=True):
            axes.annotate(
                f"{ratio:.2f}",
                (most_, place),
                (6, 0),
                textcoords="offset points",
                va="center",
                size=8,
            )
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(results)), [case.label.rpartition(", ")[0] for case in results])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    low, high = axes.get_xlim()
    steps = (1, 2, 5) if high / low > 10 else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
    axes.set_xticks([t for e in range(-3, 4) for s in steps if low < (t := s * 10**e) < high])
    axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel(f"times better {ours} is (median of rounds, least to most)")
    axes.set_title(title)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(out, dpi=150)
    pyplot.close(figure)
