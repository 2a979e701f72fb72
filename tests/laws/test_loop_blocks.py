"""What loops that fill blocks of masks behind a causal cache hold to: the published decoding that each one's test file
writes down; a block of one is plain decoding; and what is cached is what a prompt of the same tokens leaves.
"""

import dataclasses

import numpy as np
import pytest

from accel.runtime.loop import _ahead

from ..block_case import AXIS, NEW, PROMPTS, cached, compiled, decoded, greedy
from ..own_case import file_of

BLOCKS = [name for name in AXIS.names() if AXIS.method(name).blocks]


def own(name):
    """A method's own test file, which has CASES."""
    return file_of("runtime.loop", name, "CASES")


CASES = [(name, case) for name in BLOCKS for case in own(name).CASES]


def law_published(name, case):
    """Tokens and calls of each row alone, and its tokens among others."""
    together, _ = decoded(name, PROMPTS, **case.options)
    for prompt, among in zip(PROMPTS, together, strict=True):
        want, most = case.plain(prompt, NEW)
        (got,), calls = decoded(name, [prompt], **case.options)
        assert got == want == among and calls == most


def law_cache(name, options):
    """At every token the session holds first tokens of each row as a prompt leaves them, a chunk at a time."""
    seen = 0

    def watch(session, rows):
        nonlocal seen
        for i, row in enumerate(rows):
            held = int(session.lengths[i])
            assert held <= row.seen.size
            with compiled().session() as plain:
                plain.prompt(row.seen[None, :held])
                want = cached(plain)
            size = len(rows)
            for got, ours in zip(cached(session)[i::size], want, strict=True):
                np.testing.assert_allclose(got, ours, atol=2e-4, rtol=0)
            seen += 1

    decoded(name, PROMPTS[:2], 7, watch, **options)
    assert seen > 10


@pytest.mark.few(2)
@pytest.mark.parametrize("name, case", CASES, ids=str)
def test_tokens_are_those_of_the_published_loop(name, case):
    law_published(name, case)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_of_one_is_plain_decoding(name):
    (tokens,), calls = decoded(name, PROMPTS[:1], block=1)
    assert tokens == greedy(PROMPTS[0], NEW) and calls == NEW - 1


@pytest.mark.parametrize("name", BLOCKS)
def test_the_cache_is_that_of_a_prompt(name):
    law_cache(name, own(name).CASES[0].options)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_that_sees_another_way_is_seen(name, monkeypatch):
    """The control of what is published: one way in place of both, or both in place of one."""
    look = _ahead.look

    def other(session, asks):
        windows = {
            i: [dataclasses.replace(w, causal=not w.causal) for w in ask.windows]
            for i, ask in asks.items()
        }
        return look(
            session, {i: dataclasses.replace(a, windows=windows[i]) for i, a in asks.items()}
        )

    monkeypatch.setattr(_ahead, "look", other)
    with pytest.raises(AssertionError):
        for case in own(name).CASES:
            law_published(name, case)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_that_is_kept_is_seen(name, monkeypatch):
    """The control of what is cached: tokens that were computed beside masks."""
    look = _ahead.look

    def spoilt(session, asks):
        wider = {
            i: dataclasses.replace(ask, run=np.append(ask.run[:-1], 7)) if ask.run.size else ask
            for i, ask in asks.items()
        }
        return look(session, wider)

    monkeypatch.setattr(_ahead, "look", spoilt)
    with pytest.raises(AssertionError):
        law_cache(name, own(name).CASES[0].options)
