"""Re-translation: each piece's output is that of the source so far, and the figures are those of their papers."""

from copy import copy

import numpy as np
import pytest
from transformers import AutoModelForSeq2SeqLM

import accel
from accel.compiler.smoke.tiny_models import randomise, small_config
from accel.ir.axis import find_axes
from accel.ir.encoder import EncoderFacts
from accel.ir.errors import InputError
from accel.ir.facts import Facts
from accel.runtime.model.retranslate import (
    Retranslation,
    Translation,
    average_lagging,
    common,
    settled,
)

PIECES, NEW = [[5, 9], [7], [11, 3, 8]], 8
SAID = {"max_new_tokens": NEW, "repetition_penalty": 2.0}  # or a small model stays at one token


@pytest.fixture(scope="module")
def translator():
    config = small_config("t5")
    module = randomise(AutoModelForSeq2SeqLM.from_config(config), "t5").eval()
    module.generation_config.decoder_start_token_id = 1
    with accel.optimize(module, "base", target="eager", max_context=64) as built:
        yield built


@pytest.fixture(params=["autoregressive", "beam-patience"])
def model(translator, request):
    other = copy(translator)
    other._loop = find_axes()["loop"].build(request.param)
    return other


@pytest.mark.few(1)
def test_each_translation_is_that_of_the_source_so_far(model):
    said = {"max_new_tokens": NEW} if model._loop.searches else SAID
    run = model.retranslate(PIECES, suffix=[2], **said)
    found = list(run)
    sources = [sum(PIECES[: n + 1], []) + [2] for n in range(len(PIECES))]
    wanted = [model.generate(encoder_input=[one], **said) for one in sources]
    before, calls = [], 0
    for one, output, source in zip(found, wanted, sources, strict=True):
        tokens = output.tokens[0][: -1 if output.stats["finish"] == ["eos"] else None]
        assert one.tokens == tokens and one.source == len(source) and one.text is None
        assert before[: one.stays] == tokens[: one.stays] and one.erased == len(before) - one.stays
        assert (
            before[one.stays : one.stays + 1] != tokens[one.stays : one.stays + 1]
            or not tokens[one.stays :]
        )
        before, calls = tokens, calls + output.stats["calls"]
    assert run.stats["calls"] == calls and run.stats["pieces"] == 3
    assert len({str(one.tokens) for one in found}) > 1 and run.stats["erased"] > 0


def test_a_piece_is_asked_for_when_the_one_before_is_translated(model):
    asked = []

    def pieces():
        for piece in PIECES:
            asked.append(piece)
            yield piece

    run = model.retranslate(pieces(), max_new_tokens=2)
    assert not asked
    next(run)
    assert len(asked) == 1 and run.stats["normalized_erasure"] == 0


def plain_figures(outputs, sources):
    """NE and AL as their papers define them, with the delay of a token that of its last change."""
    final, n = outputs[-1], len(outputs)
    erased = 0
    for a, b in zip(outputs, outputs[1:], strict=False):
        k = 0
        while k < min(len(a), len(b)) and a[k] == b[k]:
            k += 1
        erased += len(a) - k
    g = [
        min(sources[j] for j in range(n) if all(o[: t + 1] == final[: t + 1] for o in outputs[j:]))
        for t in range(len(final))
    ]
    gamma, total, tau = len(final) / sources[-1], 0.0, 0
    for t in range(1, len(final) + 1):
        total, tau = total + g[t - 1] - (t - 1) / gamma, t
        if g[t - 1] == sources[-1]:
            break
    return erased / len(final), total / tau


def law_figures(lag=average_lagging):
    rng = np.random.default_rng(0)
    for _ in range(50):
        sources = np.cumsum(rng.integers(1, 4, 5)).tolist()
        outputs = [rng.integers(0, 2, rng.integers(1, 6)).tolist() for _ in sources]
        told, before = [], []
        for tokens, source in zip(outputs, sources, strict=True):
            stays = common(before, tokens)
            told.append(Translation(tokens, None, source, stays, len(before) - stays))
            before = tokens
        erasure, lagging = plain_figures(outputs, sources)
        assert sum(one.erased for one in told) / len(before) == erasure
        assert lag(settled(told), sources[-1]) == pytest.approx(lagging)


def test_figures_are_those_of_the_papers():
    law_figures()


def test_a_lag_without_the_pace_is_seen():
    with pytest.raises(AssertionError):
        law_figures(lambda read, source: sum(read) / len(read))


def test_wait_k_lags_k():
    """Of a source and target of one length, k tokens ahead: AL is k."""
    assert average_lagging([3, 4, 5, 6, 6, 6], 6) == 3
    assert average_lagging([], 4) == 0


@pytest.mark.parametrize(
    ("pieces", "options", "words"),
    [
        ([], {}, "there are no pieces"),
        ([[3], []], {}, "piece 1 is empty; give text, or at least one token id"),
        ([""], {}, "piece 0 is empty"),
        ([[3], "text"], {}, "piece 1 is 'text', but those before are token ids"),
        ([[[3]]], {}, r"piece 0 is \[\[3\]\]; give text, or token ids"),
        (["text"], {}, "this model has no tokenizer"),
        ("text", {}, "pieces are 'text'; give a list"),
        (3, {}, "pieces are 3"),
        ([[3]], {"suffix": [[2]]}, "suffix is"),
        ([[3]], {"suffix": [10**6]}, "not in the vocabulary"),
        ([[3]], {"n": 2}, "leave encoder_input and n out"),
        ([[3]], {"temperatur": 2}, "temperature"),
        ([[3] * 99], {}, "takes 64 at most"),
    ],
)
def test_what_is_refused(translator, pieces, options, words):
    with pytest.raises(InputError, match=words):
        list(translator.retranslate(pieces, max_new_tokens=2, **options))


@pytest.mark.parametrize(
    "encoder, words",
    [
        (None, "has no encoder.*give an encoder-decoder model"),
        (EncoderFacts(0, 9, (4, 9)), "features of one size"),
    ],
)
def test_a_model_whose_source_cannot_arrive_in_pieces_is_refused(encoder, words):
    with pytest.raises(InputError, match=words):
        Retranslation([[3]], print, Facts("One", 9, 9, encoder=encoder), None)
