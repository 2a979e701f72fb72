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

FEW = 0.1  # share of a block's masks from which on the buffer is small again


@dataclass(frozen=True)
class Ccd(DllmLowconf):
    """A call keeps the k masks of least entropy, k being what `dllm-lowconf` with these `steps` keeps. From call `warm`
    of a block on it keeps more: of the first masks in that order those that were next to be kept in the call before,
    and whose best token has not changed since. So many of both orders are looked at as calls were made since, at most
    k (1 + `expand`).

    Where the surest masks were not among those of the call before, or fewer than k agree, k are kept as before.
    `adaptive` = false: of those that agree, too, k are kept.
    """

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
        if not place.step:
            memory.update(next=set(), tokens={}, size=1)
        if len(guess) <= FEW * place.total:
            memory["size"] = 1
        if place.step + 1 >= self.warm:
            memory["size"] = min(memory["size"] + 1, count + int(count * self.expand))
        order = np.argsort(guess.entropy, kind="stable")
        chosen = order[:count]
        if place.step >= self.warm and set(guess.slots[chosen].tolist()) & memory["next"]:
            agree = [
                place
                for place in order[: memory["size"]].tolist()
                if int(guess.slots[place]) in memory["next"]
                and memory["tokens"].get(int(guess.slots[place])) == int(guess.tokens[place])
            ]
            if len(agree) >= count:
                chosen = np.array(agree if self.adaptive else agree[:count])
        left = [place for place in order.tolist() if place not in set(chosen.tolist())]
        memory["next"] = set(guess.slots[left[: memory["size"]]].tolist())
        memory["tokens"] = dict(zip(guess.slots.tolist(), guess.tokens.tolist(), strict=True))
        return chosen
