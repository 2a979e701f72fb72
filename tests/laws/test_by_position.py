"""A method that chooses tokens goes by what they hold, with its `small` options too, or it says that it goes by
position. Otherwise the other laws, and the matrices, would say nothing of it.
"""

import matrix
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from accel.ir.axis import find_axes
from accel.ir.ops.attention import attention
from accel.ir.tables import Tables
from accel.passes.kv.score import Base
from accel.passes.trained import Trained

from .. import kv_slots
from ..kv_slots import build, choose, sets, slots
from ..prefill_case import built

AXES = find_axes()
BUILT = [
    (a, use) for a in ("kv.select", "prefill.prune", "prefill.sparse") for use in AXES[a].names()
]
PROMPT, AFTER = 40, 4
RUNNER = matrix.Matrix()


# Scores


def shuffled(x, seed):
    """The slots with their contents in another order, at the same positions."""
    r, found = torch.Generator().manual_seed(seed), dict(x)
    for part in ("kept", "recent"):
        names = [n for n in x if not n.endswith("pos") and place(n) == part]
        order = torch.randperm(x[f"{part}_k"].shape[2], generator=r)
        found |= {n: x[n][:, :, order] for n in names}
    return found


def place(name):
    """Where something of slots lies: kept, recent; nothing: it is not of slots."""
    if name.startswith("recent_") or name.endswith(".recent"):
        return "recent"
    return "kept" if name.startswith("kept_") else ""


def law_of_scores(score):
    """Tokens in another order at the same positions: others are kept, if and only if content counts."""
    kept = kv_slots.AXES["budget"].small("uniform")["tokens_kept"]
    same = []
    for seed in range(4):
        x = slots(seed)
        same.append(sets(choose(x, kept, score)) == sets(choose(shuffled(x, seed), kept, score)))
    assert all(same) == score.by_position, same


@pytest.mark.parametrize("name", kv_slots.AXES["score"].names())
def test_scores_go_by_content_or_say_that_they_do_not(name):
    law_of_scores(build("score", name))


class Newest(Base):
    def __call__(self, keys, positions):
        return positions + 0 * keys.sum(-1)


class Declared(Base):
    by_position = True

    def __call__(self, keys):
        return keys.norm(dim=-1)


@pytest.mark.parametrize(
    "score",
    [build("score", "h2o", recent=64), build("score", "snapkv", window=64), Newest(), Declared()],
    ids=["h2o", "snapkv", "newest", "declared"],
)
def test_a_score_that_falls_back_to_position_is_caught(score):
    """All slots are protected; the newest are kept; a declaration is not true."""
    with pytest.raises(AssertionError):
        law_of_scores(score)


# What is built into a model


class Reads(TorchDispatchMode):
    """Notes which tokens run, as positions in the prompt, and which positions and pages attention reads."""

    def __init__(self, tokens):
        super().__init__()
        self.seen, self.place = [], np.argsort(tokens)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.embedding.default:
            ids = args[1].numpy()
            self.seen.append(self.place[ids] if ids.max() < self.place.size else ids)
        if func is attention.default:
            given = [a for a in (*args, *(kwargs or {}).values()) if isinstance(a, torch.Tensor)]
            self.seen += [a.numpy().copy() for a in given if not a.is_floating_point()]
        return func(*args, **(kwargs or {}))


def reads(model, tokens):
    with Reads(tokens) as found, model.session(1) as session:
        session.prompt(tokens[None, :PROMPT])
        for i in range(AFTER):
            session.run(tokens[None, PROMPT + i : PROMPT + i + 1])
    return found.seen


def law_of_reads(model, by_position):
    """The tokens of a prompt in another order: others are read, if and only if content counts."""
    rng, size = np.random.default_rng(0), matrix.VOCABULARY
    a, b = (reads(model, rng.permutation(size)) for _ in range(2))
    assert any(x.size > 1 for x in a)
    same = len(a) == len(b) and all(map(np.array_equal, a, b))
    assert same == by_position


def eager(axis, use):
    """A small Llama with a method, which the trials of invariants share; trained parts and tables are the matrix's."""
    kind = AXES[axis].method(use)
    if issubclass(kind, Trained | Tables):
        return RUNNER.eager(matrix.Case("llama", ((axis, use),)))
    return built("llama", tables={axis: {"use": use, **kind.small}})


@pytest.mark.few(1)
@pytest.mark.parametrize(("axis", "use"), BUILT)
def test_what_is_read_goes_by_content_or_says_that_it_does_not(axis, use):
    law_of_reads(eager(axis, use), AXES[axis].method(use).by_position)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("axis", "use", "options"),
    [
        ("kv.select", "quest", {"tokens_read": 1 << 10}),
        ("prefill.prune", "gemfilter", {"recent": 4}),
        ("prefill.prune", "promptdistill", {"tokens": 1}),
        ("prefill.sparse", "critiprefill", {"threshold": PROMPT}),
    ],
)
def test_a_method_whose_options_leave_it_no_choice_is_caught(axis, use, options, monkeypatch):
    """All is read; only protected tokens are; no segment is long enough."""
    kind = AXES[axis].method(use)
    monkeypatch.setattr(kind, "small", {**kind.small, **options})
    model = eager(axis, use)
    with pytest.raises(AssertionError):
        law_of_reads(model, False)
