"""Coherent contextual decoding (CCD, arXiv:2512.02044): what agrees with the call before stays beside the surest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from accel.ir.axis import option
from accel.runtime.decode.row import Row
from accel.runtime.loop._blocks import share
from accel.runtime.loop._canvas import Guess, Place
from accel.runtime.loop.dllm_lowconf import DllmLowconf
from accel.runtime.sample import entropy

FEW = 0.1  # share of a block's masks from which on the buffer is small again


@dataclass(frozen=True)
class Ccd(DllmLowconf):
    """A call keeps the k masks of least entropy, k being what `dllm-lowconf` with these `steps` keeps. The entropy is
    that of a mask's mean probabilities over the last `depth` calls, which is low where each is certain and they agree;
    masks that were not among the surest of each of these calls come behind, by what this call says alone.

    From call `warm` of a block on it keeps more: of the first masks in that order those that were next to be kept in
    the call before, and whose best token has not changed since. So many of both orders are looked at as calls were made
    since, at most k (1 + `expand`). Where the first mask was not among those, or fewer than k agree, k are kept as
    before. `adaptive` = false: of those that agree, too, k are kept.
    """

    depth: int = option(2, least=1, most=16)
    warm: int = option(5, least=1)
    expand: float = option(4.0, least=0)
    adaptive: bool = True

    @property
    def static(self) -> bool:
        return False

    def begin(self, row: Row) -> Any:
        return {}

    def stays(self, guess: Guess, place: Place) -> Any:
        memory, count = place.memory, share(place.total, self.calls(place.total), place.step)
        most = count + int(count * self.expand)
        slots, tokens = guess.slots.tolist(), guess.tokens.tolist()
        if not place.step:
            memory.update(next=set(), tokens={}, size=1, laws=[])
        if place.step + 1 >= self.warm:
            memory["size"] = min(memory["size"] + 1, most)
        if len(guess) <= FEW * place.total:
            memory["size"] = 1
        order = self._order(guess, memory, most + count)
        chosen = order[:count]
        if place.step >= self.warm and slots[order[0]] in memory["next"]:
            agree = [
                at
                for at in order[: memory["size"]]
                if slots[at] in memory["next"] and memory["tokens"][slots[at]] == tokens[at]
            ]
            if len(agree) >= count:
                chosen = agree if self.adaptive else agree[:count]
        left = [at for at in order if at not in chosen]
        memory["next"] = {slots[at] for at in left[: memory["size"]]}
        memory["tokens"] = dict(zip(slots, tokens, strict=True))
        return np.array(chosen)

    def _order(self, guess: Guess, memory: Any, most: int) -> list[int]:
        """The places of a guess, those to be kept first at the front. The `most` surest are remembered."""
        order: list[int] = np.argsort(guess.entropy, kind="stable").tolist()
        if self.depth == 1:
            return order
        laws = {int(guess.slots[at]): guess.probabilities[at].copy() for at in order[:most]}
        calls = memory["laws"] = [*memory["laws"], laws][-self.depth :]
        if len(calls) < self.depth:
            return order
        mixed = {
            at: entropy(np.mean([law[slot] for law in calls], axis=0))
            for at in order[:most]
            if all((slot := int(guess.slots[at])) in law for law in calls)
        }
        return [*sorted(mixed, key=mixed.__getitem__), *(at for at in order if at not in mixed)]
