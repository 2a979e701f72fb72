"""The sessions of a model: opened with the adapters of their rows and its observers, or from what was saved."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.ir.errors import InputError
from accel.ir.facts import Facts
from accel.ir.peft import read_adapter
from accel.runtime.artifact.artifact import Artifact
from accel.runtime.backends.protocol import Backend
from accel.runtime.inputs.encoder_inputs import padded
from accel.runtime.inputs.ints import Ints
from accel.runtime.model.adapters import Adapters, Chosen, names_of
from accel.runtime.model.requests import Sources
from accel.runtime.session.observers import observer_factories
from accel.runtime.session.observers.observer import ModelParts
from accel.runtime.session.saved import Origin, SavedSession, saving
from accel.runtime.session.session import Session

NO_ADAPTERS = (
    "adapter {!r}: this model takes no adapters; build it with them (adapters={{name: DIR}}), or "
    "leave the adapter out"
)


class Sessions:
    """Opens sessions over a model's backend, which it frees when the model closes."""

    def __init__(
        self,
        backend: Backend,
        facts: Facts,
        recipe: dict[str, Any],
        artifact: Artifact | None,
        adapters: Adapters | None,
        weights: Callable[[], str] | None,
    ):
        """As in `CompiledModel`."""
        self.backend: Backend | None = backend  # None: closed
        self._adapters = adapters
        self._facts = facts
        self._recipe = recipe
        self._artifact = artifact
        self._weights = weights
        self.observers = observer_factories(
            ModelParts(
                facts,
                recipe.get("tables", {}),
                backend.state,
                backend.entries,
                backend.open_session,
                backend.pool,
                None if artifact is None else artifact.path,
                backend.threads,
            )
        )

    def live_backend(self) -> Backend:
        """The backend. Raises InputError if the model is closed."""
        if self.backend is None:
            raise InputError("this model is closed; load or optimize it again")
        return self.backend

    def open(
        self,
        names: list[str | None],
        saved: SavedSession | None = None,
        chosen: Chosen | None = None,
    ) -> Session:
        """A session whose rows use these adapters; `chosen`: what they were, where others may have their names by now.
        Raises InputError if the model is closed.
        """
        model = self.live_backend()
        batch, used = len(names), chosen or self._chosen(names)
        backend = model.open_session(batch)
        observers = [factory.open(batch) for factory in self.observers]
        if used is not None:
            backend.adapt(used.arrays, used.rows)
            for one in observers:
                one.adapted(used.numbers)
        try:
            return Session(
                backend,
                batch,
                observers,
                vocab_size=self._facts.vocab_size,
                max_context=self._facts.max_context,
                origin=self._origin,
                adapters=names,
                laid=() if used is None else used.laid,
                saved=saved,
                width=self._facts.width,
                token_ids=self._facts.token_ids,
            )
        except BaseException:
            backend.close()
            raise

    def opener(self, sources: Sources, names: list[str | None]) -> Callable[[], Session]:
        """What opens such sessions as `encoded` does, with those that have these names now. Raises InputError."""
        return partial(self.encoded, sources, names, self._chosen(names))

    def encoded(
        self, sources: Sources, names: list[str | None], chosen: Chosen | None = None
    ) -> Session:
        """A session whose rows use these adapters, after the encoder has run over their sources, if there are any;
        `chosen`: as of `open`.
        """
        session = self.open(names, chosen=chosen)
        if sources is not None and self._facts.encoder is not None:
            session.encode(*padded(sources, self._facts.encoder))
        return session

    def languages(self, adapter: Any, sources: list[npt.NDArray[Any]]) -> list[int]:
        """Of each source of a speech model, the token of the language that its decoder finds most likely. Raises
        InputError.
        """
        encoder = self._facts.encoder
        assert encoder is not None and encoder.speech is not None
        known = np.array(sorted(set(encoder.speech.languages.values())))
        names, most = self.named(adapter, len(sources)), self._facts.max_batch
        found: list[int] = []
        for at in range(0, len(sources), most):
            part = sources[at : at + most]
            with self.encoded(part, names[at : at + most]) as session:
                logits = session.run(np.full((len(part), 1), encoder.speech.first))
            found += known[logits[:, -1, known].argmax(-1)].tolist()
        return found

    def resumed(self, saved: SavedSession) -> Session:
        """A session that goes on from a saved one, which fits this model. Raises SavedSessionError."""
        saved.check_rows(self._origin)
        names = self.named(saved.adapters, saved.batch)
        saved.check(self._origin)
        return self.open(names, saved)

    def received(self, saved: SavedSession) -> Session:
        """An empty session for one whose head this is, which fits this model. Raises SavedSessionError."""
        saved.check_rows(self._origin)
        saved.check(self._origin)
        return self.open([None])

    def named(self, adapter: Any, rows: int) -> list[str | None]:
        """The name of each row's adapter, all of which exist. Raises InputError."""
        names = names_of(adapter, rows)
        self._chosen(names)
        return names

    @property
    def adapter_names(self) -> list[str]:
        """The adapters that a session may choose."""
        return [] if self._adapters is None else self._adapters.names

    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """Let sessions that open from now on choose the adapter of a folder by this name. Raises InputError."""
        if self._adapters is None:
            raise InputError(NO_ADAPTERS.format(name))
        self._adapters.add(name, read_adapter(os.fspath(path)))

    def unload_adapter(self, name: str) -> None:
        """Let no session that opens from now on choose an adapter that was loaded. Raises InputError."""
        if self._adapters is None:
            raise InputError(NO_ADAPTERS.format(name))
        self._adapters.remove(name)

    def shared(self) -> dict[str, int] | None:
        """Figures of what sessions share; None: nothing."""
        return next((one.shared() for one in self.observers if one.shared is not None), None)

    def known(self, names: Sequence[str | None], prompt: Ints) -> int:
        """How many tokens of a prompt [n] need not run in a session of one row with this adapter, after what ran so
        far; 0 where the model is closed, or the adapter is gone.
        """
        ask = next((one.known for one in self.observers if one.known is not None), None)
        if ask is None or self.backend is None:
            return 0
        try:
            used = self._chosen(names)
        except InputError:
            return 0
        return ask(prompt, 0 if used is None else used.numbers[0])

    def close(self) -> None:
        """Free the backend, and what sessions share. Closing twice is harmless."""
        backend, self.backend = self.backend, None
        if backend is not None:
            backend.close()
            for one in self.observers:
                if one.close is not None:
                    one.close()

    def _chosen(self, names: Sequence[str | None]) -> Chosen | None:
        """What rows that use these adapters are given; None: none is used."""
        if not any(name is not None for name in names):
            return None
        if self._adapters is None:
            raise InputError(NO_ADAPTERS.format(next(filter(None, names))))
        return self._adapters.chosen(names)

    @cached_property
    def _origin(self) -> Origin:
        """What saved sessions are held to."""
        return Origin(
            self._facts.name,
            lambda: self._weights_digest,
            self._recipe,
            () if self.backend is None else self.backend.state,
            self._facts.max_batch,
            self._facts.max_context,
            lambda name: "" if self._adapters is None else self._adapters.digest(name),
            saving(self._recipe.get("tables", {})),
        )

    @cached_property
    def _weights_digest(self) -> str | None:
        """What tells this model's parameters from another's; None: unknown."""
        if self._artifact is not None:
            return self._artifact.manifest.weights_digest
        return None if self._weights is None else self._weights()
