"""Codes of several codebooks, as of audio: in which step of decoding each one comes, and where it lies then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.ir.errors import InputError
from accel.runtime.inputs.ints import Ints, as_ints

Coordinate = tuple[int, int]  # frame, codebook


@dataclass(frozen=True)
class Pattern:
    """The coordinates that each step brings, of `frames` frames of `codebooks` codebooks, each once.

    A model runs one step per call. What a step brings may depend on all steps before it.
    """

    frames: int
    codebooks: int
    steps: tuple[tuple[Coordinate, ...], ...]

    def __post_init__(self) -> None:
        counts = np.zeros((max(self.frames, 1), max(self.codebooks, 1)), np.int64)
        for frame, book in chain(*self.steps):
            if not (0 <= frame < self.frames and 0 <= book < self.codebooks):
                raise InputError(
                    f"a pattern of {self.frames} frames and {self.codebooks} codebooks has no ({frame}, {book}); give "
                    "(frame, codebook), from 0 on"
                )
            counts[frame, book] += 1
        if self.frames < 1 or self.codebooks < 1:
            raise InputError(
                f"a pattern has {self.frames} frames and {self.codebooks} codebooks; give 1 or more of both"
            )
        if (counts != 1).any():
            frame, book = np.argwhere(counts != 1)[0].tolist()
            raise InputError(
                f"({frame}, {book}) comes in {counts[frame, book]} places of the pattern; let each (frame, codebook) "
                "come once"
            )
        if twice := [
            n for n, step in enumerate(self.steps) if len({q for _, q in step}) < len(step)
        ]:
            raise InputError(
                f"step {twice[0]} brings two frames of one codebook, and a model gives one; put them into two steps"
            )

    @cached_property
    def places(self) -> Ints:
        """The frame that a step brings of each codebook [Q,S]; -1: none."""
        found = np.full((self.codebooks, len(self.steps)), -1)
        for at, step in enumerate(self.steps):
            for frame, book in step:
                found[book, at] = frame
        return found

    def laid(self, codes: Any, empty: int) -> Ints:
        """Codes [...,Q,F] as steps bring them [...,Q,S]; `empty` stands where a step brings none."""
        ids = self._checked(codes, self.frames, "codes")
        found: Ints = np.take_along_axis(ids, self._along(ids, np.maximum(self.places, 0)), -1)
        return np.where(self.places < 0, empty, found)

    def read(self, laid: Any) -> Ints:
        """The codes [...,Q,F] of what steps brought [...,Q,S]."""
        ids = self._checked(laid, len(self.steps), "steps")
        at = np.zeros((self.codebooks, self.frames), np.int64)
        for step, brought in enumerate(self.steps):
            for frame, book in brought:
                at[book, frame] = step
        found: Ints = np.take_along_axis(ids, self._along(ids, at), -1)
        return found

    def _along(self, ids: Ints, at: Ints) -> npt.NDArray[np.int64]:
        """Places [Q,n] for each of the leading sizes of ids."""
        return np.broadcast_to(at, (*ids.shape[:-2], *at.shape))

    def _checked(self, value: Any, last: int, name: str) -> Ints:
        ids = as_ints(value, name)
        if ids.ndim < 2 or ids.shape[-2:] != (self.codebooks, last):
            raise InputError(
                f"{name} have shape {list(ids.shape)}; this pattern takes [...,{self.codebooks},{last}]"
            )
        return ids


def delay(frames: int, codebooks: int, delays: Sequence[int] | None = None) -> Pattern:
    """Codebook q of a frame comes `delays[q]` steps after the frame's turn: q, as in MusicGen (arXiv:2306.05284), where
    none are given. Delays of 0 are the parallel pattern.
    """
    own = list(range(codebooks)) if delays is None else list(delays)
    if len(own) != codebooks or any(not isinstance(n, int) or n < 0 for n in own):
        raise InputError(f"delays are {own}; give {codebooks} numbers of steps, 0 or more each")
    steps: list[list[Coordinate]] = [[] for _ in range(frames + max(own, default=0))]
    for frame in range(frames):
        for book, by in enumerate(own):
            steps[frame + by].append((frame, book))
    return Pattern(frames, codebooks, tuple(tuple(step) for step in steps if step))


def flat(frames: int, codebooks: int) -> Pattern:
    """One code per step, frame by frame."""
    steps = (((frame, book),) for frame in range(frames) for book in range(codebooks))
    return Pattern(frames, codebooks, tuple(steps))


def coarse_first(frames: int, codebooks: int) -> Pattern:
    """The first codebook of all frames, then the others, a frame per step."""
    first = [((frame, 0),) for frame in range(frames)]
    rest = [tuple((frame, book) for book in range(1, codebooks)) for frame in range(frames)]
    return Pattern(frames, codebooks, tuple([*first, *(step for step in rest if step)]))


def stack_delay(frames: int, codebooks: int) -> Pattern:
    """Stack-and-delay (arXiv:2309.08804): each step begins a frame, whose codebooks come in this step and those after.
    Of the frames under way no two are next to each other, if there are 2 (`codebooks` + 1) or more: every other frame
    begins `codebooks` + 1 turns ahead, then those between follow in turns. That order is this module's; of the paper's
    it is known that it permutes frames.
    """
    early, late = list(range(0, frames, 2)), list(range(1, frames, 2))
    ahead = codebooks + 1
    pairs = zip_longest(late, early[ahead:])
    order = [*early[:ahead], *(one for pair in pairs for one in pair if one is not None)]
    steps: list[list[Coordinate]] = [[] for _ in range(max(0, frames + codebooks - 1))]
    for turn, frame in enumerate(order):
        for book in range(codebooks):
            steps[turn + book].append((frame, book))
    return Pattern(frames, codebooks, tuple(tuple(step) for step in steps))
