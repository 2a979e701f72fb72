"""Decode-select: the tokens of a version that reads every text anew, what it adds, scorers and refusals."""

import numpy as np
import pytest

from accel.ir.errors import InputError, RecipeError
from accel.runtime.decode.logits_processors import Processed
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.loop import desel
from accel.runtime.loop.desel import Desel
from accel.runtime.sample.standard import Standard

from ...draft_case import plain, rows_of
from ...search_case import Text, searched

NEW, MARK, RANK = 40, "-", 160


def shaped(seen, logits):
    """A mark behind two tokens each, an end behind fourteen; the second item is a weak one."""
    size = seen.size - 5
    if size == 14:
        token = 0
    elif size % 3 == 2:
        token = 13
    elif size in (3, 4):
        token = int(np.argsort(logits)[RANK])
    else:
        return logits
    return np.where(np.arange(logits.size) == token, logits, -np.inf).astype(np.float32)


COLD = Processed(Standard(), 320, processors=[shaped])
HOT = Processed(Standard(temperature=1.5), 320, processors=[shaped])
PROMPTS = [np.random.default_rng(n).integers(1, 320, 5).tolist() for n in (0, 1, 9)]


ENDS = [[0]] * 3


def logs_of(toy, prompt, tokens, start):
    """The log-probability of tokens from `start` on, in one reading."""
    logits = toy.oracle(np.array([*prompt, *tokens])).astype(np.float64)[len(prompt) - 1 : -1]
    logits -= logits.max(1, keepdims=True)
    logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return [float(logs[i, t]) for i, t in enumerate(tokens)][start:]


def published(toy, prompt, eos, seed, samples, scorer=None):
    """(tokens, how many items were added, how many were not)."""
    tokenizer = Tokenizer(toy.path / "tokenizer.json")
    rng = np.random.default_rng(seed)
    best = Text(toy, prompt, rng, NEW, eos, COLD)
    best.write()
    if best.tokens[-1] not in eos:
        return best.tokens, 0, 0
    base = best.tokens[:-1]
    mine = list(dict.fromkeys(p.strip() for p in tokenizer.decode(base).split(MARK) if p.strip()))
    pool = []
    for child in rng.spawn(samples):
        other = Text(toy, prompt, child, NEW, eos, HOT)
        other.write()
        for item in map(str.strip, other.decoded(tokenizer.decode).split(MARK)):
            known = [one.lower() for one in [*mine, *pool]]
            if item and item.lower() not in known:
                pool.append(item)
    if scorer is not None:
        numbers = scorer("", [*mine, *pool])
        least, scores = min(numbers[: len(mine)]), numbers[len(mine) :]
        ids = [tokenizer.encode(MARK + item, special=False) for item in pool]
    else:
        parts, seen = [[]], ""
        stream = tokenizer.stream()
        for token, log in zip(base, logs_of(toy, prompt, base, 0), strict=True):
            seen += stream.push(token)
            if MARK in seen:
                seen = seen[seen.rindex(MARK) + 1 :]
                parts += [[]] if parts[-1] else []
            parts[-1].append(log)
        least = min(np.mean(part) for part in parts)
        ids = [tokenizer.encode(MARK + item, special=False) for item in pool]
        fits = [len(base) + len(more) < NEW and not set(more) & set(eos) for more in ids]
        scores = [
            np.mean(logs_of(toy, prompt, [*base, *more], len(base))) if fit else -np.inf
            for more, fit in zip(ids, fits, strict=True)
        ]
    tokens, added = list(base), 0
    for score, _, more in sorted(zip([-s for s in scores], range(len(ids)), ids, strict=True)):
        if -score >= least and len(tokens) + len(more) < NEW and not set(more) & set(eos):
            tokens += more
            added += 1
    return [*tokens, best.tokens[-1]], added, len(ids) - added


def long(prompt, texts):
    return [float(len(text) % 5) for text in texts]


def found(toy, ends, seed=0, scorer=None, sampler=HOT):
    return [
        searched(toy, Desel(4, MARK), [p], scorer, sampler, seed, limit=NEW, eos=eos)[0][0].tokens
        for p, eos in zip(PROMPTS, ends, strict=True)
    ]


@pytest.mark.parametrize("scorer", [None, long], ids=["likelihood", "scorer"])
def test_tokens_are_those_of_texts_read_anew(toy, scorer):
    added = left = 0
    for seed in range(2):
        wanted = [
            published(toy, p, eos, seed, 4, scorer) for p, eos in zip(PROMPTS, ENDS, strict=True)
        ]
        assert found(toy, ENDS, seed, scorer) == [tokens for tokens, *_ in wanted]
        added, left = added + sum(n for _, n, _ in wanted), left + sum(n for *_, n in wanted)
    assert added and left, (added, left)


def test_a_threshold_by_the_best_item_is_caught(toy, monkeypatch):
    """The control."""
    monkeypatch.setattr(desel, "min", max, raising=False)
    wanted = [published(toy, p, eos, 0, 4)[0] for p, eos in zip(PROMPTS, ENDS, strict=True)]
    assert found(toy, ENDS) != wanted


def test_all_items_are_read_in_one_call_over_one_list(toy):
    prompt, eos = PROMPTS[0], ENDS[0]
    rows, stats = searched(toy, Desel(4, MARK), [prompt], None, HOT, 0, limit=NEW, eos=eos)
    want, added, left = published(toy, prompt, eos, 0, 4)
    assert rows[0].tokens == want and added + left > 3
    rng = np.random.default_rng(0)
    texts = [Text(toy, prompt, rng, NEW, eos, COLD)]
    texts += [Text(toy, prompt, one, NEW, eos, HOT) for one in rng.spawn(4)]
    for text in texts:
        text.write()
    longest = max(len(text.tokens) for text in texts)
    assert stats["calls"] == 1 + (longest - 1) + 1, "the prompt, a call a token, and the items"


def test_greedy_requests_and_lists_without_an_end_stay_as_they_are(toy):
    for sampler, eos in ((COLD, ENDS), (HOT, [[]] * 3)):
        want = [
            plain(toy.session(), rows_of([p], COLD, limit=NEW, eos=e))[0]
            for p, e in zip(PROMPTS, eos, strict=True)
        ]
        assert found(toy, eos, sampler=sampler) == want


def test_what_does_not_fit_is_refused(toy):
    with pytest.raises(RecipeError, match="samples"):
        Desel(0)
    with pytest.raises(InputError, match="separator is blank"):
        Desel(separator=" ").check(Tokenizer(toy.path / "tokenizer.json"))
    with pytest.raises(InputError, match="has no tokenizer"):
        Desel().check(None)
    (row,) = rows_of(PROMPTS[:1], score=lambda token, logits: {})
    with pytest.raises(InputError, match="leave logprobs unset"):
        Desel().tokens(None, [row], None)
