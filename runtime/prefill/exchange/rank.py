"""What one rank does for a prompt: the same where ranks take turns in one process and where each has its own."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.ir.entries.attend import form_of
from accel.ir.entries.rank import between
from accel.ir.errors import AccelError
from accel.runtime.call import Arrays
from accel.runtime.inputs.ints import Ints
from accel.runtime.prefill.exchange.plan import (
    KEYS,
    QUERIES,
    Attend,
    Plan,
    Receive,
    Rows,
    Send,
)

Floats = npt.NDArray[np.float32]
Compute = Callable[[str, Arrays], Arrays]  # an entry by name, of inputs by name
Tag = tuple[int, str, tuple[int, ...], Rows]  # layer, kind, owners, rows
Post = Callable[[int, Tag, Arrays], None]  # to a rank; it returns before that one has it
CHUNK = 512  # most queries of one call, so that scores [.., T, S] stay bounded


@dataclass(frozen=True)
class Job:
    """A row of new tokens, shared. forms: of each layer, which `attend` entry. tokens: the rank's own [T]. cached: of
    each layer keys and values [1,G,P,D] of the cached tokens that the rank holds, by name.
    """

    plan: Plan
    forms: tuple[int, ...]
    tokens: Ints
    cached: tuple[Arrays, ...]


@dataclass
class Done:
    """keys: of each layer keys and values of the rank's new tokens [1,G,T,D], by name. logits [1,1,V]: of the last
    token, by its rank. sent: bytes, in all layers. calls: of graphs.
    """

    keys: list[Arrays]
    logits: Floats | None
    sent: int
    calls: int


def merged(a: Floats, a_lse: Floats, b: Floats, b_lse: Floats) -> tuple[Floats, Floats]:
    """Two results of attention over different keys [B,H,T,Dv], by their log-sum-exp [B,H,T] -> the result over all of
    these, and its log-sum-exp.
    """
    low = np.finfo(np.float32).min
    a_lse, b_lse = np.maximum(a_lse, low), np.maximum(b_lse, low)
    top = np.maximum(a_lse, b_lse)
    a_share, b_share = np.exp(a_lse - top), np.exp(b_lse - top)
    total = a_share + b_share
    out = a * (a_share / total)[..., None] + b * (b_share / total)[..., None]
    return out.astype(np.float32), (top + np.log(total)).astype(np.float32)


def work(
    rank: int, job: Job, compute: Compute, post: Post
) -> Generator[tuple[int, Tag], Arrays, Done]:
    """Run a rank's part of a prompt. It yields (source, tag) of what it waits for, and is sent the arrays."""
    plan, done = job.plan, Done([], None, 0, 0)
    positions = plan.queries[rank][None]
    tokens: Arrays = {
        "tokens": job.tokens[None],
        "positions": positions,
        "slots": np.zeros(1, np.int64),
    }
    tokens["rows"] = np.zeros((1, 1), np.int64)

    def call(entry: str, inputs: Arrays) -> Arrays:
        done.calls += 1
        return compute(entry, inputs)

    def send(to: int, tag: Tag, arrays: Arrays) -> None:
        done.sent += sum(a.nbytes for a in arrays.values())
        post(to, tag, arrays)

    given: Arrays = tokens
    for layer, form in enumerate(job.forms):
        made = call(between(layer), given)
        own: Arrays = {n: made[n] for n in ("k", "v") if n in made}
        done.keys.append(own)
        held = _Held(plan, rank, made["q"], _joined(own, job.cached[layer], plan.keys[rank].size))
        for step in plan.steps[rank]:
            if isinstance(step, Attend):
                held.attend(step, lambda x, form=form: call(form_of(form), x))  # type: ignore[misc]
                continue
            if step.kind != KEYS and step.rows[0] == step.rows[1]:
                continue
            tag = layer, step.kind, step.owners, step.rows
            if isinstance(step, Send):
                send(step.to, tag, held.packed(step))
            else:
                held.take(step, (yield step.source, tag))
        attended, lse = held.result()
        given = {**tokens, "attended": attended, "lse": lse}
        if "stream_out" in made:
            given["stream"] = made["stream_out"]
    if rank == plan.last:
        rows = np.full((1, 1), int(plan.queries[rank].argmax()))
        done.logits = call(between(len(job.forms)), {**given, "rows": rows})["logits"]
    return done


def _joined(fresh: Arrays, cached: Arrays, slots: int) -> Arrays:
    """Keys and values of new tokens, cached ones, and padding up to so many."""
    found = {}
    for name, array in fresh.items():
        parts = [array, *([cached[name]] if name in cached else [])]
        short = slots - sum(part.shape[2] for part in parts)
        if short:
            parts.append(np.zeros((*array.shape[:2], short, array.shape[3]), array.dtype))
        found[name] = np.concatenate(parts, axis=2) if len(parts) > 1 else array
    return found


class _Held:
    """What a rank has in a layer: keys by owner, queries by owner and from which row on, results so far."""

    def __init__(self, plan: Plan, rank: int, queries: Floats, keys: Arrays):
        self._plan, self._rank = plan, rank
        self._keys = {rank: keys}
        self._queries = {rank: (0, queries)}
        self._results: dict[int, tuple[int, Floats, Floats]] = {}

    def attend(self, step: Attend, compute: Callable[[Arrays], Arrays]) -> None:
        """See plan.Attend."""
        (start, stop), owner = step.rows, step.owner
        spans = [(o, slice(a, b)) for o, a, b in step.keys if a < b]
        if start == stop or not spans:
            return
        first, queries = self._queries[owner]
        parts = [{n: x[:, :, s] for n, x in self._keys[o].items()} for o, s in spans]
        keys = {n: np.concatenate([p[n] for p in parts], axis=2) for n in parts[0]}
        k_pos = np.concatenate([self._plan.keys[o][s] for o, s in spans])[None]
        outs, sums = [], []
        for at in range(start, stop, CHUNK):
            end = min(at + CHUNK, stop)
            q = queries[:, :, at - first : end - first]
            q_pos = self._plan.queries[owner][None, at:end]
            made = compute({"q": q, "q_pos": q_pos, "k_pos": k_pos, **keys})
            outs.append(made["out"])
            sums.append(made["lse"])
        self._merge(owner, start, np.concatenate(outs, 2), np.concatenate(sums, 2))

    def _merge(self, owner: int, start: int, out: Floats, lse: Floats) -> None:
        """Rows from `start` on into what there is of an owner's queries."""
        if owner not in self._results:
            self._results[owner] = start, out, lse
            return
        first, old, old_lse = self._results[owner]
        rows = slice(start - first, start - first + out.shape[2])
        old, old_lse = old.copy(), old_lse.copy()
        old[:, :, rows], old_lse[:, :, rows] = merged(
            old[:, :, rows], old_lse[:, :, rows], out, lse
        )
        self._results[owner] = first, old, old_lse

    def packed(self, step: Send) -> Arrays:
        """What is sent."""
        if step.kind == KEYS:
            return {f"{n}.{o}": a for o in step.owners for n, a in self._keys[o].items()}
        (owner,) = step.owners
        if step.kind == QUERIES:
            first, queries = self._queries[owner]
            return {"q": queries[:, :, step.rows[0] - first : step.rows[1] - first]}
        first, out, lse = self._results.pop(owner)
        rows = slice(step.rows[0] - first, step.rows[1] - first)
        return {"out": out[:, :, rows], "lse": lse[:, :, rows]}

    def take(self, step: Receive, arrays: Arrays) -> None:
        """What came."""
        if step.kind == KEYS:
            for owner in step.owners:
                self._keys[owner] = {
                    n.partition(".")[0]: a
                    for n, a in arrays.items()
                    if n.partition(".")[2] == str(owner)
                }
        elif step.kind == QUERIES:
            (owner,) = step.owners
            self._queries[owner] = step.rows[0], arrays["q"]
        else:
            self._merge(self._rank, step.rows[0], arrays["out"], arrays["lse"])

    def result(self) -> tuple[Floats, Floats]:
        """Attention of the rank's own queries [1,H,T,Dv], and its log-sum-exp [1,H,T]."""
        _, out, lse = self._results[self._rank]
        return out, lse


def in_turns(jobs: list[Job], compute: Compute) -> list[Done]:
    """All ranks in this process, each until it waits for another. Raises AccelError where all wait."""
    mail: dict[tuple[int, int, Tag], Arrays] = {}
    done: dict[int, Done] = {}

    def started(rank: int) -> Generator[tuple[int, Tag], Arrays, Done]:
        def post(to: int, tag: Tag, arrays: Arrays) -> None:
            mail[rank, to, tag] = arrays

        return work(rank, jobs[rank], compute, post)

    running = {rank: started(rank) for rank in range(len(jobs))}
    waits: dict[int, tuple[int, Tag] | None] = dict.fromkeys(running)
    while running:
        moved = False
        for rank in list(running):
            moved |= _resume(rank, running, waits, mail, done)
        if not moved:
            raise AccelError(f"prefill.ranks: ranks wait for each other: {_told(waits, running)}")
    return [done[rank] for rank in range(len(jobs))]


def _resume(
    rank: int,
    running: dict[int, Generator[tuple[int, Tag], Arrays, Done]],
    waits: dict[int, tuple[int, Tag] | None],
    mail: dict[tuple[int, int, Tag], Arrays],
    done: dict[int, Done],
) -> bool:
    """Let a rank go on as far as it can. Whether it could."""
    moved = False
    while True:
        wanted = waits[rank]
        if wanted is not None and (wanted[0], rank, wanted[1]) not in mail:
            return moved
        try:
            if wanted is None:
                waits[rank] = next(running[rank])
            else:
                waits[rank] = running[rank].send(mail.pop((wanted[0], rank, wanted[1])))
        except StopIteration as end:
            done[rank] = end.value
            del running[rank]
            return True
        moved = True


def _told(waits: Mapping[int, Any], running: Mapping[int, Any]) -> str:
    return ", ".join(f"{rank} for {waits[rank][0]}" for rank in running)


def jobs_of(
    plan: Plan, forms: tuple[int, ...], tokens: Ints, first: int, cached: list[Arrays]
) -> Iterator[Job]:
    """Of each rank. tokens [T]: the new ones, from position `first` on. cached: of each layer keys and values [1,G,P,D]
    of the tokens before.
    """
    for rank in range(plan.ranks):
        held = plan.cached(rank)
        yield Job(
            plan,
            forms,
            tokens[plan.queries[rank] - first],
            tuple({n: a[:, :, held] for n, a in layer.items()} for layer in cached)
            if held.size
            else tuple({} for _ in cached),
        )
