"""Encoder-decoder models: what the encoder takes, by the model's configuration, and names for it.

Encoder and decoder are captured together, as one graph over shared parameters; `passes/state/cross.py`
splits it into the entries `encode` and `step`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accel.ir.encoder import DETECT, EncoderFacts, SpeechTokens
from accel.ir.errors import CaptureError

INPUTS, INPUT_POSITIONS, FEATURES = "inputs", "inputs.pos", "features"  # of the encoder


def encoder_facts(model: Any, max_context: int, notes: list[str]) -> EncoderFacts:
    """What the encoder takes; notes get what shortens it. Raises CaptureError where accel cannot tell."""
    name, start = model.main_input_name, tuple(_start(model))
    if name == "input_ids":
        longest = min([max_context, *_limits(model.config, notes)])
        return EncoderFacts(_vocabulary(model), longest, (), start)
    frames = getattr(model.config, "max_source_positions", None)
    mel = getattr(model.config, "num_mel_bins", None)
    strides = [m.stride[0] for m in model.get_encoder().children() if isinstance(m, nn.Conv1d)]
    if name != "input_features" or frames is None or mel is None or not strides:
        raise CaptureError(
            f"{type(model).__name__} takes {name}, whose shape accel does not know; accel "
            "compiles encoders over token ids, or over a fixed number of audio frames as in Whisper"
        )
    speech = _speech(model, start[0], notes) if start else None
    if speech is not None:
        start = tuple(token for token in speech.start() if token != DETECT)
    sizes = (mel, frames * int(torch.tensor(strides).prod()))
    return EncoderFacts(0, frames, sizes, start, speech)


def _vocabulary(model: Any) -> int:
    """How many token ids the encoder takes."""
    encoder = model.get_encoder()
    try:
        return int(encoder.get_input_embeddings().num_embeddings)
    except (AttributeError, NotImplementedError):
        table = getattr(encoder, "embed_tokens", None)
    if not isinstance(table, nn.Embedding):
        raise CaptureError(f"{type(model).__name__}: its encoder has no table of token embeddings")
    return table.num_embeddings


def _limits(config: Any, notes: list[str]) -> list[int]:
    """Lengths that a configuration does not let the encoder's input exceed."""
    limit = getattr(config, "max_position_embeddings", None)
    found = [limit] if isinstance(limit, int) and limit > 0 else []
    if getattr(config, "attention_type", None) == "block_sparse":
        # up to here such an encoder attends to all of its input, by its own choice
        found.append((5 + 2 * config.num_random_blocks) * config.block_size)
        notes.append(
            f"the encoder takes {found[-1]} tokens at most: beyond that its attention is "
            "block-sparse, which accel does not support"
        )
    return found


def _start(model: Any) -> list[int]:
    """The decoder's first tokens: its start token, or else bos, then those that generation forces after it."""
    holders = [
        h for h in (getattr(model, "generation_config", None), model.config) if h is not None
    ]
    for name in ("decoder_start_token_id", "bos_token_id"):
        for holder in holders:
            first = getattr(holder, name, None)
            if isinstance(first, int):
                return _forced(holder, first)
    return []


def _speech(model: Any, first: int, notes: list[str]) -> SpeechTokens | None:
    """The tokens of a generation configuration that names languages, tasks, or one for texts without times."""
    told = getattr(model, "generation_config", None)
    names = ("lang_to_id", "task_to_id", "no_timestamps_token_id")
    ids, tasks, last = (getattr(told, name, None) for name in names)
    if not ids and not tasks and last is None:
        return None
    forced = _forced_ids(told) or _forced_ids(model.config)
    languages = _languages(ids or {})
    language, task = getattr(told, "language", None), getattr(told, "task", None)
    known = isinstance(language, str) and language.lower() in languages
    if language is not None and not known:
        notes.append(
            f"generate ignores language = {language!r} of the generation's configuration, which its lang_to_id lacks"
        )
    if task is not None and task not in (tasks or {}):
        notes.append(
            f"generate ignores task = {task!r} of the generation's configuration, which its task_to_id lacks"
        )
        task = None
    return SpeechTokens(
        first,
        languages,
        dict(tasks or {}),
        language if known else None,
        task,
        tuple(token for token in forced if token is not None),
        bool(forced) and forced[0] is not None,
        last,
        bool(getattr(told, "return_timestamps", None)),
        getattr(told, "max_initial_timestamp_index", None),
    )


def _languages(ids: dict[str, int]) -> dict[str, int]:
    """Languages by their tokens, as lang_to_id has them, and by their codes and English names."""
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    by_code = {token.strip("<|>"): index for token, index in ids.items()}
    named = {name: by_code[code] for name, code in TO_LANGUAGE_CODE.items() if code in by_code}
    return {**ids, **by_code, **named}


def _forced(holder: Any, first: int) -> list[int]:
    """A first token and those that are forced after it."""
    forced = _forced_ids(holder)
    bos = getattr(holder, "forced_bos_token_id", None)
    if bos is not None:
        forced[:1] = [bos]
    return [first, *(token for token in forced if token is not None)]


def _forced_ids(holder: Any) -> list[int | None]:
    """forced_decoder_ids from place 1 on, as far as they follow one another; None for a place that is left open."""
    pairs: dict[int, int | None] = dict(getattr(holder, "forced_decoder_ids", None) or [])
    found: list[int | None] = []
    while len(found) + 1 in pairs:
        found.append(pairs[len(found) + 1])
    return found
