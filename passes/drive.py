"""Run a program as a session drives it: in one call and in several, over caches that are compressed between them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from accel.ir.capture.examples import adapter_example, side_inputs
from accel.ir.entries.compress import (
    COMPRESS,
    held_of,
    keep_of,
    queries_of,
    query_positions_of,
    ranks_of,
    room_of,
)
from accel.ir.entries.genai import GENAI, past_of, present_of
from accel.ir.program import Program
from accel.ir.sizes import each, grows
from accel.ir.state import POSITIONS, CacheRegion, Part, name_of, output_of, state_of

PROMPT = 32  # tokens that stand for a prompt, where each one after them has a call of its own


def _flush(program: Program) -> int:
    """Tokens of a block that a codec encodes together; 0: there is none."""
    return program.facts.kv.flush if program.facts.kv is not None else 0


def in_blocks(program: Program) -> bool:
    """Whether tokens are encoded in blocks only once they are kept."""
    sizes = [s.shape[2] for s in program.state if s.written_between_steps and len(s.shape) > 2]
    return _flush(program) > 0 or any(isinstance(n, str) and each(n) > 1 for n in sizes)


def run_whole(program: Program, tokens: Tensor) -> Tensor:
    """Logits [B,T,V] of one whole call."""
    return next(_both_ways(program, tokens))[0]


def run_both_ways(program: Program, tokens: Tensor) -> list[tuple[Tensor, slice]]:
    """(logits, rows they belong to) of one whole call, and of the same tokens in several calls: of a cache
    that is compressed, after the first one, so that two calls see the kept part and add to a recent one,
    and then again, so that the last call sees what came of both. Where tokens see later ones: of one whole call,
    and of some of its tokens written again.
    """
    return list(_both_ways(program, tokens))


def _both_ways(program: Program, tokens: Tensor) -> Iterator[tuple[Tensor, slice]]:
    """The same, one after the other."""
    length = tokens.shape[1]
    positions = torch.arange(length).repeat(tokens.shape[0], 1)
    side = side_inputs(program, tokens.shape[0])
    if "slots" not in program.step.inputs:
        given = {"tokens": tokens, "positions": positions, **side}
        out = program.run("step", given)
        yield out["logits"].float(), slice(0, length)
        return
    if program.facts.both_ways:
        yield from run_again(program, tokens, side)
        return
    letters = {"B": tokens.shape[0], "C": max(length + 3, _flush(program))}
    compresses = COMPRESS.name in program.entries
    for cuts in ([0, length], _split(length, 4 if compresses else 3)):
        buffers = {s.name: s.allocate(**letters) for s in program.state if not s.cross}
        base = 0
        for i, (start, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
            yield _call(program, side, buffers, tokens, start, end, base), slice(start, end)
            if (
                compresses and i in (0, 2) and end < length
            ):  # all tokens stay: nothing is lost but by codes
                (store_all if _flush(program) else keep_all)(program, buffers, end)
                base = end


def exits(program: Program) -> bool:
    """Whether each token of decoding goes as deep as it must, so that it needs a call of its own."""
    return program.facts.depth is not None and program.facts.depth.threshold is not None


def calls_of(program: Program, length: int) -> list[int]:
    """Where `length` tokens of text are cut for `decoded`: not at all; after the part that stands for a prompt, where
    decoding leaves out layers; or wherever a cache encodes what it keeps.
    """
    depth, half = program.facts.depth, max(1, length // 2)
    if exits(program):
        return [0, *range(min(half, PROMPT), length + 1)]
    if COMPRESS.name in program.entries:
        size = min(half, _flush(program) or half)
        return sorted({*range(0, length, size), length})
    return [0, length] if depth is None or depth.all_run else [0, half, length]


def decoded(
    program: Program, tokens: Tensor, calls: Sequence[int], side: Mapping[str, Tensor]
) -> Tensor:
    """Logits [B,T,V] of a text in calls that end where `calls` say, the first one as the prompt: between two of them
    a cache encodes what it keeps, of which no token is evicted, and after the first the layers run that decoding runs.
    """
    depth, found, base = program.facts.depth, [], 0
    longest = max(b - a for a, b in itertools.pairwise(calls))
    packs = COMPRESS.name in program.entries
    slots = longest if packs else calls[-1]
    letters = {"B": tokens.shape[0], "C": max(slots, _flush(program))}
    buffers = {s.name: s.allocate(**letters) for s in program.state if not s.cross}
    for start, end in itertools.pairwise(calls):
        given = dict(side)
        if depth is not None and start:
            given |= {n: torch.tensor(p) for n, p in depth.plans.items()}
            if depth.threshold is not None:
                given["threshold"] = torch.tensor(depth.threshold)
        found.append(_call(program, given, buffers, tokens, start, end, base, pad=0))
        if packs and end < calls[-1]:
            (store_all if _flush(program) else keep_all)(program, buffers, end)
            base = end
    return found[0] if len(found) == 1 else torch.cat(found, dim=1)


def run_again(
    program: Program, tokens: Tensor, side: dict[str, Tensor]
) -> Iterator[tuple[Tensor, slice]]:
    """(logits, rows) of one whole call, of tokens in its midst written once more, and of its last ones, padded."""
    length = tokens.shape[1]
    letters = {"B": tokens.shape[0], "C": length + 3}
    buffers = {s.name: s.allocate(**letters) for s in program.state if not s.cross}
    yield _call(program, side, buffers, tokens, 0, length), slice(0, length)
    third = length // 3
    for start, end, pad in ((third, length - third, 0), (length - third, length, 1)):
        if 0 < start < end:
            yield _call(program, side, buffers, tokens, start, end, pad=pad), slice(start, end)


def store_all(program: Program, buffers: dict[str, Tensor], seen: int) -> None:
    """Run the entry `compress` so that all recent tokens go into one block more, whole or not."""
    batch, slots = buffers[POSITIONS].shape
    room = buffers[name_of(Part.POSITIONS, region=CacheRegion.KEPT)].shape[2]
    given = {
        "fresh": torch.arange(_flush(program)).unsqueeze(0),
        "places": torch.arange(room + 1).repeat(batch, 1),
        "tail": torch.zeros(batch, 0, dtype=torch.int64),
    }
    _compressed(program, buffers, given, batch, slots)


def keep_all(program: Program, buffers: dict[str, Tensor], seen: int) -> None:
    """Run the entry `compress` so that every token of rows that have `seen` so many stays."""
    batch, slots = buffers[POSITIONS].shape
    given: dict[str, Tensor] = {"seen": torch.full((batch,), seen)}
    given |= {"prompt": given["seen"], "question": torch.full((batch,), -1)}
    given["units"] = torch.full((batch, seen), -1)  # nothing is marked
    entry = program.entries[COMPRESS.name]
    for state in program.state:
        if not state.kept_positions or state.layer is None:
            continue
        given[keep_of(state.layer)] = torch.full((batch,), seen)
        held = buffers[state.name].shape[2]
        if (counts := buffers.get(name_of(Part.COUNTS, state.layer, CacheRegion.KEPT))) is not None:
            held = int(counts.max())
            given[held_of(state.layer)] = torch.arange(held)
            given[room_of(state.layer)] = torch.arange((slots + held) * counts.shape[1])
        given[ranks_of(state.layer)] = torch.arange(slots + held)
        if (asked := queries_of(state.layer)) in entry.inputs:  # none: scores do not matter here
            tail = entry.input(asked).meta["val"].shape[2:]
            given[asked] = torch.zeros(batch, 1, *tail)
            stages = map(query_positions_of, range(len(program.state)))
            given |= {n: torch.full((batch, 1), -1) for n in stages if n in entry.inputs}
    _compressed(program, buffers, given, batch, slots)


def _compressed(
    program: Program, buffers: dict[str, Tensor], inputs: dict[str, Tensor], batch: int, slots: int
) -> None:
    """Buffers after a run of the entry `compress`, the recent ones empty."""
    out = program.run(COMPRESS.name, {**inputs, **buffers})
    for name, value in out.items():
        buffers[state_of(name)] = value
    for state in program.state:
        if grows(state.shape):
            buffers[state.name] = state.allocate(B=batch, C=slots)


def run_in_blocks(program: Program, tokens: Tensor) -> tuple[Tensor, Tensor] | None:
    """Logits of a few tokens behind a block of them that lies in the pool, and those where it lies in the
    rows' own slots; none where the program reads no pool.
    """
    pools = [s for s in program.state if s.pooled]
    size = int(pools[0].shape[2]) if pools else 0
    batch, end = tokens.shape[0], size + 3
    if not pools or end > program.facts.max_context:
        return None
    tokens = tokens.repeat(1, -(-end // tokens.shape[1]))[:, :end]
    letters = {"B": batch, "C": end + 3}
    buffers = {s.name: s.allocate(**letters) for s in program.state}
    _call(program, {}, buffers, tokens, 0, size)
    behind = {name: value.clone() for name, value in buffers.items()}
    want = _call(program, {}, buffers, tokens, size, end)
    buffers = behind  # recurrent state is behind the block, too
    for state in program.state:
        if state in pools:
            buffers[state.name] = buffers[replace(state, region=CacheRegion.RECENT).name][
                :, :, :size
            ].clone()
    buffers[name_of(Part.TABLE)] = torch.arange(batch)[:, None]
    buffers |= {s.name: s.allocate(**letters) for s in program.state if grows(s.shape)}
    return _call(program, {}, buffers, tokens, size, end, base=size), want


def run_concatenated(program: Program, tokens: Tensor) -> list[tuple[Tensor, slice]]:
    """(logits, rows) of the genai entry, in two calls: keys and values of the first are the past."""
    if GENAI.name not in program.entries:
        return []
    found = []
    batch, length = tokens.shape
    held = [s for s in program.state if s.layer is not None]
    past = {past_of(s): s.allocate(B=batch) for s in held}
    for start, end in ((0, length // 2), (length // 2, length)):
        if start == end:
            continue
        inputs = {
            "input_ids": tokens[:, start:end],
            "position_ids": torch.arange(start, end).repeat(batch, 1),
            "attention_mask": torch.ones(batch, end, dtype=torch.int64),
            **past,
            **adapter_example(program, batch),
        }
        out = program.run(GENAI.name, inputs)
        past = {past_of(s): out[present_of(s)] for s in held}
        found.append((out["logits"].float(), slice(start, end)))
    return found


def _split(length: int, calls: int) -> list[int]:
    """Where a prompt is cut: in halves with a single token between them; the second in two, of four calls."""
    cuts = {0, length // 2, length // 2 + 1 if length > 1 else 0, length}
    return sorted(cuts | {(length // 2 + 1 + length) // 2} if calls == 4 else cuts)


def _call(
    program: Program,
    side: dict[str, Tensor],
    buffers: dict[str, Tensor],
    tokens: Tensor,
    start: int,
    end: int,
    base: int = 0,
    pad: int | None = None,
) -> Tensor:
    """Run tokens start..end-1, with `pad` columns of padding (one, but in the first call); those before `base`
    lie in no slot of the buffers that the step writes.
    """
    batch = tokens.shape[0]
    pad = int(start > 0) if pad is None else pad
    positions = torch.arange(start, end).repeat(batch, 1)
    inputs = {
        "tokens": torch.nn.functional.pad(tokens[:, start:end], (0, pad)),
        "positions": torch.nn.functional.pad(positions, (0, pad), value=-1),
        "slots": torch.full((batch,), start - base),
        "rows": torch.arange(end - start).repeat(batch, 1),
        **side,
        **buffers,
    }
    out = program.run("step", inputs)
    for name in buffers:
        buffers[name] = out.get(output_of(name), buffers[name])
    logits = out["logits"]
    assert isinstance(logits, Tensor)
    return logits[:, : end - start].float()
