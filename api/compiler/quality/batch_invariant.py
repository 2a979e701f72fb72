"""Does a token have the same bits whatever shares its call? Tried on the artifact itself, in every variant."""

from __future__ import annotations

import numpy as np

from accel.ir.errors import Miscompiled
from accel.runtime.artifact.artifact import Artifact
from accel.runtime.call import Logits
from accel.runtime.model.load import from_artifact
from accel.runtime.session.session import Session
from accel.runtime.tree import Tree


def check_rows(artifact: Artifact) -> None:
    """Calls of several tokens against calls of one, trees of guesses against their paths, and a batch against its
    first row alone. Raises Miscompiled where a bit differs.
    """
    for variant in artifact.entries["step"].graphs:
        with from_artifact(artifact, kernels=variant) as model, model.session() as session:
            rows = min(3, artifact.facts.max_batch)
            if rows > 1:
                with model.session(batch=rows) as batch:
                    if off := batch_difference(session, batch):
                        raise _broken(f"a batch of {rows} rows differs from one row", off, variant)
            for held, width in ((0, 9), (3, 2), (5, 4)):
                if held + width > session.max_context:
                    continue
                kinds = [("call", difference)] + (
                    [("tree", tree_difference)] if session.capabilities.trees else []
                )
                for kind, differs in kinds:
                    if off := differs(session, held, width):
                        said = f"a {kind} of {width} tokens differs from single-token calls"
                        raise _broken(said, off, variant)


def _broken(said: str, off: float, variant: str) -> Miscompiled:
    return Miscompiled(
        f"batch-invariant: {said} by {off:.1e} (kernels {variant!r}); build without the recipe, "
        "and report the model's configuration"
    )


def batch_difference(single: Session, batch: Session, width: int = 5, seed: int = 0) -> float:
    """How far the first row of a batch is from the same row alone: a call of `width` tokens, then one of a single
    token. Both sessions are rewound to their beginning before.
    """
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, batch.vocab_size, (batch.batch, min(width + 1, batch.max_context)))
    found = []
    for session in (single, batch):
        session.rewind(0)
        given = tokens[: session.batch]
        found.append([session.run(given[:, :-1])[:1], session.run(given[:, -1:])[:1]])
    alone, together = (np.concatenate(f, axis=1) for f in found)
    return _apart(together, alone)


def difference(session: Session, context: int, width: int, seed: int = 0) -> float:
    """How far the rows of one call of `width` tokens, after `context` others, are from those of single
    calls; 0 only where every bit is the same. The session is rewound to its beginning before.
    """
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, session.vocab_size, (session.batch, context + width))
    session.rewind(0)
    if context:
        session.run(tokens[:, :context])
    together = session.run(tokens[:, context:])
    session.rewind(context)
    alone = [session.run(tokens[:, [i]]) for i in range(context, context + width)]
    return _apart(together, np.concatenate(alone, axis=1))


def tree_difference(session: Session, context: int, width: int, seed: int = 0) -> float:
    """The same of a tree of `width` tokens in which each third one begins another branch, and of its paths in single
    calls; and of the token after the longest one that is kept.
    """
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, session.vocab_size, (session.batch, context + width))
    parents = [max(0, i - 1 - i % 3) if i % 3 == 2 else i - 1 for i in range(1, width)]
    tree = Tree(np.arange(1, width), np.array(parents, np.int64) - 1)
    session.rewind(0)
    if context:
        session.run(tokens[:, :context])
    seen = np.repeat(tree.mask[None], session.batch, axis=0)
    together = session.guess(tokens[:, context:], seen)
    paths = [np.flatnonzero(row) for row in tree.mask]
    last = max(paths, key=len)
    session.keep([last] * session.batch)
    follows = (
        [session.run(tokens[:, :1])] if int(session.lengths.max()) < session.max_context else []
    )
    alone = []
    for path in paths:
        session.rewind(context)
        alone.append([session.run(tokens[:, [context + i]]) for i in path][-1])
    session.rewind(context)
    for i in last:
        session.run(tokens[:, [context + i]])
    alone += [session.run(tokens[:, :1])] if follows else []
    return _apart(np.concatenate([together, *follows], axis=1), np.concatenate(alone, axis=1))


def _apart(together: Logits, single: Logits) -> float:
    if np.array_equal(together.view(np.int32), single.view(np.int32)):
        return 0.0
    return max(float(np.abs(together - single).max()), float(np.finfo(np.float32).tiny))
