"""SentenceKV (arXiv:2504.00970): units are sentences, and a sentence's queries choose together, by their mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, fx

from accel.ir.errors import PassError, RecipeError, shown
from accel.ir.program import Program
from accel.ir.units import Units as Plan
from accel.passes.kv.select import Layout
from accel.passes.kv.select._build import Build, Named
from accel.passes.kv.select._tokens import Memory
from accel.passes.kv.select._units import Units, marked, means_of, own_slots

_FEWEST = 2  # queries that choose; before, a token reads everything


@dataclass(frozen=True)
class Sentencekv(Units):
    """A unit is a sentence, worth q · mean, where q is the mean of a token's query and those before it in its own
    sentence, and the query heads of a KV head choose together. The token that ends a sentence, and the one after it,
    read everything: there are fewer than two queries.

    A sentence ends with a token whose text is one of `ends` (separated by spaces; spaces around a token's text do not
    count), or whose id is one of `end_ids`. `Session.mark` says of a prompt's tokens otherwise. Without either, `size`
    neighbours are a unit. Where a prompt has more than one sentence for `size` tokens, neighbouring ones share
    a unit. A sentence of generated text is cut where `every` tokens become units; until then they are read whole.

    The paper first drops tokens of the prompt, of each head others, down to three times `tokens_read`. Here a unit's
    tokens lie in slots that all heads of a row share, so one choice is for all heads: `prefill.prune = gemfilter` with
    `tokens` three times `tokens_read`, beside it. Alone, the method drops nothing. Of SmolLM2's attention one choice
    for all heads keeps nearly what choices by head do, `gemfilter`'s less, and answers are found as without a drop.
    Each KV head, not each query head, has a list.
    """

    size: int = 16
    every: int = 64
    sinks: int = 32
    ends: str = ". ! ? ... \n\n \u3002 \uff01 \uff1f"
    end_ids: Any = None

    lacks = "a first choice of a prompt's tokens by head (gemfilter's, for all, loses no answer on SmolLM2)"
    layout = Layout(spelling=True)
    small: ClassVar[Mapping[str, Any]] = {
        "tokens_read": 10, "size": 4, "every": 8, "sinks": 2, "dense_layers": 0, "end_ids": [11, 23, 30, 37, 44, 55],
    }  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if not any(self.ends.split(" ")):
            raise RecipeError(
                f"{self.full_name}: ends names no token; give texts, separated by spaces"
            )
        ids = self.end_ids
        if ids is None:
            return
        if not isinstance(ids, (list, tuple)) or not all(type(i) is int and i >= 0 for i in ids):
            raise RecipeError(
                f"{self.full_name}: end_ids is {shown(ids)}; give a list of token ids, 0 or more"
            )
        object.__setattr__(self, "end_ids", tuple(sorted(set(ids))))

    def group(
        self, keys: Tensor, real: Tensor, units: Tensor, marks: Tensor
    ) -> tuple[Tensor, Tensor]:
        labels = marked(marks, real, units)[:, None].expand(-1, keys.shape[1], -1)
        return labels, means_of(keys, real, labels, units)

    @property
    def plan(self) -> Plan:
        """See Units. The ids are known where the program is."""
        return replace(super().plan, ends=self.end_ids or ())

    def begun(self, program: Program) -> Self:
        method = self
        if self.end_ids is None:
            texts, marks = program.spelling or (), {*self.ends.split(" ")} - {""}
            found = [i for i, text in enumerate(texts) if text.strip(" ") in marks]
            if texts and not found:
                raise PassError(
                    f"Sentencekv: no token of {program.facts.name} reads as one of ends = {shown(self.ends)}; "
                    "give other texts, or end_ids"
                )
            method = replace(self, end_ids=found)
        elif self.end_ids and self.end_ids[-1] >= program.facts.vocab_size:
            raise PassError(
                f"Sentencekv: end_ids has {self.end_ids[-1]}, and {program.facts.name} has {program.facts.vocab_size} "
                "tokens; give smaller ids"
            )
        return super(Sentencekv, method).begun(program)

    def memory(self, heads: int, width: int, groups: int) -> Memory:
        """The sum of the queries of a token's sentence so far, and how many they are; none where it ends one."""
        entries = {"sum": ("float32", (heads, width)), "count": ("float32", ())}
        return Memory(entries, whole=True)

    def operands(self, build: Build, node: fx.Node) -> dict[str, fx.Node]:
        """See Units; and which tokens of the call end a sentence."""
        found, editor = super().operands(build, node), build.editor
        with editor.graph.inserting_before(node):
            ids = editor.param("units.ends", torch.tensor(self.plan.ends or (-2,)))
        asked = {"tokens": build.program.step.input("tokens"), "ids": ids}
        return {**found, "ends": build.made(node, "units.ends", _ends, asked, "ends")}

    def search(
        self, x: Mapping[str, Tensor], before: Mapping[str, Tensor], known: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """See Units. The mean of each token's queries; where it has too few, it reads everything."""
        total, count = self.query_sums(x["queries"].float(), x["ends"], before, known)
        mean = total / count.clamp(min=1)[..., None, None]
        new = {"sum": total, "count": count, "whole": count < _FEWEST}
        return (
            torch.where((count > 0)[..., None, None], mean, x["queries"].float()),
            own_slots(x),
            new,
        )

    def query_sums(
        self, queries: Tensor, ends: Tensor, before: Mapping[str, Tensor], known: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The sum [B,T,H,D] and number [B,T] of the queries since the last sentence end, each token's own [B,T,H,D]
        among them; of tokens of which some end one (bool [B,T]), behind a token of this memory, where it is `known`
        (bool [B]). A token that ends a sentence has none.
        """
        number = torch.arange(queries.shape[1], device=queries.device)
        past = ends.long().cumsum(1)  # [B,T]: sentences that ended, at this token or before
        same = past[..., None] == (past - ends.long())[:, None]  # [B,T,T]: none ended between
        same = same & (number <= number[:, None])
        first = ((past == 0) & known[:, None]).to(queries.dtype)  # it goes on with what was held
        weight = same.to(queries.dtype)
        total = (weight @ queries.flatten(2).nan_to_num()).view_as(queries)
        old, many = before["sum"], before["count"]
        total = total + first[..., None, None] * old[:, None]
        return total, weight.sum(2) + first * many[:, None]


def _ends(x: Named) -> Tensor:
    """Which tokens [B,T] have one of these ids [M]: bool [B,T]."""
    return (x["tokens"][..., None] == x["ids"]).any(-1)
