"""What loops hold to that ask in one call what every token of an answer is: a row gets the text that it gets alone,
and again with the same seed; a stream that is left leaves a session that can be used; models of another kind are
refused in words.
"""

import dataclasses

import numpy as np
import pytest

import accel
from accel.ir.axis import Axis
from accel.ir.errors import InputError
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.loop.ut5 import Ut5
from accel.runtime.sample.standard import Standard

from ..both_ways_case import SOURCES, built
from ..diffusion_case import Filler

AXIS = Axis("loop", "accel.runtime.loop")
WHOLE = [
    name
    for name in AXIS.names()
    if AXIS.method(name).masked_diffusion and "canvas" not in AXIS.method(name).asks
]


def texts(name, loop, sources, temperature=0.0, seed=3):
    """The tokens of each source, all in one session."""
    model = built(name)
    start = model.facts.encoder.start
    rows = [
        Row(
            np.array(start), Standard(temperature=temperature), np.random.default_rng(seed + len(one)),
            limit=9, max_context=model.facts.max_context,
        )
        for one in sources
    ]  # fmt: skip
    came = [[] for _ in rows]
    with model._sessions.encoded([np.array(one) for one in sources], [None] * len(rows)) as session:
        for i, token in loop.tokens(session, rows, DecodeContext()):
            came[i].append(token)
        assert session.batch == len(rows) and not session.lengths.any()
    assert came == [row.tokens for row in rows] and all(row.finish for row in rows)
    return came


def law_rows(name, loop):
    """Alone as in a batch and in another order; again with the same seed."""
    for temperature in (0.0, 0.8):
        try:
            together = texts(name, loop, SOURCES, temperature)
        except InputError as error:
            assert temperature and "does not sample" in str(error)
            continue
        assert together == texts(name, loop, SOURCES, temperature)
        assert together == texts(name, loop, SOURCES[::-1], temperature)[::-1]
        assert together == [texts(name, loop, [one], temperature)[0] for one in SOURCES]
        assert len(set(map(str, together))) > 1


@pytest.mark.few(1)
@pytest.mark.parametrize("name", WHOLE)
def test_a_row_gets_what_it_gets_alone(name):
    law_rows(name, AXIS.build(name, **AXIS.small(name)))


@dataclasses.dataclass(frozen=True)
class Shared(Ut5):
    """All rows draw from one generator."""

    def tokens(self, session, rows, context):
        for row in rows:
            row.rng = rows[0].rng
        yield from super().tokens(session, rows, context)


def test_rows_that_share_random_numbers_are_seen():
    with pytest.raises(AssertionError):
        law_rows("ut5", Shared())


@pytest.mark.few(1)
@pytest.mark.parametrize("name", WHOLE)
def test_a_stream_that_is_left(name):
    said = {"max_new_tokens": 9, "eos": [], "seed": 3}
    stream = built(name).stream(encoder_input=SOURCES[0], **said)
    first = next(stream)
    stream.close()
    out = built(name).generate(encoder_input=SOURCES[:1], **said)
    assert stream.tokens == out.tokens[0][: len(stream.tokens)] and out.tokens[0][0] == first


@pytest.mark.few(1)
@pytest.mark.parametrize("name", WHOLE)
def test_models_of_another_kind_are_refused(name, build):
    causal = build("llama")
    with pytest.raises(accel.RecipeError, match=f"loop = {name} decodes masked-diffusion models"):
        accel.optimize(causal.model, {"loop": {"use": name}}, target="eager", max_context=64)
    row = Row(np.array([3]), Standard(), np.random.default_rng(0), limit=4, max_context=64)
    with (
        causal.compiled.session() as session,
        pytest.raises(InputError, match="loop = autoregressive"),
    ):
        list(AXIS.build(name).tokens(session, [row], DecodeContext()))
    if AXIS.build(name).unfit(built("ut5").facts):
        with pytest.raises(accel.RecipeError, match="Filler gives no"):
            accel.optimize(Filler(False), {"loop": {"use": name}}, target="eager", max_context=64)
