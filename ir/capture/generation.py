"""What a model's generation configuration says of the tokens that follow: what is followed, and a note on the rest."""

from __future__ import annotations

from typing import Any

from accel.ir.suppressed import Suppressed

_NOT_FOLLOWED = (
    "num_beams", "bad_words_ids", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length",
    "min_new_tokens", "forced_eos_token_id", "sequence_bias", "repetition_penalty",
)  # fmt: skip


def suppressed_of(config: Any) -> Suppressed | None:
    """The tokens that a configuration rules out; None: it names none."""
    names = ("suppress_tokens", "begin_suppress_tokens")
    always, first = (tuple(getattr(config, name, None) or ()) for name in names)
    return Suppressed(always, first) if always or first else None


def note_of(config: Any) -> list[str]:
    """A note on what a configuration asks for in vain, if anything."""
    asked = [n for n in _NOT_FOLLOWED if getattr(config, n, None) not in (None, 0, 1, [], {})]
    if not asked:
        return []
    return [f"generate ignores {', '.join(asked)} of the generation's configuration"]
