"""CALM (arXiv:2207.07061): early exit; a token skips the remaining layers when the model is confident of the
next token. Its skipped layers' cache, where the token runs again with later ones: EE-LLM (arXiv:2312.04916).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from accel.ir.axis import option
from accel.ir.depth import ENDS, PROPAGATE, REFEED, Depth
from accel.ir.errors import PassError
from accel.ir.invariants import Invariant
from accel.ir.program import Editor, Program
from accel.passes import Pass, Report
from accel.passes.depth import Base
from accel.passes.depth._classifier import ExitClassifier, classified
from accel.passes.depth._exits import Measure, count_layers, exit_of, head_of, unless
from accel.passes.depth._joint import conditions, layers
from accel.passes.depth._routed import Reads
from accel.passes.depth._threshold import (
    even,
    gap,
    least_threshold,
    leaving,
    likeness,
    most,
    near_one,
    observed,
)
from accel.passes.stream import stream_after
from accel.passes.trained import Parts

THRESHOLD = "threshold"
NEVER = 2.0  # above any confidence
META = "meta"
MEASURES = {
    "softmax": Measure(gap, even, head=True),
    "max": Measure(most, even, head=True),
    "state": Measure(likeness, near_one, head=False),
    META: Measure(classified, even, head=False),
}


@dataclass(frozen=True)
class Calm(Base):
    """After every `every`-th layer from `first` on (0: the middle layer) a token may leave, where the confidence of
    each row of the call is at least `threshold`. This applies in decoding, token by token; a prompt runs all layers.

    The confidence (`by`) is how far the probabilities of the two likeliest tokens are apart (`softmax`), or that of the
    likeliest (`max`), for which each exit computes the LM head. Or the head is computed once, and the confidence is the
    cosine of the residual stream before and after the layer of the exit (`state`), or what a trained linear classifier
    tells of the stream (`meta`; `accel-compile train calm MODEL --text FILE`, not that on which thresholds
    are measured; `trained`: its file, empty: the one that is kept).

    What the layers above an exit hold of the token (`cache`): keys and values of the exit layer's output (`propagate`),
    which is cheap and not what the model would hold; or nothing until the token runs again, from the embedding on,
    with those after it (`refeed`), so that they are the model's own. At most `window` tokens of a row wait, then a call
    runs all layers.

    A `threshold` of 0 is measured on the calibration text: the least at which a share of at least `agreement` of all
    tokens are those of the whole model, with a `probability` that holds for text like it (the tokens before one have
    run all layers). Where there is none, the model has no exits.

    With `falls` above 0 the threshold falls with each token behind the prompt, n, to 0.9 of itself:
    `threshold` (0.9 + 0.1 exp(-`falls` n / `over`)), as later tokens spoil less; the paper takes 4, over the longest
    answer. A measured threshold is where it ends, so that what holds of it holds throughout.
    """

    threshold: float = option(0.0, least=0)
    by: str = option("softmax", one_of=tuple(MEASURES))
    agreement: float = option(0.95, above=0, below=1)
    probability: float = option(0.95, above=0, below=1)
    first: int = option(0, least=0)
    every: int = option(4, least=1)
    cache: str = option(PROPAGATE, one_of=(PROPAGATE, REFEED))
    window: int = option(8, least=1, most=64)
    falls: float = option(0.0, least=0)
    over: int = option(512, least=1)
    trained: str = ""

    key: ClassVar[str] = ExitClassifier.key
    reads_text = True
    small: ClassVar[Mapping[str, Any]] = {"threshold": 0.05, "first": 1, "every": 1}

    @property
    def breaks(self) -> frozenset[Invariant]:
        """Tokens that run again are written again."""
        again = {Invariant.APPEND_ONLY} if self.cache == REFEED else set()
        return super().breaks | again

    @property
    def provides(self) -> frozenset[Invariant]:
        """Where tokens run again no caller says which layers run."""
        return frozenset() if self.cache == REFEED else super().provides

    def steps(self) -> Sequence[Pass]:
        """See Rewriting. The classifier is read before weights are stored otherwise, by which the model is known."""
        return [Reads(self, ExitClassifier(self.trained)), self] if self.by == META else [self]

    def run(self, program: Program) -> Report:
        count = len(program.facts.layers)
        first = self.first or max(1, count // 2)
        exits = range(first - 1, count - 1, self.every)
        if not exits:
            raise PassError(
                f"calm: no exit after layer {first} of {count}; give a first below {max(count, 2)}"
            )
        measure = MEASURES[self.by]
        parts = program.parts[self.key] if self.by == META else {}
        threshold = self.threshold or self._measured(program, exits, measure, parts)
        calls = conditions(program, self.cache)
        every, window = (True,) * count, self.window if self.cache == REFEED else 0
        falls, over = (self.falls, self.over) if self.falls and threshold else (0.0, 0)
        if threshold and falls and not self.threshold:
            threshold /= ENDS
        program.facts.depth = Depth(
            every, self.cache, threshold, window=window, falls=falls, over=over
        )
        if threshold is None:  # a call may still say which layers run
            return Report(changed=len(calls))
        limit = Editor(program, program.step.graph).placeholder(THRESHOLD, (), torch.float32)
        program.step.defaults[THRESHOLD] = torch.tensor(NEVER)
        stream = stream_after(calls[-1])
        head = head_of(program, stream)
        done: fx.Node | None = None
        for index, call in enumerate(calls):
            if done is not None:
                unless(program, call, done)
            if index in exits:
                learnt = _learnt(parts, index)
                done = exit_of(program, call, measure, learnt, head, stream, limit, done)
        if self.cache == REFEED:
            count_layers(program, calls)
        return Report(changed=len(exits))

    def _measured(
        self, program: Program, exits: range, measure: Measure, parts: Parts
    ) -> float | None:
        """The threshold that the text gives, which the facts note."""

        def sure_at(logits: Tensor, after: Tensor, before: Tensor, layer: int) -> Tensor:
            return measure.at(logits, after, before, _learnt(parts, layer))

        share = 1 - self.agreement
        sure, same = observed(program, layers(program), exits, sure_at)
        limit = least_threshold(sure, same, measure.tried(), share, 1 - self.probability)
        left = leaving(sure, same, NEVER if limit is None else limit)
        count = sure.shape[1]
        holds = f"at most {share:.2g} of tokens are others than the whole model's, with {self.probability:g}"
        where = f"by {count:,} tokens of the calibration text"
        if not left.numel():
            program.facts.notes.append(
                f"calm: no exits, for at no threshold does it hold that {holds} ({where}); give a threshold, "
                "more text, less agreement, or a model that was trained for early exits"
            )
        else:
            program.facts.notes.append(
                f"calm: threshold {limit:.5g}, {where}: {len(left) / count:.0%} leave early, "
                f"{int((~left).sum()) / count:.1%} of all are others; {holds}"
            )
        return limit if left.numel() else None


def _learnt(parts: Parts, layer: int) -> list[Tensor]:
    """The trained tensors of a layer's exit, in the order of `classified`; of others none."""
    return [parts[layer][name] for name in ("weight", "bias")] if layer in parts else []
