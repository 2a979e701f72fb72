"""What the encoder of an encoder-decoder model takes."""

from __future__ import annotations

from dataclasses import dataclass, field

from accel.ir.errors import InputError, unknown
from accel.ir.fields import Positive

DETECT = -1  # in place of the token of a language that the model itself is to tell


@dataclass(frozen=True)
class EncoderFacts:
    """What the encoder of an encoder-decoder model takes, and the tokens that its decoder starts from."""

    vocab_size: int  # of token ids [B,X]; 0: it takes features
    max_length: Positive  # longest X
    features: tuple[int, ...] = ()  # sizes of one row's features, after B
    start: tuple[int, ...] = ()
    speech: SpeechTokens | None = None  # None: `start`, whatever is asked for


@dataclass(frozen=True)
class SpeechTokens:
    """The tokens that tell a decoder of speech the language and the task, as Whisper's (arXiv 2212.04356)."""

    first: int
    languages: dict[str, int] = field(default_factory=dict)  # by code, name and token
    tasks: dict[str, int] = field(default_factory=dict)
    language: str | None = None  # of a request that names none
    task: str | None = None
    forced: tuple[int, ...] = ()  # where neither is named
    forces_language: bool = False  # the first of them is one, and none is detected
    last: int | None = (
        None  # behind all others, for a text without times; the tokens above it are times
    )
    timed: bool = False  # a text has times where a request does not say
    latest: int | None = None  # of them, the first time of a text

    def start(
        self, language: str | None = None, task: str | None = None, timed: bool | None = None
    ) -> list[int]:
        """What the decoder starts from; `DETECT` for a language that is to be detected. `timed`: see `has_times`.
        Raises InputError.
        """
        for name, given, known in (
            ("language", language, self.languages),
            ("task", task, self.tasks),
        ):
            if given is not None and not known:
                raise InputError(
                    f"{name} = {given!r}: this model's generation configuration names no {name}s; leave {name} out"
                )
        language = self.language if language is None else language
        task = self.task if task is None else task
        plain = language is None and task is None
        found = [self.first]
        if language is not None:
            found.append(_named("language", language.lower(), self.languages))
        elif self.languages and not (plain and self.forces_language):
            found.append(DETECT)
        if plain:
            found += self.forced
        if task is not None:
            found.append(_named("task", task, self.tasks))
        elif language is not None and "transcribe" in self.tasks:
            found.append(self.tasks["transcribe"])
        if self.has_times(timed):
            return found[:-1] if found[-1] == self.last else found
        if self.last is not None and found[-1] != self.last:
            found.append(self.last)
        return found

    def has_times(self, asked: bool | None) -> bool:
        """Whether a text has times; `asked`: of a request, None where it does not say. Raises InputError."""
        if asked and self.last is None:
            raise InputError(
                "timestamps: this model's generation configuration names no no_timestamps_token_id, the token below "
                "its times; leave timestamps out"
            )
        return self.last is not None and (self.timed if asked is None else asked)

    @property
    def largest(self) -> int:
        """The largest id of any of them."""
        return max(
            [
                self.first,
                self.last or 0,
                *self.forced,
                *self.languages.values(),
                *self.tasks.values(),
            ]
        )


def _named(what: str, name: str, known: dict[str, int]) -> int:
    if name not in known:
        raise InputError(unknown(what, name, list(known)))
    return known[name]
