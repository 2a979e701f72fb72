"""What a session asks of a target: an `Backend` for each model, a `BackendSession` for each session."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from accel.ir.entries.embed import EMBEDDED, EMBEDS
from accel.ir.sizes import FEW
from accel.ir.state import Part, StateValue
from accel.runtime.backends.tuning import Tuning
from accel.runtime.call import Arrays, Embeds, Outputs
from accel.runtime.inputs.ints import Bools, Ints


class Compression(Protocol):
    """What says which tokens stay (`session/state/eviction.py`)."""

    def compress_inputs(
        self, lengths: Ints, recent: Mapping[int, int], kept_slots: Mapping[int, int]
    ) -> Arrays:
        """Inputs of the compress entry beside the state, which has so many slots of each layer, of a head at most."""


class BackendSession(Protocol):
    """What a target supplies for one session: the step entry with its state buffers, for B rows."""

    @property
    def tile(self) -> int:
        """A step has a multiple of so many tokens, and of logits: padding is added (`whole_tiles`)."""

    def resize(self, capacity: int, *later: int) -> None:
        """Give every state buffer `capacity` slots, keeping what it holds; never fewer. `later`: those of
        layers that see a prompt pruned, or a window (C1, …).
        """

    def step(
        self,
        tokens: Ints,
        positions: Ints,
        slots: Ints,
        rows: Ints,
        want: Collection[str] = (),
        tree: Bools | None = None,
        embeds: Embeds | None = None,
    ) -> Outputs:
        """One graph call: tokens, positions [B,T], slots [B], rows [B,N] -> logits [B,N,V], and the outputs `want`
        (of `extra`), all of them the caller's own. `tree` [B,T,W]: which of the slots from `slots` on each token sees;
        None: all before it. `embeds`: what stands for some tokens (`passes.state.embeds`).
        """

    @property
    def entries(self) -> Collection[str]:
        """The names of the graphs."""

    @property
    def extra(self) -> Collection[str]:
        """The names of what a step can give beside logits and state, [B,T,…]."""

    def part(self, entry: str, inputs: Arrays) -> Arrays:
        """One call of another entry over the state: its inputs by name -> what it gives beside the state."""

    def control(self, values: Mapping[str, npt.NDArray[Any]]) -> None:
        """What every later step is told beside its tokens (`layer_inputs`): these inputs, of all."""

    def adapt(self, arrays: Mapping[str, npt.NDArray[Any]], rows: npt.NDArray[Any]) -> None:
        """What every later call reads as inputs of adapters (`ir.adapters`): a and b by name, and `rows` [B,1,R]."""

    def encode(self, inputs: Mapping[str, npt.NDArray[Any]]) -> None:
        """One call of the encode entry; every later step reads the cross state that it gives."""

    def compress(self, eviction: Compression, seen: Ints) -> None:
        """One call of the compress entry, for rows of `seen` [B] tokens: the kept part of the state is
        what it gives; the recent part too, or it is gone until `resize`.
        """

    def drop(self, first: Ints) -> None:
        """In the slots of layers with a window (`ir.window`): let slot i of each row b hold what slot first[b] + i
        does, in place; those behind are empty.
        """

    def rearrange(self, rows: Ints, to: Ints, source: Ints) -> None:
        """Let slot to[i] of row rows[i] hold what its slot source[i] does, in place; no slot is in both."""

    def forget(self, rows: npt.NDArray[np.bool_]) -> None:
        """Empty the kept part of the state of these rows (a bool mask [B]), and the slots of layers that
        see a prompt pruned.
        """

    def buffers(self) -> dict[str, npt.NDArray[Any]]:
        """The state by name, to be read until the next call; empty before the first."""

    def put(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Other buffers for some of the state: shared where the step only reads them. `resize` comes next."""

    def copy(self, rows: Ints | None = None) -> BackendSession:
        """An independent backend session with a copy of the state: of all rows, or of these [n]."""

    def move(self, rows: Ints, slots: tuple[int, int] | None) -> None:
        """Let each row i hold what row rows[i] does, [B]; they differ in these slots alone (None: anywhere)."""

    def join(self, other: Any) -> None:
        """The rows of another session of the model, which has as many slots, follow these; it is left closed. `resize`
        comes next.
        """

    def leave(self, rows: Ints) -> None:
        """Row i goes on as what row rows[i] was, for fewer rows [n] than there are. What stays in its place is not
        copied. `resize` comes next.
        """

    @property
    def alike(self) -> int | None:
        """Most tokens of a call that read what they would read alone (`alike`); None: any number."""

    @property
    def trees(self) -> bool:
        """Whether a step takes a tree, and an entry `commit` keeps a path of it (`passes.state.trees`)."""

    @property
    def flat(self) -> bool:
        """Whether there is an entry `flat`, which takes calls without padding (`passes.batch`)."""

    @property
    def recurrent(self) -> bool:
        """Whether part of the state only goes forward: rewinding it takes the two below."""

    def snapshot(self) -> Any:
        """A copy of the recurrent state, which later steps leave alone."""

    def restore(self, snapshot: Any, rows: Any) -> None:
        """Put `rows` (a bool mask [B]) back to a snapshot, or to the empty state (None)."""

    @property
    def kv_bytes(self) -> int:
        """Bytes that the state buffers hold now."""

    @property
    def kv_mapped(self) -> int:
        """How many of them lie in mapped files."""

    def spread(self, threads: int) -> None:
        """Compute the steps from here on with so many threads, where the target has threads of its own."""

    def close(self) -> None:
        """Free the buffers."""


class Backend(Protocol):
    """What a target supplies for one model: sessions, each of `batch` rows."""

    @property
    def state(self) -> Sequence[StateValue]:
        """The layout of the state."""

    @property
    def entries(self) -> Collection[str]:
        """The names of the graphs."""

    @property
    def tuning(self) -> Tuning | None:
        """The variant of the step that is used, and why; None where there is one. Measured when first asked for."""

    @property
    def threads(self) -> int | None:
        """Compute threads of a call; None where they are not the target's own."""

    @property
    def cost_key(self) -> dict[str, Any] | None:
        """What the costs of a call depend on, by which they are remembered; None: they are measured anew."""

    def open_session(self, batch: int) -> BackendSession:
        """A backend session with an empty cache."""

    def pool(self, shape: Sequence[int], dtype: str) -> Any:
        """Memory that sessions share, of zeros: read and written by blocks as an array [Z,…] is, and `put` into a
        session as it is. Raises MemoryError.
        """

    def close(self) -> None:
        """Free the weights."""


def alike(state: Iterable[Any]) -> int | None:
    """Most tokens of a call that read what they would read alone, by the layout of the state; None: any."""
    return (
        FEW if any(value.part in (Part.PAGES, Part.UNITS, Part.CHOICE) for value in state) else None
    )


def call_inputs(
    tokens: Ints,
    positions: Ints,
    slots: Ints,
    rows: Ints,
    tree: Bools | None,
    embeds: Embeds | None,
) -> Arrays:
    """The step's inputs by name; one that is left out has a default in the graph."""
    found: Arrays = {"tokens": tokens, "positions": positions, "slots": slots, "rows": rows}
    if tree is not None:
        found["tree"] = tree
    if embeds is not None:
        found |= {EMBEDS: embeds.rows, EMBEDDED: embeds.mask}
    return found


def whole_tiles(
    tile: int,
    tokens: Ints,
    positions: Ints,
    rows: Ints,
    tree: Bools | None,
    embeds: Embeds | None,
) -> tuple[Ints, Ints, Ints, Bools | None, Embeds | None]:
    """A call's columns with padding after them, and its rows with the first again: whole tiles of both."""
    if short := -tokens.shape[1] % tile:
        tokens = np.pad(tokens, ((0, 0), (0, short)))
        positions = np.pad(positions, ((0, 0), (0, short)), constant_values=-1)
        tree = None if tree is None else np.pad(tree, ((0, 0), (0, short), (0, 0)))
        if embeds is not None:
            wide = np.pad(embeds.rows, ((0, 0), (0, short), (0, 0)))
            embeds = Embeds(wide, np.pad(embeds.mask, ((0, 0), (0, short))))
    if short := -rows.shape[1] % tile:
        rows = np.concatenate([rows, np.repeat(rows[:, :1], short, axis=1)], axis=1)
    return tokens, positions, rows, tree, embeds
