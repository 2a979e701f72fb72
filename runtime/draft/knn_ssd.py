"""KNN-SSD (arXiv:2505.16162): self-speculative decoding; drafts leave out attentions and MLPs, by the plan of the kind
of text that a prompt is nearest to, and all of the model verifies, with one cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from accel.ir.errors import InputError
from accel.ir.invariants import Invariant
from accel.ir.taps import FINAL
from accel.ir.trained import Tensors
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.rounds import picked
from accel.runtime.decode.row import Row
from accel.runtime.decode.trained_part import Sizes, TrainedPart, sizes_of
from accel.runtime.draft import Base, Drafters, More
from accel.runtime.draft._by_self import BySelf, cost_of
from accel.runtime.draft._plans import Plan, every_second, layers_by_branch
from accel.runtime.draft._streams import Means
from accel.runtime.inputs.ints import Ints
from accel.runtime.session.session import Session
from accel.runtime.tree import Tree

Floats = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class KnnSsd(TrainedPart, Base):
    """A drafted token runs the attentions and MLPs of a plan, the final norm and the LM head. Its cache entries are
    rewound and written again by the verification call.

    A prompt's plan is that of the anchor whose direction is nearest to the mean of its last hidden states, for the
    whole request. A prompt that is less near to it than texts of that kind are leaves out every second layer, as all do
    where there is no part.

    `trained`: the file of anchors and plans, from `accel-compile train knn-ssd MODEL --text FOLDER`, a file of text for
    each kind; empty: the one that a build finds for the model.

    The recipe gets `depth = by-branch`, which puts each branch under a condition and skips none by default.
    """

    trained: str = ""

    key: ClassVar[str] = "knn-ssd"
    optional = True
    lacks = "Bayesian optimisation of the plans: branches are left out one by one, by the expected speed"
    asks = {"tree": "chain", "length": "draft-verify"}
    needs = {"depth": "by-branch"}
    relies = frozenset({Invariant.CHAINS, Invariant.BRANCHES_BY_CALL})
    provides = frozenset({Invariant.PROBABILITIES})

    @classmethod
    def expected(cls, tensors: Tensors) -> Sizes:
        """See TrainedPart. Of each anchor "anchors", its direction, and "kind", the number of its kind of text; of each
        kind "attn", "mlp": 1 for each branch that runs, else 0; "cost": of a drafted token, in steps; "least": the
        cosine with its nearest anchor that a text of the kind has at least.
        """
        anchors, plans = sizes_of(tensors, "anchors"), sizes_of(tensors, "attn")
        anchors = anchors if len(anchors) == 2 else (1, 1)
        plans = plans if len(plans) == 2 else (1, 1)
        return {
            "anchors": anchors, "kind": anchors[:1], "attn": plans, "mlp": plans,
            "cost": plans[:1], "least": plans[:1],
        }  # fmt: skip

    def taps(self, layers: int) -> Sequence[str]:
        return (FINAL,)

    def open(self, session: Session, rows: Sequence[Row], context: DecodeContext) -> Drafters:
        plans, costs = self.plans(context)
        if FINAL not in session.extra:
            raise InputError(
                f"{self.full_name} reads {FINAL}, which this model was not built to give; build with draft = {self.use}"
            )
        return _Routed(self, session, rows, context, plans, costs)

    def plans(self, context: DecodeContext) -> tuple[list[Plan], list[float]]:
        """What drafts run, of each kind of text and last of any other, and what a drafted token costs, in plain steps.
        Raises InputError.
        """
        layers = layers_by_branch(context, self.full_name)
        other = Plan.without(set(takewhile(lambda one: one[1] % 2, every_second(layers))), layers)
        plans, costs, part = [other], [cost_of(context, other.share)], self.part
        if part:
            count, theirs = part["attn"].shape
            if theirs != layers or not np.isin(part["kind"], np.arange(count)).all():
                raise InputError(
                    f"{self.full_name}: {self.trained or 'the bundled file'} has {count} plans of {theirs} layers for "
                    f"anchors of kinds {sorted(set(part['kind'].astype(int).tolist()))}, but the model has {layers} "
                    f"layers; run accel-compile train {self.key} MODEL --text FOLDER, and build again"
                )
            both = zip(part["attn"] > 0, part["mlp"] > 0, strict=True)
            plans = [*(Plan(*one) for one in both), other]
            costs = [*map(float, part["cost"]), *costs]
        return plans, costs

    def kind(self, mean: Floats) -> int:
        """The kind of text that a prompt is of, by the mean of its last hidden states [E]; -1: of no known one. Raises
        InputError.
        """
        part = self.part
        if not part:
            return -1
        if part["anchors"].shape[1] != mean.size:
            raise InputError(
                f"{self.full_name}: {self.trained or 'the bundled file'} has anchors of {part['anchors'].shape[1]} "
                f"numbers, but the model's hidden states have {mean.size}; run accel-compile train {self.key} MODEL "
                "--text FOLDER, and build again"
            )
        near = cosines(part["anchors"], mean)
        kind = int(part["kind"][near.argmax()])
        return kind if near.max() >= part["least"][kind] else -1


def cosines(anchors: Floats, mean: Floats) -> Floats:
    """Of anchors [A,E] with a mean [E], [A]."""
    anchors, mean = anchors.astype(np.float64), mean.astype(np.float64)
    sizes = np.linalg.norm(anchors, axis=1) * np.linalg.norm(mean)
    found: Floats = anchors @ mean / np.maximum(sizes, 1e-12)
    return found


class _Routed(BySelf):
    def __init__(
        self,
        of: KnnSsd,
        session: Session,
        rows: Sequence[Row],
        context: DecodeContext,
        plans: Sequence[Plan],
        costs: Sequence[float],
    ):
        super().__init__(session, rows, context, float(np.mean(costs)))
        self._method = of
        self._controls = [plan.controls for plan in plans]  # the last of no known kind
        self.kinds: list[int | None] = [None for _ in rows]  # none until the prompt has run
        self._means = Means(FINAL)
        if of.part:
            session.listen(self._means)

    def says(self, row: int) -> Mapping[str, Any]:
        kind = self.kinds[row]
        return self._controls[-1 if kind is None else kind]

    def draft(self, limits: Mapping[int, int], more: More) -> Mapping[int, Tree]:
        self._end_prompt()
        return super().draft(limits, more)

    def _end_prompt(self) -> None:
        """What was heard until now are prompts."""
        if self._means.over:
            return
        self._means.over = True
        for row in range(len(self.kinds)):
            mean = self._means.of(row)
            self.kinds[row] = -1 if mean is None else self._method.kind(mean)

    def join(self, other: Self) -> None:
        super().join(other)
        for one in (self, other):
            one._end_prompt()
        self.kinds += other.kinds

    def leave(self, order: Ints) -> None:
        super().leave(order)
        self._end_prompt()
        self.kinds = picked(self.kinds, order)

    def close(self) -> None:
        super().close()
        with suppress(InputError):  # of a session that a failed call closed
            self._session.unlisten(self._means)
