"""A conversation: its messages, and a session that keeps their tokens from turn to turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from accel.ir.errors import InputError
from accel.runtime.decode.sampling_params import SamplingParams
from accel.runtime.inputs.ints import Ints
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.model.stream import Stream
from accel.runtime.session.session import Session

NONE: Ints = np.zeros(0, np.int64)


class Chat:
    """A conversation with a model, as `CompiledModel.chat` opens it.

    A turn runs the tokens that its session lacks: the new message, and what the chat template writes otherwise than
    the model did. Under a recipe that treats new tokens otherwise than a prompt's (fewer layers, eviction), answers may
    therefore differ from those to the messages alone. A turn that fails leaves the conversation as it was. Use it from
    one thread at a time.

    Attributes:
        messages: dicts with "role" and "content", the system message first if there is one. They may be changed
            between turns.
        stats: the statistics of the last turn, as in `Output.stats`; {} before.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_context: int,
        open_session: Callable[[], Session],
        start: Callable[[Ints, SamplingParams, Session], Stream],
        vocab_size: int,
        system: str | None = None,
        template: Mapping[str, Any] | None = None,
    ):
        """`start`: opens the stream of a prompt [n], of which the session may hold the first tokens; `template`:
        arguments of `Tokenizer.apply_chat_template`. Raises InputError where there is no template, or it refuses.
        """
        self.messages: list[dict[str, Any]] = []
        self.stats: dict[str, Any] = {}
        self.max_context = max_context
        self._tokenizer = tokenizer
        self._template = dict(template or {})
        self._open, self._start = open_session, start
        self._vocab_size = vocab_size
        self._session: Session | None = None
        self._held = NONE  # the tokens in the session, and the ids that a recipe put between them
        if system is not None:
            self.messages.append({"role": "system", "content": system})
        self._ids([*self.messages, {"role": "user", "content": "Hello"}])

    @property
    def context_left(self) -> int:
        """Tokens that fit behind the conversation."""
        asked = self.messages and self.messages[-1]["role"] != "system"
        return self.max_context - (len(self._ids(self.messages)) if asked else 0)

    def send(self, content: Any, sampling_params: SamplingParams | None = None) -> Stream:
        """Answer a message of the user: a stream of pieces of text. The message and the answer join `messages` when
        the stream ends or is closed.

        `content`: text, or what else the chat template takes. Raises InputError.
        """
        message = {"role": "user", "content": content}
        ids = np.array(self._ids([*self.messages, message]), np.int64)
        if ids.size >= self.max_context:
            raise InputError(
                f"the conversation has {ids.size} tokens with this message, and max_context is {self.max_context}; "
                "shorten it, remove turns (`undo`), start anew, or build with more: max_context=…"
            )
        session, ids = self._prepared(ids)
        stream = self._start(
            ids, sampling_params or SamplingParams(max_tokens=self.max_context), session
        )
        return stream.through(lambda pieces: self._answered(pieces, stream, session, message))

    def undo(self) -> bool:
        """Remove the last message of the user and all after it; whether there was one."""
        places = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if places:
            del self.messages[places[-1] :]
        return bool(places)

    def close(self) -> None:
        """Free the session. `messages` stay, and a further `send` opens another."""
        if self._session is not None:
            self._session.close()
        self._session, self._held = None, NONE

    def __enter__(self) -> Chat:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ids(self, messages: list[dict[str, Any]]) -> list[int]:
        ids: list[int] = self._tokenizer.apply_chat_template(messages, **self._template)
        return ids

    def _prepared(self, ids: Ints) -> tuple[Session, Ints]:
        """The session, with nothing in it but the first tokens of `ids`, and not the last; and `ids` with what a recipe
        put between them in earlier turns.
        """
        places = np.flatnonzero(self._held < self._vocab_size)  # of the tokens among them
        length = min(places.size, ids.size - 1)
        differs = np.flatnonzero(self._held[places[:length]] != ids[:length])
        same = int(differs[0]) if differs.size else length
        keep = int(places[same]) if same < places.size else self._held.size
        ids = np.concatenate([self._held[:keep], ids[same:]])
        if self._session is not None and keep < self._held.size:
            try:
                self._session.rewind(keep if keep >= self._session.held_from[0] else 0)
            except InputError:  # what was evicted cannot be taken back
                self.close()
        if self._session is None:
            self._session = self._open()
        self._held = ids[: int(self._session.lengths[0])]
        return self._session, ids

    def _answered(
        self,
        pieces: Iterator[str],
        stream: Stream,
        session: Session,
        message: dict[str, Any],
    ) -> Iterator[str]:
        """The pieces; then the messages and the session are as the answer left them."""
        if session is not self._session or session.lengths[0] != self._held.size:
            raise InputError("another message was sent meanwhile; end an answer before the next")
        text: list[str] = []
        try:
            for piece in pieces:
                text.append(piece)
                yield piece
        except GeneratorExit:
            stream.close()
        except KeyboardInterrupt:  # what was said stays; what the session holds is not sure
            self.close()
            self._join(message, text, stream)
            raise
        except BaseException:
            self.close()
            raise
        self._join(message, text, stream)
        seen = np.concatenate([stream.prompt, np.array(stream.tokens, np.int64)])
        if session.batch == 1 and session.lengths[0] == seen.size - 1:
            self._held = seen[:-1]
        else:  # a search, or a recipe that does not hold all tokens
            self.close()

    def _join(self, message: dict[str, Any], text: list[str], stream: Stream) -> None:
        self.messages += [message, {"role": "assistant", "content": "".join(text)}]
        self.stats = stream.stats
