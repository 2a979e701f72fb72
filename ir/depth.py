"""A model whose layers may be left out, as a depth method says it and a manifest keeps it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from accel.ir.fields import Fields

NESTED, PROPAGATE = CACHES = ("nested", "propagate")
REFEED, HOLES, APART = "refeed", "holes", "apart"
RUN_LAYERS, RUN_ATTN, RUN_MLP = "run_layers", "run_attn", "run_mlp"
RUN_ROWS = "run_rows"  # the layers that change a row's stream [B,L]
ENDS = 0.9  # the share of a threshold at which one that falls ends
ROUTE = "route"  # the scores of each token's layers [B,T,L]
LAYERS_RAN = "layers_ran"  # how many layers a call ran, of each of its tokens [B,T]
BRANCHES = {
    RUN_LAYERS: "layer",
    RUN_ATTN: "attn",
    RUN_MLP: "mlp",
}  # what regions under each are called before a number


@dataclass(frozen=True)
class Depth:
    """Which layers a call may leave out, and does where its caller says nothing.

    plan: the layers that decoding runs; with `mlp` those whose attention it runs. cache: "nested", where a layer that
    was left out lacks those tokens, "propagate", where it has keys and values of them all the same, "refeed", where
    tokens that it lacks run again with later ones: at most `window` of a row, then a call runs all layers; "holes",
    where later tokens do not read those that it did not take; "apart", where each layer has slots of its own, of
    which the caller keeps account (`DraftHead.cascade`). threshold: the confidence from which decoding goes no
    deeper, or with `mlp` leaves out MLPs; none where the graph goes by none. mlp: the layers whose MLP decoding runs;
    none where a layer is left out as a whole. until: of each layer, how many tokens after a prompt it runs for
    although the plan leaves it out; none where no layer does. dense: how many tokens after a prompt go by no
    threshold. routed: whether each token goes by the threshold for itself, those of a prompt, too, and leaves out
    branches, or layers, above it. by_prompt: the mean score of a row's prompt from which on a layer runs for what
    comes after it; none where layers have no scores. falls: how fast the threshold falls, to 0.9 of itself, over the
    `over` tokens that follow a prompt; 0: it stays.
    """

    plan: tuple[bool, ...]
    cache: str
    threshold: float | None = None
    mlp: tuple[bool, ...] | None = None
    until: tuple[int, ...] | None = None
    dense: int = 0
    routed: bool = False
    by_prompt: float | None = None
    window: int = 0
    falls: float = 0.0
    over: int = 0

    def threshold_at(self, token: int) -> float | None:
        """The confidence from which a token goes no deeper, so many after the first that follows a prompt."""
        if self.threshold is None or not self.falls:
            return self.threshold
        return self.threshold * (ENDS + (1 - ENDS) * math.exp(-self.falls * token / self.over))

    @property
    def turns(self) -> tuple[int, ...]:
        """The tokens after a prompt from which on less runs, in order."""
        return tuple(sorted({n for n in (self.dense, *(self.until or ())) if n}))

    def plan_at(self, token: int) -> tuple[bool, ...]:
        """The layers that run for a token, so many after the first that follows a prompt."""
        until = self.until or (0,) * len(self.plan)
        return tuple(run or token < n for run, n in zip(self.plan, until, strict=True))

    @property
    def plans(self) -> dict[str, tuple[bool, ...]]:
        """What decoding runs in the end, by the step's inputs that say it."""
        return (
            {RUN_LAYERS: self.plan}
            if self.mlp is None
            else {RUN_ATTN: self.plan, RUN_MLP: self.mlp}
        )

    @property
    def inputs(self) -> dict[str, tuple[int | str, ...]]:
        """The step's inputs by which a call chooses, with their shapes."""
        threshold = {} if self.threshold is None else {"threshold": ()}
        rows = {} if self.by_prompt is None else {RUN_ROWS: ("B", len(self.plan))}
        return {**dict.fromkeys(self.plans, (len(self.plan),)), **threshold, **rows}

    @property
    def all_run(self) -> bool:
        """Whether decoding leaves out nothing by its plan."""
        return all(self.plan) and all(self.mlp or ())

    def check(self, f: Fields) -> None:
        """See `fields.read`."""
        if not any((*self.plan, *(self.mlp or ()))):
            raise f.wrong("plan", list(self.plan), "bools, some of them true")
        if self.mlp is not None and len(self.mlp) != len(self.plan):
            raise f.wrong("mlp", list(self.mlp), f"{len(self.plan)} bools, one per layer")
        if self.until is not None and (len(self.until) != len(self.plan) or min(self.until) < 0):
            raise f.wrong(
                "until", list(self.until), f"{len(self.plan)} counts of tokens, one per layer"
            )
        if self.cache not in (every := (*CACHES, REFEED, HOLES, APART)):
            raise f.wrong("cache", self.cache, f"one of {', '.join(every)}")
        if self.falls < 0 or (self.falls > 0) != (self.over > 0):
            raise f.wrong("over", self.over, "a count of tokens above 0 where falls is above 0")
        if (self.cache == REFEED) != (self.window > 0):
            raise f.wrong(
                "window", self.window, "a count above 0 where the cache is refeed, else 0"
            )
