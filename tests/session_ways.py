"""Ways through a session that tests take, and how near their logits come to others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import accel
from accel.runtime.backends.eager import EagerBackend
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.session.session import Session

Logits = np.ndarray[Any, Any]


def close(got: Any, want: Any, tolerance: float = 2e-4, relative: float = 1e-4) -> None:
    np.testing.assert_allclose(got, want, atol=tolerance, rtol=relative)


def near(got: Any, want: Any, bound: float = 2e-3) -> None:
    """Within a share of the largest value that is wanted."""
    assert np.abs(got - want).max() <= bound * max(1.0, np.abs(want).max())


def singles(session: Session, tokens: Logits) -> Logits:
    """Logits [B,T,V] of single tokens [B,T]."""
    return np.concatenate([session.run(tokens[:, [i]]) for i in range(tokens.shape[1])], axis=1)


def after(case: Any, count: int, more: int = 2) -> tuple[Logits, Session]:
    """Logits of a call of a few tokens after one of `count`, in a session of a case; and the session, closed."""
    tokens = case.tokens(1, count + more)
    with case.session() as session:
        session.run(tokens[:, :count])
        return session.run(tokens[:, count:]), session


def ways(
    session: Session,
    tokens: Logits,
    first: int = 40,
    single: int = 18,
    back: int = 12,
    into: int = 20,
    **marks: Any,
) -> list[Logits]:
    """Logits of prompts of two lengths, single tokens, several, also of rows of unequal numbers, after a rewind of
    `back`, of a fork, of rows in the other order, of a second prompt, after a rewind into the first one (to `into`
    tokens) or to nothing, and of a long call that is no prompt. The session has two rows, tokens [2,T] are taken in
    turn. `marks`: see Session.mark.
    """
    at = 0

    def take(count: int) -> Logits:
        nonlocal at
        at += count
        return tokens[:, np.arange(at - count, at) % tokens.shape[1]]

    with session:
        if marks:
            session.mark(**marks)
        found = [session.prompt(take(first), np.array([first, 13])), singles(session, take(single))]
        found += [session.run(take(7)), session.run(take(6), np.array([6, 2]))]
        session.rewind(session.lengths - back)
        found += [singles(session, take(2)), session.run(take(5)), singles(session, take(4))]
        with session.fork() as other:
            found += [other.run(take(1)), other.run(take(3))]
        session.select([1, 0])
        found += [singles(session, take(3)), session.prompt(take(20)), singles(session, take(4))]
        session.rewind(into * (session.lengths > session.lengths.min()))
        found += [session.prompt(take(20)), singles(session, take(3))]
        session.rewind(0)
        found += [session.run(take(first)), singles(session, take(3))]
    return found


def recut(session: Session, tokens: Logits) -> tuple[list[Logits], int]:
    """Logits of a call of at least 21 tokens, of its tokens from 5 on again: one, the next eight, of these four by a
    fork, six in rows of unequal numbers, one more; and the bytes that the session holds.
    """
    with session:
        found = [session.run(tokens)]
        session.rewind(5)
        found.append(session.run(tokens[:, 5:6]))
        with session.fork() as other:
            found += [session.run(tokens[:, 6:14]), other.run(tokens[:, 6:10])]
        found.append(session.run(tokens[:, 14:20], np.arange(len(tokens)) + 3))
        found.append(session.run(tokens[:, 20:21]))
        return found, session.stats["kv_bytes"]


def oracle(compiled: CompiledModel) -> CompiledModel:
    """The eager target's model of a build."""
    assert compiled.program is not None
    backend = EagerBackend(compiled.program)
    return CompiledModel(backend, compiled.facts, recipe=compiled.recipe, program=compiled.program)


def variants(
    compiled: CompiledModel, threads: int | None = 1
) -> Iterator[tuple[str, CompiledModel]]:
    """Each graph of a build's step, opened, with its name; closed before the next one."""
    assert compiled.artifact is not None
    for kernels in compiled.artifact.entries["step"].graphs:
        with accel.load(compiled.artifact.path, kernels=kernels, threads=threads) as loaded:
            yield kernels, loaded


def law_every_target(
    made: CompiledModel, far: Callable[[Logits], Any] = np.max, bound: float = 2e-3, **how: Any
) -> None:
    """Each build of a model for 2 rows gives the oracle's logits along `ways`. `far`: of the errors of tokens."""
    tokens = np.random.default_rng(3).integers(0, 50, (2, 64))
    want = ways(oracle(made).session(batch=2), tokens, **how)
    for kernels, loaded in variants(made):
        for a, b in zip(ways(loaded.session(batch=2), tokens, **how), want, strict=True):
            assert far(np.abs(a - b).max(-1)) < bound * max(1.0, np.abs(b).max()), kernels
