"""What callers give a session, checked before any work, and the graph calls that it takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from accel.ir.errors import InputError
from accel.ir.sizes import FEW
from accel.runtime.inputs.ints import Bools, Ints, as_ints, check_vocabulary


def call_tokens(
    tokens: Any, lengths: Any, before: Ints, vocab_size: int, max_context: int
) -> tuple[Ints, Ints | None]:
    """The tokens [B,T] of a call, padding read as 0, and how many of each row are real [B]; None
    where all are. `before` [B]: tokens of the rows so far. Raises InputError.
    """
    batch = len(before)
    ids = as_ints(tokens, "tokens")
    if ids.ndim != 2 or ids.shape[0] != batch or ids.shape[1] == 0:
        raise InputError(
            f"tokens have shape {list(ids.shape)}; this session takes [{batch}, T] with T >= 1"
        )
    counts = None if lengths is None else _counts(lengths, batch, ids.shape[1])
    if counts is not None:
        ids = np.where(np.arange(ids.shape[1]) < counts[:, None], ids, 0)
    check_vocabulary(ids, vocab_size, "tokens")
    after = before + (ids.shape[1] if counts is None else counts)
    if int(after.max()) > max_context:
        row = int(after.argmax())
        raise InputError(
            f"row {row} would hold {after[row]} tokens; max_context is {max_context}. "
            "Give fewer tokens, rewind, or build with more: max_context=…"
        )
    return ids, counts


def _counts(lengths: Any, batch: int, width: int) -> Ints | None:
    """How many tokens of each row are real [B]; None where all are."""
    counts = as_ints(lengths, "lengths")
    if counts.shape != (batch,):
        raise InputError(f"lengths have shape {list(counts.shape)}; give one per row, [{batch}]")
    if (bad := (counts < 0) | (counts > width)).any():
        row = int(bad.argmax())
        raise InputError(
            f"lengths[{row}] is {counts[row]}; a call of {width} tokens takes 0..{width}"
        )
    return None if int(counts.min()) == width else counts


def rewind_target(length: Any, before: Ints) -> Ints:
    """How many tokens rows of `before` [B] go back to: an int, or one per row. Raises InputError."""
    wanted = as_ints(length, "length")
    if wanted.shape not in ((), before.shape):
        raise InputError(
            f"length has shape {list(wanted.shape)}; give an int or {len(before)} of them"
        )
    wanted = np.broadcast_to(wanted, before.shape).copy()
    if (bad := (wanted < 0) | (wanted > before)).any():
        row = int(bad.argmax())
        raise InputError(
            f"cannot rewind row {row} to {wanted[row]}: it holds {before[row]} tokens; "
            f"give 0..{before[row]}"
        )
    return wanted


def tree_of(tree: Any, shape: tuple[int, ...], ahead: bool = False) -> Bools:
    """What each token of a call [B,T] sees of it, bool [B,T,T]; `ahead`: it may see tokens behind it, too. Raises
    InputError.
    """
    seen = np.asarray(tree)
    if seen.dtype != np.bool_ or seen.shape != (*shape, shape[1]):
        raise InputError(
            f"tree is {seen.dtype} {list(seen.shape)}; give bools {[*shape, shape[1]]}, for each token the tokens "
            "of the call that it sees (Tree.mask)"
        )
    if not np.einsum("btt->bt", seen).all():
        raise InputError("tree: a token sees itself; let the diagonal be true (Tree.mask)")
    if not ahead and np.triu(seen, 1).any():
        raise InputError(
            "tree: a token sees tokens before it; give ancestors first (Tree.mask), or for a block whose tokens "
            "see those behind them the positions, too"
        )
    return seen


def positions_of(positions: Any, before: Ints, real: Bools, seen: Bools) -> Ints:
    """The positions of the tokens of a tree [B,T], which rows of `before` [B] tokens get; -1 where they are not `real`
    [B,T]. None: as deep as each is. Raises InputError.
    """
    if positions is None:
        return np.where(real, before[:, None] + seen.sum(2) - 1, -1)
    found = as_ints(positions, "positions")
    if found.shape != real.shape:
        raise InputError(
            f"positions have shape {list(found.shape)}; give {list(real.shape)}, one for each token"
        )
    first, past = before[:, None], (before + real.sum(1))[:, None]
    if (bad := real & ((found < first) | (found >= past))).any():
        row, column = (int(part[0]) for part in bad.nonzero())
        raise InputError(
            f"positions[{row}][{column}] is {found[row, column]}, but the row holds {before[row]} tokens and the call "
            f"has {real[row].sum()} of it; give {before[row]}..{past[row, 0] - 1}"
        )
    return np.where(real, found, -1)


def columns_of(columns: Any, shape: tuple[int, ...]) -> Ints:
    """Of which columns of a call [B,T] logits are given, [B,N]; None: of all. Raises InputError."""
    if columns is None:
        return np.broadcast_to(np.arange(shape[1]), shape)
    found = as_ints(columns, "columns")
    if found.ndim != 2 or len(found) != shape[0] or not 0 < found.shape[1] <= shape[1]:
        raise InputError(
            f"columns have shape {list(found.shape)}; give [{shape[0]}, N] with N of 1..{shape[1]}: for each row "
            "the columns whose logits are wanted"
        )
    if found.min() < 0 or found.max() >= shape[1]:
        raise InputError(
            f"columns {found.min()} to {found.max()} were requested; the call has 0..{shape[1] - 1}"
        )
    return found


def path_of(path: Any, tree: Bools, depths: Ints, row: int, count: int) -> Ints:
    """Columns [n] of a call that a row keeps, of `count` real ones: a path from the root on. `depths` [B,T]: positions
    of the tokens, from the first on. Raises InputError.
    """
    columns = as_ints(path, f"paths[{row}]") if np.size(path) else np.zeros(0, np.int64)
    if columns.ndim != 1 or (columns.size and not 0 <= columns.min() <= columns.max() < count):
        raise InputError(
            f"paths[{row}] is {columns.tolist()}; give columns of the call, 0..{count - 1}, or none"
        )
    for i, column in enumerate(columns):
        seen = np.flatnonzero(tree[row, column])
        if (behind := seen[seen > column]).size:
            raise InputError(
                f"paths[{row}]: token {column} saw {behind.tolist()} behind it, and what a row keeps saw tokens before "
                "it alone; keep none of the block, and run its tokens"
            )
        if seen.tolist() == columns[: i + 1].tolist() and depths[row, column] != i:
            raise InputError(
                f"paths[{row}]: token {column} has the position of token {depths[row, column]} after those of the row, "
                f"but comes as token {i}; keep tokens at the positions that follow"
            )
        if seen.tolist() != columns[: i + 1].tolist():
            raise InputError(
                f"paths[{row}]: token {column} of the tree comes after {seen[:-1].tolist()}, not after "
                f"{columns[:i].tolist()}; give a whole path from the root on"
            )
    return columns


def parts_of(tokens: int, most: int) -> Iterator[tuple[int, int]]:
    """The columns of the graph calls of a call of so many tokens: at most `most` of them, and more than FEW in the
    last, since calls of FEW may read less than the whole cache, and one of a single token counts as a generated one.
    """
    start = 0
    while start < tokens:
        end = min(start + most, tokens)
        if 0 < tokens - end <= FEW < most - FEW:
            end = tokens - FEW - 1
        yield start, end
        start = end


def row_parts(counts: Ints, most: int, stops: Ints | None = None) -> Iterator[tuple[Ints, Ints]]:
    """The columns of rows of `counts` [B] tokens, from [B] and to [B], in each graph call: of each row those that it
    takes alone, so that its tokens lie in the same calls in any batch. A row has none behind its last. `stops` [B]: the
    column where a call ends in any case; 0: none.
    """
    if int(counts.max()) <= most:
        each = [[(0, int(n))] for n in counts]
    else:
        each = [list(parts_of(int(n), most)) for n in counts]
    ends = np.zeros_like(counts) if stops is None else stops
    for row in np.flatnonzero(ends).tolist():
        stop, count = int(ends[row]), int(counts[row])
        rest = [(stop + start, stop + end) for start, end in parts_of(count - stop, most)]
        each[row] = [*parts_of(stop, most), *rest]
    for i in range(max(map(len, each)) if counts.any() else 0):
        spans = [
            parts[i] if i < len(parts) else (n, n)
            for parts, n in zip(each, counts.tolist(), strict=True)
        ]
        start, end = np.array(spans, np.int64).T
        yield start, end
