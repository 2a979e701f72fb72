"""freqkv: a full cache is resampled along its tokens by their low frequencies, and keys take new places."""

import models
import numpy as np
import pytest
import torch

import accel
from accel.ir.errors import PassError, RecipeError
from accel.passes.kv.keep.freqkv import FreqKV

from ....kv_case import evicting, held, kept, recipe
from ....kv_slots import B, D, G, build, choose, slots
from ....session_ways import close, oracle, singles
from .test_key_rerotate import fresh, rotated


def resampled(x, few):
    """x [N,D] -> [N',D]: low frequencies of the even extension, by an FFT, read at N' times."""
    n = len(x)
    k = np.arange(n)[:, None]
    even = np.fft.fft(np.concatenate((x, x[::-1])), axis=0)[:n]
    spectrum = (even * np.exp(-0.5j * np.pi * k / n)).real / n  # of cos(pi (2t + 1) k / 2N)
    times = np.cos(np.pi * (2 * np.arange(few)[:, None] + 1) * np.arange(few) / (2 * few))
    spectrum[0] /= 2
    return times @ spectrum[:few]


def made(keep, x, count):
    """Keys and values of `count` places, of keys that are not rotated."""
    b, g, s, _ = x.shape
    where = torch.arange(s).expand(b, g, s)
    real = torch.ones(b, g, count, dtype=torch.bool)
    return keep(x, 2 * x, where, real, torch.arange(count))


def law_low_frequencies(keep, sinks, recent, n=29, count=17):
    x = torch.randn(2, 1, n, 3, generator=torch.Generator().manual_seed(n))
    found, values = made(keep, x, count)
    for b in range(2):
        own = x[b, 0].double().numpy()
        middle = resampled(own[sinks : n - recent], count - sinks - recent)
        want = np.concatenate((own[:sinks], middle, own[n - recent :]))
        assert np.allclose(found[b, 0], want, atol=1e-5)
        assert np.allclose(values[b, 0], 2 * want, atol=2e-5)


class HighToo(FreqKV):
    """Each second token goes, whatever its frequencies."""

    def __call__(self, keys, values, positions, real, ranks):
        return keys[:, :, ranks * 29 // 17], values[:, :, ranks * 29 // 17]


def test_the_span_is_resampled_by_its_low_frequencies():
    for sinks, recent in ((0, 0), (3, 0), (2, 4)):
        law_low_frequencies(FreqKV(sinks=sinks, recent=recent), sinks, recent)
    law_low_frequencies(FreqKV(sinks=3), 3, 0, n=700, count=353)  # angles stay exact
    for broken in (HighToo(), FreqKV(sinks=1), FreqKV(sinks=0, recent=1)):
        with pytest.raises(AssertionError):
            law_low_frequencies(broken, 0, 0)


def test_waves_of_low_frequencies_and_constants_stay_what_they_are():
    n, few = 24, 12
    k, t = torch.arange(few), torch.arange(n)[:, None]
    waves = (torch.pi * (2 * t + 1) * k / (2 * n)).cos()  # [N,N']: of each frequency one channel
    found, _ = made(FreqKV(sinks=0), waves[None, None], few)
    want = (torch.pi * (2 * torch.arange(few)[:, None] + 1) * k / (2 * few)).cos()
    torch.testing.assert_close(found[0, 0], want, atol=1e-5, rtol=1e-5)
    assert (found[..., 0] - 1).abs().max() < 1e-6  # W 1 = 1
    high = (torch.pi * (2 * t + 1) * (few + 2) / (2 * n)).cos()
    assert made(FreqKV(sinks=0), high[None, None], few)[0].abs().max() < 1e-5


def law_unrotated(back):
    """Keys that are the same before rotation are so after it, at their places."""
    x, _ = fresh(0)
    plain = torch.randn(B, G, 1, D, generator=torch.Generator().manual_seed(1))
    where = torch.arange(16).expand(B, G, -1)
    x["recent_k"] = rotated(plain.expand(-1, -1, 16, -1), back * where)
    x["recent_v"] = torch.ones_like(x["recent_v"])
    found = choose(x, 6, build("score", "streaming-llm"), keep=FreqKV(sinks=2, recent=1), most=6)
    assert found["pos"].tolist() == torch.arange(6).expand(B, G, -1).tolist()
    want = rotated(plain.expand(-1, -1, 6, -1), found["pos"])
    torch.testing.assert_close(found["k"], want, atol=3e-5, rtol=1e-4)
    torch.testing.assert_close(found["v"], torch.ones_like(found["v"]))


def test_keys_are_transformed_before_their_rotation():
    law_unrotated(1)
    with pytest.raises(AssertionError):
        law_unrotated(-1)  # they were rotated the other way round


def test_a_row_that_loses_nothing_keeps_its_bits():
    x = slots(0, base=(0, 0, 0), recent=(16, 5, 16))
    score = build("score", "streaming-llm")
    found, plain = (
        choose(x, 7, score, keep=keep, most=7) for keep in (FreqKV(), build("keep", "key-rerotate"))
    )
    for name in ("k", "v"):
        assert torch.equal(found[name][1, :, :5], plain[name][1, :, :5])
        assert not torch.equal(found[name][0], plain[name][0])


# Sessions

FULL = {"use": "full", "tokens": 24}


@pytest.fixture(scope="module")
def case(stateful):
    tables = {**recipe("streaming-llm", 13, keep="freqkv"), "kv.when": FULL}
    return evicting(stateful("llama"), tables)


def test_until_the_cache_is_full_it_is_the_model(case):
    tokens = case.tokens(2, 40)
    ours, plain = (
        case.session(2),
        case.session(2, budget={"use": "uniform", "tokens_kept": 1 << 20}),
    )
    for one in (ours, plain):
        one.run(tokens[:, :20])
    for i in range(20, 24):  # the 24th is read as ever, and then the cache is full
        assert np.array_equal(ours.run(tokens[:, [i]]), plain.run(tokens[:, [i]]))
    assert ours.lengths.tolist() == [13, 13] and plain.lengths.tolist() == [24, 24]
    off = np.abs(ours.run(tokens[:, [24]]) - plain.run(tokens[:, [24]])).max()
    assert off > 1e-3


def test_the_cache_never_exceeds_its_size_while_the_text_may(case):
    session, rng = case.session(1), np.random.default_rng(0)
    sizes, total = set(), 0
    while total < 3 * case.program.facts.max_context:
        count = int(rng.integers(1, 11))
        session.run(rng.integers(3, case.program.facts.vocab_size, (1, count)))
        assert np.isfinite(session.run(np.array([[5]]))).all()
        total += count + 1
        sizes.add(held(session))
        assert held(session) == session.lengths[0] < 24
    assert len(sizes) > 5 and (kept(session)[0][0] == np.arange(13)).all()


def test_rows_are_as_they_are_alone(case):
    tokens = case.tokens(2, 60)
    both = case.session(2)
    both.run(tokens[:, :30], [30, 9])
    logits = singles(both, tokens[:, 30:50])
    for row, n in enumerate((30, 9)):
        alone = case.session(1)
        alone.run(tokens[[row], :n])
        if not row:
            close(singles(alone, tokens[[row], 30:50]), logits[[row]], 1e-3)
    assert both.lengths.max() < 24


@pytest.mark.long
def test_graphs_give_what_the_oracle_does():
    tables = {"kv": {"score": {"use": "streaming-llm"}, "keep": {"use": "freqkv", "sinks": 2}}}
    tables["kv"] |= {"budget": {"use": "uniform", "tokens_kept": 13}, "when": FULL}
    tokens = np.random.default_rng(0).permutation(50)[None, :46].repeat(2, 0)
    model = models.make("llama", 2)
    with accel.optimize(model, tables, max_context=128, max_batch=2) as compiled:
        eager = oracle(compiled)
        found = []
        for one in (compiled, eager):
            with one.session(2) as session:
                session.run(tokens[:, :21], [21, 5])
                found.append([*singles(session, tokens[:, 21:45]), session.stats["kv_bytes"]])
        for a, b in zip(*found, strict=True):
            close(a, b, 1e-3)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "model, score, message",
    [
        ("llama", "h2o", "kv.keep = freqkv makes tokens that were never read, .*`mass` of each"),
        ("gpt2", "streaming-llm", "not rotated by position .*leave kv.keep = freqkv out"),
        ("mistral", "streaming-llm", "sees a window .*leave kv.keep = freqkv out"),
    ],
)
def test_what_cannot_be_made_is_refused(stateful, model, score, message):
    with pytest.raises(PassError, match=message):
        evicting(stateful(model), recipe(score, keep="freqkv"))


def test_bad_options_are_refused():
    with pytest.raises(RecipeError, match="kv.keep.freqkv: sinks is -1; give at least 0"):
        FreqKV(sinks=-1)
