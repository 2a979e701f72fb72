"""FINCH chunk by chunk: the question runs behind each chunk, and chooses what stays of it."""

import numpy as np
import pytest

from accel.runtime.session import core

from ....kv_case import evicting, kept, kept_part, recipe
from ....session_ways import close

CHUNK, KEPT = 16, 6
LENGTHS, BEGINS = [31, 20], [26, 14]  # the second question begins in the first chunk
CHUNKS = {"use": "chunk"}


@pytest.fixture(scope="module")
def plain(stateful):
    return evicting(stateful("llama"), recipe("finch", KEPT))


@pytest.fixture(scope="module")
def moving(stateful):
    return evicting(stateful("llama"), recipe("finch", KEPT, keep="key-rerotate"))


def by_chunks(case, tokens, question=BEGINS):
    """A session after a prompt in chunks, of which the last is still there."""
    session = case.session(2, when=CHUNKS)
    if question is not None:
        session.mark(question=question)
    logits = session.run(tokens, LENGTHS)
    return session, logits


def alone(case, tokens, row):
    """A session that held the first chunk and the question alone, and how many tokens the question has behind it."""
    more = tokens[row, max(CHUNK, BEGINS[row]) : LENGTHS[row]]
    budget = {"use": "uniform", "tokens_kept": KEPT + len(more)}
    session = case.session(1, budget=budget)
    session.mark(question=min(CHUNK, BEGINS[row]))
    session.prompt(np.concatenate([tokens[row, :CHUNK], more])[None])
    return session, len(more)


def law_chunk(case, tokens, session):
    """Of the first chunk stays what stays of it and the question alone."""
    for row in range(2):
        brute, more = alone(case, tokens, row)
        for layer, where in kept(brute).items():
            assert (where[0, :, KEPT:] >= 0).all() and where.shape[2] == KEPT + more
            assert np.array_equal(kept(session)[layer][row], where[0, :, :KEPT])
            for part in ("k", "v"):
                own, want = (kept_part(s, part)[layer] for s in (session, brute))
                close(own[row], want[0, :, :KEPT])


@pytest.mark.few(1)
@pytest.mark.parametrize("which", ["plain", "moving"])
def test_a_chunk_is_scored_by_the_question(which, request, monkeypatch):
    monkeypatch.setattr(core, "CHUNK", CHUNK)
    case = request.getfixturevalue(which)
    tokens = case.tokens(2, 31)
    session, logits = by_chunks(case, tokens)
    law_chunk(case, tokens, session)
    assert np.isfinite(logits[0]).all() and np.isfinite(logits[1, :20]).all()
    with pytest.raises(AssertionError):  # nobody says where the question is
        law_chunk(case, tokens, by_chunks(case, tokens, None)[0])
    other = np.concatenate([tokens[:, :CHUNK], tokens[::-1, CHUNK:]], axis=1)
    law_chunk(case, other, by_chunks(case, other)[0])
    with pytest.raises(AssertionError):  # of another question
        law_chunk(case, other, session)


def test_later_chunks_read_what_is_left_and_the_question_stays(plain, moving, monkeypatch):
    monkeypatch.setattr(core, "CHUNK", CHUNK)
    tokens = plain.tokens(2, 31)
    for case in (plain, moving):
        session, logits = by_chunks(case, tokens)
        rest = case.session(2, when={"use": "prompt"})
        rest.run(tokens[:, :CHUNK])
        whole = rest.run(tokens[:, CHUNK:], [15, 4])
        assert not np.allclose(logits[0, CHUNK:], whole[0], atol=1e-3), "nothing was dropped"
        session.end_prompt()
        if case is plain:
            assert session.lengths.tolist() == LENGTHS
            for where in kept(session).values():
                assert set(range(26, 31)) <= {*where[0, 0]} and (where[1] >= 14).all()
        else:
            assert session.lengths.tolist() == [KEPT, KEPT]
        assert np.isfinite(session.run(tokens[:, :1])).all()


def test_each_row_is_alone(plain, monkeypatch):
    monkeypatch.setattr(core, "CHUNK", CHUNK)
    tokens = plain.tokens(2, 31)
    together, logits = by_chunks(plain, tokens, [26, -1])
    for row, question in enumerate((26, None)):
        one = plain.session(1, when=CHUNKS)
        if question is not None:
            one.mark(question=question)
        close(one.run(tokens[[row], : LENGTHS[row]])[0], logits[row, : LENGTHS[row]])
        for layer, where in kept(one).items():
            assert np.array_equal(kept(together)[layer][row], where[0])
