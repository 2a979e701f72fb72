"""A step that takes a tree of guesses, out of one that takes a row of tokens; and such trees."""

from dataclasses import dataclass

import numpy as np
import torch

from accel.ir.ops.attention import attention
from accel.ir.program import Editor, Program
from accel.passes import Pass, Report, run
from accel.runtime.optimize import pipeline

PARENTS = [-1, 0, 0, 1, 1, 2, 3]  # of the tokens of a tree; the first hangs on what is cached


@dataclass(frozen=True)
class Tree(Pass):
    """An input `tree` [B,T,T], which each attention over the cache reads."""

    flat = True

    def run(self, program: Program) -> Report:
        editor, step = Editor(program, program.step.graph), program.step
        batch, width = step.input("tokens").meta["val"].shape
        tree = editor.placeholder("tree", (batch, width, width), torch.bool)
        for node in program.nodes(attention.default):
            node.kwargs = {**node.kwargs, "tree": tree, "first": step.input("slots")}
        return Report(1)


def with_tree(program: Program) -> Program:
    """The passes of every model, and a tree."""
    run(program, pipeline(own=[Tree()]))
    return program


def ancestors(parents: list[int] = PARENTS) -> np.ndarray:
    """What each token of a tree may see of it, bool [T,T]."""
    seen = np.eye(len(parents), dtype=bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            seen[i] |= seen[parent]
    return seen


def paths(parents: list[int] = PARENTS) -> list[list[int]]:
    """The tokens from the root to each token."""
    return [np.flatnonzero(row).tolist() for row in ancestors(parents)]


def prompt_then_tree(step, state, tokens: np.ndarray, prompt: int, tree: np.ndarray) -> np.ndarray:
    """Logits [B,T,V] of a tree after a prompt; tokens [B,prompt+T].

    step(inputs with state) -> outputs, by name, as torch tensors; state: name -> buffer.
    """
    depths = tree.sum(1) - 1
    batch, width = len(tokens), len(tree)
    calls = [
        (tokens[:, :prompt], np.arange(prompt), 0, np.tri(prompt, dtype=bool)),
        (tokens[:, prompt:], prompt + depths, prompt, tree),
    ]
    logits = None
    for ids, positions, slot, seen in calls:
        rows = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        inputs = {
            "tokens": ids, "positions": np.broadcast_to(positions, ids.shape), "rows": rows,
            "slots": np.full(batch, slot), "tree": np.broadcast_to(seen, (batch, *seen.shape)),
        }  # fmt: skip
        out = step({n: torch.from_numpy(np.array(a)) for n, a in inputs.items()} | state)
        state = {n: out[f"{n}.next"] for n in state}
        logits = out["logits"].numpy()
    assert logits is not None and logits.shape[1] == width
    return logits
