"""A session: a KV cache of B rows, the number of tokens in each, and the calls that append to them."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from accel.ir.entries.embed import EMBED
from accel.ir.errors import InputError, shown
from accel.runtime.backends.protocol import BackendSession
from accel.runtime.call import Arrays, Logits, Outputs
from accel.runtime.inputs.calls import call_tokens, rewind_target
from accel.runtime.inputs.ints import Ints, as_ints, check_vocabulary
from accel.runtime.inputs.prompts import as_count
from accel.runtime.session.chunks import Chunk, Wire, export_chunks, receive
from accel.runtime.session.core import CHUNK, LaidAdapter, SessionCore
from accel.runtime.session.extra import check_names
from accel.runtime.session.flat import pays
from accel.runtime.session.guesses import Guesses
from accel.runtime.session.modes.canvas import CanvasState
from accel.runtime.session.modes.encoder_input import EncoderInput
from accel.runtime.session.observers.observer import (
    CallWatcher,
    Capabilities,
    Editable,
    Marked,
    SessionObserver,
)
from accel.runtime.session.rows import wanted_rows
from accel.runtime.session.saved import Origin, SavedSession, export, restore, save
from accel.runtime.session.taken import take

Observer = TypeVar("Observer", bound=SessionObserver)


class Session:
    """A KV cache of B rows. `run` appends tokens, `rewind` removes the newest ones, `fork` copies the session.

    Observers of the session (`runtime/session/{state,prompt,modes}`) implement what a recipe does to the cache.
    `capabilities` tells, before anything runs, whether rewind is free, how far back it goes and how wide a
    call may be. A session of an encoder-decoder model starts with `encode`.

    A session must be used by one thread at a time. Different sessions of one model may run in different
    threads.
    """

    def __init__(
        self,
        backend: BackendSession,
        batch: int,
        observers: Sequence[SessionObserver] = (),
        *,
        vocab_size: int,
        max_context: int,
        origin: Origin | None = None,
        adapters: Sequence[str | None] | None = None,
        laid: Sequence[LaidAdapter] = (),
        saved: SavedSession | None = None,
        width: int | None = None,
        token_ids: int | None = None,
    ):
        """`observers`: in the order in which they are asked (`observer_factories`). `origin`: the model, for `save`.
        `adapters`: the name of each row's. `laid`: all that rows may use, as the backend has them. `saved`: what it
        goes on from. `width`, `token_ids`: as of `SessionCore`.
        """
        self._parts(
            SessionCore(
                backend, batch, observers, vocab_size, max_context, origin, width, token_ids
            )
        )
        if adapters is not None:
            self._core.adapters, self._core.laid = list(adapters), tuple(laid)
        if saved is not None:
            restore(self._core, saved)
            self.tokens = saved.tokens

    tokens: list[Ints] | None = None
    """The token ids [n] of each row when `model.prompt_session` or `model.open_session` gave the session, as far as
    they are known; else None. None after calls that change the tokens.
    """

    def _parts(self, core: SessionCore) -> None:
        self._core = core
        self._guesses = Guesses(core)

    @property
    def batch(self) -> int:
        """Number of rows, B."""
        return self._core.batch

    @property
    def adapters(self) -> tuple[int, ...]:
        """The numbers of the adapters that it opened with: rows join where both have the same."""
        return tuple(one.number for one in self._core.laid)

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary, V."""
        return self._core.vocab_size

    @property
    def token_ids(self) -> int:
        """How many token ids calls take, from 0 on: V, and those behind the vocabulary that a recipe adds."""
        return self._core.token_ids

    @property
    def max_context(self) -> int:
        """Maximum number of tokens per row."""
        return self._core.max_context

    @property
    def length(self) -> int | list[int]:
        """Number of tokens held: an int if all rows are equal, else one per row."""
        lengths: list[int] = self._core.lengths.tolist()
        return lengths[0] if len(set(lengths)) == 1 else lengths

    @property
    def lengths(self) -> Ints:
        """Number of tokens of each row [B] int64 (a copy)."""
        return self._core.lengths.copy()

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of this session, fixed before anything runs."""
        backend = self._core.backend
        found = Capabilities(width=backend.alike, trees=backend.trees, chunks=backend.alike is None)
        for one in self._core.observers:
            found &= one.capabilities
        return found

    @property
    def room(self) -> Ints:
        """Tokens that the next call of each row [B] may have so that its logits are those of single-token calls, and
        all but its first can be rewound without a trace: 1 or more. Loops cut drafts there. It is `capabilities.width`,
        or less where a block codec is about to encode tokens.
        """
        lengths, width = self._core.lengths, self.capabilities.width
        found = np.full(len(lengths), CHUNK if width is None else min(width, CHUNK))
        for one in self._core.watchers:
            if (room := one.call_room(lengths)) is not None:
                found = np.minimum(found, room)
        return found

    def computed(self, lengths: Ints) -> int:
        """The tokens that the graph computes in a call of so many of each row [B]: as many of each as of the longest,
        or no more than there are where the call is flat (`passes.batch`).
        """
        real, padded = int(lengths.sum()), lengths.size * int(lengths.max())
        return real if self._core.backend.flat and pays(real, padded) else padded

    @property
    def held_from(self) -> Ints:
        """The lowest length [B] that each row can be rewound to, besides 0; 0 if nothing was evicted."""
        found = np.zeros_like(self._core.lengths)
        for one in self._core.observers:
            found = np.maximum(found, one.held_from)
        return found

    @property
    def stats(self) -> dict[str, float]:
        """`calls`: graph calls; `tokens`: tokens run, without padding; `reused`: tokens that `kv.reuse` took over;
        `seconds` in the graph; `kv_bytes`: size of the state buffers, without shared blocks; `kv_mapped`: the
        part of it that lies in mapped files, of which memory holds what is read. With recurrent state also `snapshots`:
        how many were taken; `snapshot_seconds` for it; `snapshot_bytes`: of those that are held.
        """
        core = self._core
        found: dict[str, float] = {
            "calls": core.calls,
            "tokens": core.tokens,
            "reused": 0,
            "seconds": core.seconds,
            "kv_bytes": core.kv_bytes,
            "kv_mapped": core.kv_mapped,
        }
        for one in core.observers:
            found |= one.stats
        return found

    @property
    def kv_most(self) -> int:
        """Peak size of the state buffers, in bytes."""
        return self._core.kv_most

    def observer(self, kind: type[Observer]) -> Observer | None:
        """The observer of a class; None if the session has none."""
        return next((one for one in self._core.observers if isinstance(one, kind)), None)

    def encode(self, inputs: Any, lengths: Any = None) -> None:
        """Run the encoder on its input: token ids [B,X] or features [B, ...]. All later steps use the result.

        `lengths` [B], each 1..X: the number of valid token ids per row; the rest, on the right, is padding. The
        session is emptied. Raises InputError.
        """
        core = self._open()
        if (encoder := self.observer(EncoderInput)) is None:
            raise InputError("this model has no encoder; give its prompt alone")
        encoder.encode(core, inputs, lengths)
        self.rewind(0)

    def run(
        self,
        tokens: Any,
        lengths: Any = None,
        *,
        last_only: bool = False,
        here: bool = True,
        **controls: Any,
    ) -> Logits:
        """Append tokens [B,T] and return the logits after each, float32 [B,T,V].

        A call of more than 512 tokens is split into several graph calls.

        Args:
            tokens: token ids [B,T].
            lengths: number of valid tokens per row [B], each 0..T (default: T). The rest, on the right, is
                padding: any ids, with logits 0 and no effect.
            last_only: return only the logits of each row's last valid token, [B,1,V].
            here: False lets the logits stay on the device that computed them (`accel.runtime.inputs.distant`): they are
                read as an array is, and fetched where more than the largest is asked for. True: an array.
            controls: what the model's methods take beside the tokens. `run_layers`: bools [L], the layers to run, with
                a depth method (default: all layers for a prompt, the recipe's for single tokens after it).
                `threshold`: confidence for early exit, with exits (default: no exit in a prompt, then the recipe's).
                `embeds`: floats [B,T,E] in place of the tokens, which only count then.
                `coarse`: read the cache in fewer bits than it is stored in, as a draft does, with a kv.codec that can.

        Raises:
            InputError: the call is invalid. The session is unchanged, or closed if tokens of a failed
                call were already evicted or counted.
        """
        logits = self._open().run(tokens, lengths, last_only, controls)
        return np.asarray(logits) if here else logits

    def step(
        self,
        tokens: Any,
        lengths: Any = None,
        *,
        want: Collection[str] = (),
        last_only: bool = False,
        **controls: Any,
    ) -> Outputs:
        """As `run`, with the outputs `want` beside the logits: of each token [B,T,…], or of the last one [B,1,…]. 0 for
        padding. `extra` has their names: a method adds one to the graph, such as the hidden states that a head reads.

        Raises InputError, as `run`; also where the model has no such output.
        """
        out = self._open().call(tokens, lengths, last_only, want, controls)
        return Outputs(np.asarray(out.logits), out.extra)

    @property
    def extra(self) -> tuple[str, ...]:
        """The names of what a step can give beside the logits."""
        return tuple(self._core.backend.extra)

    def listen(self, listener: CallWatcher) -> None:
        """Let a listener hear the steps from now on: `before` says which of `extra` it wants, `after` is told the
        tokens, their positions and these outputs. Of a draft tree it hears what `keep` commits. A fork has none. It is
        for drafters, which so read the hidden states of all tokens.
        """
        core = self._open(same=True)
        core.listen((*core.listeners, listener))

    def unlisten(self, listener: CallWatcher) -> None:
        """The listener hears no more."""
        core = self._core
        core.listen(tuple(one for one in core.listeners if one is not listener))

    def embed(self, tokens: Any) -> npt.NDArray[Any]:
        """The embeddings [B,T,E] of tokens [B,T], as the step has them before its first layer; `run(tokens, embeds=…)`
        takes such rows in place of its tokens.

        Raises InputError where the tokens are invalid, or the model has no such graph.
        """
        ids = as_ints(tokens, "tokens")
        if ids.ndim != 2 or not ids.size:
            raise InputError(
                f"tokens have shape {list(ids.shape)}; give [B, T], at least one token"
            )
        check_vocabulary(ids, self.token_ids, "tokens")
        return self.entry(EMBED.name, {"tokens": ids})["stream"]

    def entry(self, name: str, inputs: Arrays, width: int = 0) -> Arrays:
        """One call of another graph of the model over this session's state, such as a head: its inputs by name -> what
        it gives beside the state. Rows hold what they held. Raises InputError where the model has no such graph.

        `width`: tokens that the graph lays behind those of each row, to try what comes of them: there is room for them,
        and its input `slots` says where they begin. They stay there, so it is for a copy (`fork`) that is then closed.
        """
        core = self._open(same=not width)
        check_names("entry", [name], core.backend.entries)
        if width:
            slots = core.lengths - core.base
            core.make_room(slots, width)
            inputs = {**inputs, "slots": slots}
        return core.backend.part(name, inputs)

    def prompt(self, tokens: Any, lengths: Any = None) -> Logits:
        """Append whole prompts [B,T] and return the logits after each row's last token, float32 [B,1,V].

        Applies the recipe's prompt methods, then `end_prompt`. `lengths` [B]: valid tokens per row, as in `run`.

        Prompts are pruned only in an empty session. With `gemfilter` the session then holds the kept tokens, at
        positions from 0 on; these count towards max_context and can be rewound. With methods that prune between
        layers (`promptdistill`) it holds all tokens, and can be rewound to the end of the prompt or to 0. With
        `cache-augment` it also holds the latents, which count as tokens. Raises InputError, as `run`. Where it fails,
        also at the end of the prompt, rows hold what they held, as far as the recipe has not evicted some of it.
        """
        core = self._open()
        before = core.lengths
        try:
            return np.asarray(self._prompted(core, tokens, lengths))
        except BaseException:
            core.back(before)
            raise

    def _prompted(self, core: SessionCore, tokens: Any, lengths: Any) -> Logits:
        """See `prompt`."""
        if empty := not core.lengths.any():
            ids, real = call_tokens(tokens, lengths, core.lengths, core.token_ids, core.max_context)
            counts = np.full(core.batch, ids.shape[1], np.int64) if real is None else real
            for one in core.runners:
                if (logits := one.prompt(core, ids, counts)) is not None:
                    core.end_prompt()
                    return logits
                if (shorter := one.shorten(core, ids, counts)) is not None:
                    tokens, lengths = ids, counts = shorter
        logits = core.run(tokens, lengths, True, prompt=True)
        for one in core.runners if empty else ():
            if (last := one.extend(core)) is not None:
                logits = last
        core.end_prompt()
        return logits

    def reuse(self, tokens: Any, lengths: Any = None) -> Ints:
        """Let rows that hold nothing hold what other sessions computed of the beginnings of prompts [B,T] (`kv.reuse`;
        `lengths` as in `run`): how many tokens each holds now [B]. The last token of a prompt is always left.

        `prompt`, and `run` with `last_only`, do so themselves; this is for who runs a prompt in several calls, which
        takes the rest. Raises InputError, as `run`.
        """
        return self._open().reuse(tokens, lengths)

    def end_prompt(self) -> None:
        """Mark the end of a prompt, after `run`. The recipe's eviction after a prompt happens here.

        If it fails, the session is unchanged.
        """
        self._open(same=True).end_prompt()

    def mark(self, units: Any = None, question: Any = None, lengths: Any = None) -> None:
        """Say what the tokens of the next call (`prompt` or `run`) are, for recipes that evict or select by it.

        Args:
            units: [B,T], the number of each token's unit, such as an example or a sentence; -1: none.
            question: where the question begins in these tokens: an int, or one per row [B]; -1: there is none.
            lengths: tokens per row [B], as in `run`.

        Raises InputError, also from the call if it has other tokens than were marked; nothing ran then.
        """
        marked = [one for one in self._open(same=True).observers if isinstance(one, Marked)]
        if not any([one.mark(units, question, lengths) for one in marked]):
            raise InputError(
                "this model goes by no such marks; build it with a recipe that does, such as 'shotkv' or 'sentencekv' "
                "(units), or 'finch' (question)"
            )

    def guess(
        self,
        tokens: Any,
        tree: Any,
        lengths: Any = None,
        columns: Any = None,
        positions: Any = None,
        *,
        here: bool = True,
        **controls: Any,
    ) -> Logits:
        """Run a draft tree, tokens [B,T] after the tokens of each row, and return the logits after each,
        float32 [B,T,V]. With `positions`, any call whose tokens see each other as `tree` says, such as a block that
        sees both ways.

        Nothing is committed until `keep`; any other call discards the tree. It is one graph call, so T is at most
        512 and `capabilities.width`.

        Args:
            tokens: token ids [B,T] of the tree, parents before children.
            tree: bools [B,T,T]: for each token the tokens of the call that it attends to, itself and its
                ancestors.
            lengths: valid tokens per row [B], as in `run`.
            columns: [B,N], the tokens whose logits are returned as [B,N,V]; the others are not computed.
            positions: [B,T], where in its row each token lies, of `length` .. `length` + valid tokens - 1; a token then
                may see those behind it, too. Default: as deep in the tree as it is. What saw tokens behind it cannot
                be kept.
            here: as in `run`.
            controls: what methods take beside the tokens, as in `run`.

        Raises:
            InputError: the call is invalid, or the model was built without trees (`capabilities.trees`).
        """
        self._open()
        if not self.capabilities.trees:
            raise InputError(
                "this model takes no draft trees; build it with a recipe that drafts trees (such as token-recycling)"
            )
        logits = self._guesses.run(tokens, tree, lengths, columns, positions, controls)
        return np.asarray(logits) if here else logits

    @property
    def guessed(self) -> Arrays:
        """What listeners asked for of the tokens of the last `guess`, by name, [B,T,…]; nothing after another call."""
        return self._core.tree_extra

    def keep(self, paths: Any) -> None:
        """Commit one path of the last `guess` per row: the columns [n] of its tokens from the root on, or none.

        Raises InputError; then the session is unchanged.
        """
        self._guesses.keep(paths)

    def edit(self, start: int, stop: int, tokens: Any, row: int = 0) -> Logits:
        """Replace the tokens `start` .. `stop` - 1 of a row by `tokens` [n], and return the logits [B,1,V]
        after the row's last token (0 for other rows). Needs a model built with `kv.reuse = pie`, or one with recurrent
        state.

        With `pie` the new tokens attend to the tokens before them. Tokens after them keep their values, and their keys
        are rotated to the new positions; only the last token is recomputed. So an edit at the end is exact, other edits
        are approximate ("Let the Code LLM Edit Itself"). With recurrent state all tokens from the edit on run again,
        and it is exact. Raises InputError; if an edit fails, the session is unchanged.
        """
        core = self._open()
        editable = next((one for one in core.observers if isinstance(one, Editable)), None)
        if editable is None:
            raise InputError(
                "this model cannot edit cached tokens; build it with kv.reuse = pie (recipe 'pie')"
            )
        return np.asarray(editable.edit(core, start, stop, tokens, row))

    def write(
        self, tokens: Any, at: Any, lengths: Any = None, rows: Any = None, picks: Any = None
    ) -> Logits:
        """Overwrite or append tokens [B,T], and return the logits [B,N,V] of columns `rows` [B,N] (default: all).
        Needs a masked-diffusion model. Other tokens of the row keep their keys and values.

        `at`: the place in its row of the first token, an int or [B], at most the row's length; the others follow it. Or
        the place of each token, [B,T], rising; what comes behind all that a row holds leaves no gap. `lengths` [B],
        each 0..T: valid tokens; the rest, on the right, is padding. `picks` [B,K], of a model whose layers leave out
        rows (`ir.picks`): the columns that layers compute, behind a -1 for each that a layer chooses, then -2; default:
        all. Raises InputError; after any other error the tokens of the call must be written again.
        """
        core = self._open()
        if (canvas := self.observer(CanvasState)) is None:
            raise InputError(
                "this model is causal, so cached tokens cannot be overwritten; rewind and run new "
                "tokens instead"
            )
        return np.asarray(canvas.write(core, tokens, at, lengths, rows, picks))

    def rewind(self, length: Any) -> None:
        """Remove all tokens from `length` on: an int, or one per row [B].

        Raises InputError for a length above the current one or below `held_from`.
        """
        core = self._open()
        core.rewind(rewind_target(length, core.lengths))

    def select(self, rows: Any) -> None:
        """Reorder, repeat or drop rows: row i continues from row rows[i]. `rows` [n], any number of rows.

        Data that copies of a row still share is not copied. Raises InputError.
        """
        self._open().select(rows)

    def join(self, other: Session) -> None:
        """The rows of another session of the model go on behind this one's, which is closed: row j of it becomes row
        `batch` + j. So a prompt can run in a session of its own and then be decoded with others.

        Only the rows that join are copied, but for a few calls that make room for more. Raises InputError: the other is
        of another model or build, or opened with other adapters or in another order; there would be more rows than
        `max_batch`; or a recipe's rows would not go on as they do alone (`capabilities.joins`). Both sessions are
        unchanged then.
        """
        if not isinstance(other, Session):
            raise InputError(f"join was given {shown(other)}; give another session of the model")
        self._open().join(other._open())

    def leave(self, rows: Any) -> Ints:
        """Drop `rows`, an int or [n], not all of them. The last rows take their places, and nothing else is copied.

        Returns the rows [B] that those which stay were: row i was row `order[i]`. Raises InputError.
        """
        core = self._open()
        gone = np.unique(wanted_rows(np.atleast_1d(as_ints(rows, "rows")), core.batch))
        if gone.size == core.batch:
            raise InputError(
                "all rows would leave, and a session has one at least; close it, or rewind it to 0"
            )
        return core.leave(gone)

    def spread(self, threads: int) -> None:
        """Compute the calls from here on with so many threads, at most the model's (`model.threads`).

        Raises InputError.
        """
        self._core.backend.spread(as_count(threads, "threads", 1))

    def fork(self) -> Self:
        """Return an independent session with the same tokens; its stats start at 0."""
        other = type(self).__new__(type(self))
        other._parts(self._open(same=True).fork())
        other.tokens = self.tokens
        return other

    def take(self, other: Session, lengths: Ints) -> bool:
        """Hold, in an empty session, the first `lengths` [B] tokens of each row of another one, of a model with the
        same weights and as many rows: their keys and values are copied, and nothing runs. Whether it can: not where
        the two caches store tokens in different ways, or the other one dropped some, or left out a layer for one; then
        the session stays empty.
        """
        return take(self._open(), other._open(same=True), lengths)

    def save(self, path: str | os.PathLike[str], tokens: Any = None) -> None:
        """Write the session into a file, from which `model.open_session(path)` goes on: the cache up to the tokens that
        it holds, and what the recipe's methods know of them. The session goes on unchanged.

        `tokens`: the token ids [n] of each row, for `session.tokens` of the opened one (default: `session.tokens`).
        The file appears when it is whole; a saved session of that name is replaced then.

        Raises SavedSessionError: it cannot be written, or a method of the recipe cannot be saved yet.
        """
        core = self._open(same=True)
        if tokens is None and self.tokens is not None:
            same = [row.size for row in self.tokens] == core.lengths.tolist()
            tokens = self.tokens if same else None
        save(core, path, tokens)

    def export_row(self, row: int = 0) -> bytes:
        """A row as bytes, from which `model.import_row` goes on in this or another process: its cache as it is stored,
        and what the recipe's methods know of it. The session goes on unchanged.

        The bytes are those of a saved session: arrays and JSON, with checksums, and no code. Raises InputError,
        SavedSessionError: a method of the recipe cannot be saved yet.
        """
        core = self._open(same=True)
        (one,) = wanted_rows(np.atleast_1d(as_ints(row, "row")), core.batch)
        return export(core, int(one), None if self.tokens is None else self.tokens[one])

    def export_chunks(self, tokens: Any = None, size: int = 1024) -> dict[str, bytes]:
        """The row's cache in chunks of `size` tokens, each at every level of the recipe's codec (`kv.file`): parts by
        name, which a store holds and `model.import_chunks` fetches some of. The session goes on unchanged.

        `tokens`: the token ids [n] that the row holds (default: `session.tokens`). Raises InputError: the recipe names
        no codec, or its cache has not a slot for each token; the session has several rows, or its tokens are not known.
        """
        core = self._open(same=True)
        known = self.tokens
        ids = as_ints(tokens, "tokens") if tokens is not None else known[0] if known else None
        return export_chunks(core, ids, as_count(size, "size", 1))

    def import_chunks(self, saved: SavedSession, wire: Wire, ends: float) -> list[Chunk]:
        """See `model.import_chunks`: this session, of one row, is empty."""
        took = receive(self._open(), lambda ids: self.prompt(ids[None]), saved, wire, ends)
        self.tokens = saved.tokens
        return took

    def close(self) -> None:
        """Free the cache. Closing again has no effect."""
        self._core.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, same: bool = False) -> SessionCore:
        """The core of a session that is open, without guesses of which nothing was kept. `same`: its tokens stay as
        they are. Raises InputError.
        """
        _ = self._core.backend
        self._guesses.drop()
        if not same:
            self.tokens = None
        return self._core
