"""One conversation per row: a cache, how many tokens each row holds, and calls that add to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, TypeVar

import numpy as np

from accel.ir.errors import InputError
from accel.runtime.backends.protocol import BackendSession, Logits
from accel.runtime.inputs.calls import call_tokens, rewind_target
from accel.runtime.inputs.ints import Ints
from accel.runtime.session.core import SessionCore
from accel.runtime.session.guesses import Guesses
from accel.runtime.session.observers.observer import Capabilities, SessionObserver

Observer = TypeVar("Observer", bound=SessionObserver)


class Session:
    """A cache of B rows. `run` appends tokens, `rewind` forgets them, `fork` copies the whole.

    What a recipe makes of the cache, observers of the session know (`runtime/session/observers`), and `capabilities`
    says what follows for a caller: whether rewinding is free, how far back it goes, how wide a call may be.
    A session of an encoder-decoder model begins with `encode`.

    One thread at a time may use a session; different sessions of one model may run in different
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
    ):
        """`observers`: in the order in which they are asked (`observer_factories`)."""
        self._parts(SessionCore(backend, batch, observers, vocab_size, max_context))

    def _parts(self, core: SessionCore) -> None:
        self._core = core
        self._guesses = Guesses(core)

    @property
    def batch(self) -> int:
        """Rows."""
        return self._core.batch

    @property
    def vocab_size(self) -> int:
        """Tokens that there are."""
        return self._core.vocab_size

    @property
    def max_context(self) -> int:
        """Most tokens of a row."""
        return self._core.max_context

    @property
    def length(self) -> int | list[int]:
        """Tokens held: an int where all rows agree, else one per row."""
        lengths: list[int] = self._core.lengths.tolist()
        return lengths[0] if len(set(lengths)) == 1 else lengths

    @property
    def lengths(self) -> Ints:
        """Tokens held by each row, [B]; a copy."""
        return self._core.lengths.copy()

    @property
    def capabilities(self) -> Capabilities:
        """What can be relied on before anything runs."""
        backend = self._core.backend
        found = Capabilities(width=backend.alike, trees=backend.trees)
        for one in self._core.observers:
            found &= one.capabilities
        return found

    @property
    def held_from(self) -> Ints:
        """The position of each row [B] up to which it can be rewound; 0 where nothing was dropped."""
        found = np.zeros_like(self._core.lengths)
        for one in self._core.observers:
            found = np.maximum(found, one.held_from)
        return found

    @property
    def stats(self) -> dict[str, float]:
        """calls: graph calls; tokens: real ones run; reused: those that others had run; seconds in the
        graph; kv_bytes: state buffers now, without blocks that sessions share.
        """
        core = self._core
        found: dict[str, float] = {
            "calls": core.calls,
            "tokens": core.tokens,
            "reused": 0,
            "seconds": core.seconds,
            "kv_bytes": core.kv_bytes,
        }
        for one in core.observers:
            found |= one.stats
        return found

    @property
    def kv_most(self) -> int:
        """Most bytes of state buffers: now, or when rows were let go (`select`)."""
        return self._core.kv_most

    def observer(self, kind: type[Observer]) -> Observer | None:
        """The observer of a class; None where the session does without."""
        return next((one for one in self._core.observers if isinstance(one, kind)), None)

    def encode(self, inputs: Any, lengths: Any = None) -> None:
        """Give the encoder its input, once for all steps: token ids [B,X] or features [B, ...].

        `lengths` [B], each 1..X: how many of a row's token ids are real; the rest, on the right, is
        padding. Tokens that the session held are forgotten. Raises InputError.
        """
        core = self._open()
        if not any([one.encode(core, inputs, lengths) for one in core.observers]):
            raise InputError("this model has no encoder; give its prompt alone")
        self.rewind(0)

    def run(
        self,
        tokens: Any,
        lengths: Any = None,
        *,
        last_only: bool = False,
        run_layers: Any = None,
        threshold: float | None = None,
    ) -> Logits:
        """Append tokens [B,T] and return the logits after each, float32 [B,T,V].

        `lengths` [B], each 0..T: how many of a row's tokens are real; the rest, on the right, is
        padding, may hold anything, leaves no trace, and has logits 0. `last_only` gives [B,1,V]:
        the logits of each row's last real token, the others not computed. Long calls are cut into
        graph calls of at most CHUNK tokens. Raises InputError; a call that fails leaves the session
        as it was, or closes it where that cannot be: tokens of the call were compressed or counted.

        Of a model built with a depth method: `run_layers` [L] bools say which layers run (default:
        all for a prompt, the recipe's for single tokens after it), and `threshold` from which
        confidence on an exit is taken (default: none in a prompt, then the recipe's).
        """
        return self._open().run(tokens, lengths, last_only, run_layers, threshold)

    def prompt(self, tokens: Any, lengths: Any = None) -> Logits:
        """Append whole prompts [B,T], `lengths` [B] of them real, and return float32 [B,1,V]: the logits
        after each row's last token. What the recipe does to prompts is done, and `end_prompt`.

        Tokens are taken from the prompts of an empty session only; later ones are seen whole. Where a
        recipe filters them, what is left, at positions from 0 on, is what the session holds (`lengths`),
        counts towards max_context and can be rewound. Where deeper layers drop some, the session holds
        them all, and goes back to the prompt's end or to 0. Raises InputError, as `run`.
        """
        core = self._open()
        if empty := not core.lengths.any():
            ids, real = call_tokens(
                tokens, lengths, core.lengths, core.vocab_size, core.max_context
            )
            counts = np.full(core.batch, ids.shape[1], np.int64) if real is None else real
            for one in core.observers:
                if (logits := one.prompt(core, ids, counts)) is not None:
                    return logits
                if (shorter := one.shorten(core, ids, counts)) is not None:
                    tokens, lengths = ids, counts = shorter
        logits = core.run(tokens, lengths, True, prompt=empty)
        core.end_prompt()
        return logits

    def end_prompt(self) -> None:
        """Say that a prompt is whole: what the recipe does then, as dropping tokens, is done now.

        Where that fails the session stays as it was.
        """
        self._open().end_prompt()

    def guess(self, tokens: Any, tree: Any, lengths: Any = None, columns: Any = None) -> Logits:
        """Run a tree of guesses, tokens [B,T] behind what each row holds, and return the logits after each, float32
        [B,T,V]. `tree` [B,T,T] bools: which tokens of the call each one sees, itself and its ancestors. `columns`
        [B,N]: after which of them logits are wanted, [B,N,V]; others are not computed.

        Nothing of it is held until `keep` says which path stands; any other call drops it. `lengths` as in `run`.
        One graph call, so T is at most `CHUNK` and `capabilities.width`. Raises InputError, and where the model was
        built without trees (`capabilities.trees`).
        """
        self._open()
        if not self.capabilities.trees:
            raise InputError(
                "this model takes no draft trees; build it with a recipe that drafts trees (such as token-recycling)"
            )
        return self._guesses.run(tokens, tree, lengths, columns)

    def keep(self, paths: Any) -> None:
        """Hold of the last `guess`, for each row, the tokens in these columns [n]: a path from the root on, or none.

        Raises InputError, and then nothing has changed.
        """
        self._guesses.keep(paths)

    def edit(self, start: int, stop: int, tokens: Any, row: int = 0) -> Logits:
        """Replace the tokens from `start` up to `stop` of a row by `tokens` [n], and return the logits [B,1,V]
        after the row's last token (0 for other rows). Of a model built with `kv.reuse = pie`.

        The new tokens see what comes before them. Tokens behind them keep their values, and their keys
        are rotated to where they now are; only the last one is run again. So an edit at the end is exact, and
        others are close. Raises InputError; an edit that fails leaves the session as it was.
        """
        core = self._open()
        for one in core.observers:
            if (logits := one.edit(core, start, stop, tokens, row)) is not None:
                return logits
        raise InputError(
            "this model cannot edit cached tokens; build it with kv.reuse = pie (recipe 'pie')"
        )

    def write(self, tokens: Any, start: Any, lengths: Any = None, rows: Any = None) -> Logits:
        """Let each row hold tokens [B,T] from position `start` on, an int or [B], and return the logits [B,N,V] of
        columns `rows` [B,N], by default of all. What a row holds before and behind them stays, as it was. Of a model
        that fills masks.

        `lengths` [B], each 0..T: how many are real; the rest, on the right, is padding, and may stand only where
        a row then ends. `start` is at most what the row holds. Raises InputError; after a call that fails
        for another reason the tokens from `start` on are to be written again.
        """
        core = self._open()
        for one in core.observers:
            if (logits := one.write(core, tokens, start, lengths, rows)) is not None:
                return logits
        raise InputError(
            "this model is causal, so cached tokens cannot be overwritten; rewind and run new "
            "tokens instead"
        )

    def rewind(self, length: Any) -> None:
        """Forget every token from `length` on: an int, or one per row [B]. Forward is an
        InputError.
        """
        core = self._open()
        core.rewind(rewind_target(length, core.lengths))

    def select(self, rows: Any) -> None:
        """Let row i go on as what row rows[i] was: `rows` [n], any number of them, each any row or several times
        the same. Of what rows that began as copies of one still share, nothing is copied. Raises InputError.
        """
        self._open().select(rows)

    def fork(self) -> Self:
        """An independent session that holds the same tokens; its stats start at 0."""
        other = type(self).__new__(type(self))
        other._parts(self._open().fork())
        return other

    def close(self) -> None:
        """Free the cache. Closing twice is harmless."""
        self._core.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> SessionCore:
        """The core of a session that is open, without guesses of which nothing was kept. Raises InputError."""
        _ = self._core.backend
        self._guesses.drop()
        return self._core
