"""dllm-lowconf: the ends of its options, and one slot after the other."""

import numpy as np
import torch

from accel.runtime.loop._canvas import Canvas

from ...diffusion_case import BLOCK, MASK, NEW, Case, decoded, eager, prompts, surest


def in_steps(steps):
    """All masks of a block in so many steps, the first of them one more where they do not go in evenly."""

    def stays(seen):
        masks = len(seen.slots)
        count = masks // min(steps, masks) + (seen.step < masks % min(steps, masks))
        return np.argsort(-seen.sure, kind="stable")[: min(count, int(seen.free.sum()))]

    return stays


CASES = [Case({}, surest(1)), Case({"steps": 4}, in_steps(4)), Case({"steps": 3}, in_steps(3))]


def test_ends_of_its_options():
    module, compiled = eager(False)
    static = decoded(compiled, "dllm-lowconf", prompts(), block=BLOCK)
    assert static[1] == [NEW, NEW]
    assert decoded(compiled, "dllm-lowconf", prompts(), block=BLOCK, steps=99) == static
    one, calls, _ = decoded(compiled, "dllm-lowconf", prompts(), block=NEW, steps=1)
    x = torch.tensor([[*prompts()[0], *[MASK] * NEW]])
    scores = module(x)[0, -NEW:]
    scores[:, MASK] = -torch.inf
    assert calls == [1, 1] and one[0] == scores.argmax(-1).tolist() != static[0][0]


def test_blocks_of_one_are_filled_from_left_to_right(monkeypatch):
    _, compiled = eager(False)
    filled = []
    own = Canvas.commit
    monkeypatch.setattr(
        Canvas, "commit", lambda *a: filled.extend(a[2].slots[a[3]].tolist()) or own(*a)
    )
    decoded(compiled, "dllm-lowconf", prompts()[:1], block=1)
    assert filled[:NEW] == list(range(5, 5 + NEW))
    filled.clear()
    decoded(compiled, "dllm-lowconf", prompts()[:1], block=NEW)
    assert filled[:NEW] != list(range(5, 5 + NEW)), "the control"
