"""Patterns of codebooks: laid out and read back, beside transformers' delay pattern of MusicGen."""

import numpy as np
import pytest
import torch

from accel.ir.errors import InputError
from accel.runtime.inputs.codebooks import Pattern, coarse_first, delay, flat, stack_delay

MAKERS = [delay, flat, coarse_first, stack_delay]
SIZES = [(1, 1), (7, 1), (1, 4), (5, 4), (16, 4), (19, 3)]
PAD = 99


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("frames, books", SIZES)
def test_what_is_laid_is_read_back(make, frames, books):
    """Every code lies in one place, and comes after the codebooks before it of its frame."""
    pattern = make(frames, books)
    codes = np.random.default_rng(0).integers(0, PAD, (2, books, frames))
    laid = pattern.laid(codes, PAD)
    assert (pattern.read(laid) == codes).all() and (laid != PAD).sum() == codes.size
    when = {one: n for n, step in enumerate(pattern.steps) for one in step}
    for frame in range(frames):
        turns = [when[frame, book] for book in range(books)]
        assert turns == sorted(set(turns)) or make is coarse_first and turns[0] <= min(turns[1:])


@pytest.mark.parametrize("frames", [4, 9])
@pytest.mark.parametrize("books", [2, 4])
def test_delay_is_that_of_musicgen(frames, books):
    """The first column of its mask is the start token, which no step brings."""
    from transformers import MusicgenDecoderConfig, MusicgenForCausalLM

    config = MusicgenDecoderConfig(
        num_codebooks=books, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, ffn_dim=8,
        vocab_size=PAD, pad_token_id=PAD, bos_token_id=PAD, max_position_embeddings=32,
    )  # fmt: skip
    model = MusicgenForCausalLM(config)
    start = torch.full((books, 1), PAD)
    _, mask = model.build_delay_pattern_mask(start, PAD, frames + books)
    pattern = delay(frames, books)
    assert ((mask[:, 1:] == -1).numpy() == (pattern.places >= 0)).all()
    codes = np.random.default_rng(0).integers(0, PAD, (books, frames))
    whole = np.concatenate([start, pattern.laid(codes, PAD)], 1)
    applied = model.apply_delay_pattern_mask(torch.tensor(whole), mask).numpy()
    assert (applied == whole).all()


def test_limits_of_the_delays():
    assert delay(6, 3, [0, 0, 0]).steps == tuple(tuple((f, q) for q in range(3)) for f in range(6))
    assert delay(4, 1) == flat(4, 1)
    assert stack_delay(9, 1) != delay(9, 1) and stack_delay(2, 4) == delay(2, 4)
    late = delay(3, 2, [0, 3])
    assert late.steps == coarse_first(3, 2).steps
    assert len(stack_delay(16, 4).steps) == 16 + 3 and len(flat(16, 4).steps) == 64


def under_way(pattern):
    """At each step, the frames that have begun and lack a codebook when it ends."""
    seen: dict[int, int] = {}
    for step in pattern.steps:
        for frame, _ in step:
            seen[frame] = seen.get(frame, 0) + 1
        yield [frame for frame, count in seen.items() if count < pattern.codebooks]


def law_apart(pattern):
    for frames in under_way(pattern):
        assert all(abs(a - b) > 1 for a in frames for b in frames if a != b)


@pytest.mark.parametrize("frames, books", [(24, 4), (11, 3), (26, 12), (40, 2)])
def test_no_two_frames_next_to_each_other_are_under_way(frames, books):
    law_apart(stack_delay(frames, books))


def test_frames_side_by_side_are_seen():
    with pytest.raises(AssertionError):
        law_apart(delay(24, 4))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: delay(0, 4), "0 frames and 4 codebooks; give 1 or more"),
        (lambda: flat(3, 0), "3 frames and 0 codebooks"),
        (lambda: delay(3, 2, [0]), r"delays are \[0\]; give 2 numbers"),
        (lambda: delay(3, 2, [0, -1]), "0 or more each"),
        (lambda: stack_delay(0, 2), "0 frames and 2 codebooks"),
        (lambda: Pattern(1, 1, ()), r"\(0, 0\) comes in 0 places"),
        (lambda: Pattern(1, 1, (((0, 0),), ((0, 0),))), "comes in 2 places"),
        (lambda: Pattern(1, 1, (((1, 0),),)), r"has no \(1, 0\)"),
        (lambda: Pattern(2, 1, (((0, 0), (1, 0)),)), "step 0 brings two frames of one codebook"),
        (lambda: delay(3, 2).laid(np.zeros((3, 2), int), PAD), r"takes \[...,2,3\]"),
        (lambda: delay(3, 2).read([1, 2]), "steps have shape"),
    ],
)
def test_what_is_refused(call, words):
    with pytest.raises(InputError, match=words):
        call()


def test_a_model_of_several_codebooks_is_refused_in_words():
    from transformers import MusicgenDecoderConfig, MusicgenForCausalLM

    import accel

    config = MusicgenDecoderConfig(
        num_codebooks=2, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, ffn_dim=8, vocab_size=PAD,
    )  # fmt: skip
    with pytest.raises(
        accel.CaptureError, match="codes of 2 codebooks.*accel.runtime.inputs.codebooks"
    ):
        accel.optimize(MusicgenForCausalLM(config), target="eager", max_context=32)
