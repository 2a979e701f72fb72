"""What every loop of a causal model holds to: a row's tokens are those that it gets alone, and come again with the same
seed; a stream that is left leaves its session a row for each prompt, of its first tokens; whatever the cache.
"""

from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import matrix_loops
import numpy as np
import pytest

from accel.ir.axis import Axis, find_axes
from accel.ir.errors import InputError, RecipeError
from accel.ir.invariants import PROVIDED, Invariant
from accel.ir.recipe import Recipe
from accel.runtime.decode.context import DecodeContext
from accel.runtime.draft.model import Model
from accel.runtime.length.fixed import Fixed
from accel.runtime.loop import Base
from accel.runtime.loop.autoregressive import Autoregressive
from accel.runtime.loop.first_finish import FirstFinish
from accel.runtime.sample.standard import Standard
from accel.runtime.session.session import Session
from accel.runtime.verify.sample_match import SampleMatch

from ..draft_case import against, rows_of
from ..kv_case import table
from ..part_case import of_any
from ..prefill_case import built

AXIS = Axis("loop", "accel.runtime.loop")
CAUSAL = [name for name in AXIS.names() if not AXIS.method(name).masked_diffusion]
WARM = Standard(temperature=0.8, top_k=20)
SAMPLERS = (Standard(), WARM)
PROMPTS = [np.random.default_rng(n).integers(3, 50, n) for n in (17, 5, 9)]
NEW = 12
TREES = {"draft": {"use": "token-recycling"}}  # whose sessions take trees
CACHES = {
    "whole": {},
    "evicted": {
        "kv.score": table("h2o"),
        "kv.budget": table("uniform", tokens_kept=12),
        "kv.when": {"use": "every", "tokens": 4},
    },
    "paged": {"kv.reuse": {"use": "paged-prefix", "block": 4, "blocks": 64}},
    "coded": {"kv.codec": {"use": "kivi", "bits": 4}},
}


def providing(wanted):
    """Tables of the methods of the graph that make invariants hold, but for a draft model."""
    found = {}
    for axis in find_axes().values():
        for name in axis.names() if axis.name.startswith("kv.") else ():
            if axis.build(name).provides & wanted:
                found[axis.name] = {"use": name, **axis.small(name)}
    return found


@cache
def opened(name, cache):
    """The model that a loop decodes, and what it is given beside sessions; None: the recipe is refused."""
    loop = AXIS.build(name, **AXIS.small(name), **of_any("loop", name))
    beside = loop.asks.get("draft") == ""
    tables = {"loop": {"use": name, **AXIS.small(name)}, **matrix_loops.reaching("loop", name)}
    if beside:  # it has the model itself as its draft model: no other need be built
        tables = {}
        if against(Recipe(tables=CACHES[cache]), name):
            return None
    tables |= providing(loop.relies & PROVIDED - {Invariant.DRAFT_MODEL})
    try:
        model = built("llama", tables={**tables, **CACHES[cache]})
    except RecipeError:
        return None
    methods = dict(model._methods)
    if beside:
        methods = {"draft": Model(), "verify": SampleMatch(), "length": Fixed(4)}
        methods["tree"] = find_axes()["tree"].build("chain")
    words = matrix_loops._words(model.facts.vocab_size)
    plain = SimpleNamespace(
        session=built("llama", tables=TREES).session, tokenizer=words, facts=model.facts, costs=matrix_loops.FREE,
        draft_model=None,
    )  # fmt: skip
    told = SimpleNamespace(
        tokenizer=words, facts=model.facts, draft_model=plain, costs=matrix_loops.FREE
    )
    return model, loop, lambda: DecodeContext(methods, matrix_loops.FREE, told)


def rows(prompts, sampler, seed):
    return rows_of(prompts, sampler, seed, limit=NEW, max_context=100)


def decoded(model, loop, told, prompts, sampler, seed=3):
    """The tokens of each row; None where the loop does not sample."""
    given, came = rows(prompts, sampler, seed), [[] for _ in prompts]
    with model.session(len(prompts)) as session:
        try:
            for i, token in loop.tokens(session, given, told()):
                came[i].append(token)
        except InputError as error:
            assert not sampler.greedy and "temperature" in str(error), error
            return None
    assert came == [row.tokens for row in given] and all(row.finish for row in given)
    return came


def law_rows(model, loop, told, samplers=SAMPLERS):
    """Alone as in a batch, and again with the same seed."""
    for sampler in samplers:
        together = decoded(model, loop, told, PROMPTS, sampler)
        if together is None:
            continue
        alone = [decoded(model, loop, told, [prompt], sampler)[0] for prompt in PROMPTS]
        assert alone == together, "tokens of another row"


def law_left(model, loop, told):
    """The session of a stream that is left holds a row's first tokens, and nothing else."""
    given = rows(PROMPTS, Standard(), 3)
    with model.session(len(PROMPTS)) as session:
        tokens = loop.tokens(session, given, told())
        next(tokens)
        tokens.close()
        assert session.batch == len(PROMPTS), "rows are left over"
        seen = [
            [*row.seen[:held], 7] for row, held in zip(given, session.lengths.tolist(), strict=True)
        ]
        assert all(
            n == 0 or row.prompt.size <= n <= max(row.prompt.size, row.seen.size - 1)
            for n, row in zip(session.lengths, given, strict=True)
        ), "it holds tokens that no row has"
        got = session.run([[7]] * len(PROMPTS))[:, 0]
    for line, ids in zip(got, seen, strict=True):
        with model.session() as session:
            if len(ids) > 1:
                session.prompt([ids[:-1]])
            want = session.run([ids[-1:]])[0, 0]
        np.testing.assert_allclose(line, want, atol=1e-3, rtol=1e-3)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("cache", CACHES)
def test_a_row_gets_what_it_gets_alone_whatever_the_cache(name, cache):
    if (found := opened(name, cache)) is None:
        assert cache != "whole", "it goes with nothing"
        pytest.skip("the recipe is refused")
    law_rows(*found)


@pytest.mark.parametrize("name", CAUSAL)
def test_a_stream_that_is_left_leaves_its_session(name):
    law_left(*opened(name, "whole"))


# Loops that break a law


@dataclass(frozen=True)
class Peeks(Autoregressive):
    """Draws all rows' tokens with the numbers of the first."""

    def rounds(self, session, rows, context):
        for row in rows:
            row.rng = rows[0].rng
        return super().rounds(session, rows, context)


class Numbers:
    rng = np.random.default_rng(0)


@dataclass(frozen=True)
class Forgets(Autoregressive):
    """Its random numbers are not the request's."""

    def rounds(self, session, rows, context):
        for row in rows:
            row.rng = Numbers.rng
        return super().rounds(session, rows, context)


@dataclass(frozen=True)
class Stays(Base):
    """A search that leaves the rows of its branches."""

    def tokens(self, session, rows, context):
        session.prompt([row.prompt[:5] for row in rows])
        session.select(np.repeat(np.arange(len(rows)), 2))
        for i, row in enumerate(rows):
            row.accept(5, None)
            yield i, 5


@pytest.mark.parametrize("broken", [Peeks(), Forgets()], ids=["peeks", "forgets"])
def test_the_law_of_rows_catches_numbers_that_are_shared(broken):
    model, _, told = opened("autoregressive", "whole")
    with pytest.raises(AssertionError, match="another row"):
        law_rows(model, broken, told)


def test_the_law_of_rows_catches_branches_in_another_order(monkeypatch):
    select = Session.select

    def turned(self, rows):
        select(self, rows if len(rows) != self.batch else np.asarray(rows)[::-1])

    model, _, told = opened("first-finish", "whole")
    monkeypatch.setattr(Session, "select", turned)
    with pytest.raises(AssertionError, match="another row"):
        law_rows(model, FirstFinish(), told)


def test_the_law_of_streams_catches_rows_and_tokens_that_stay():
    model, _, told = opened("autoregressive", "whole")
    with pytest.raises(AssertionError, match="rows are left over"):
        law_left(model, Stays(), told)

    @dataclass(frozen=True)
    class Runs(Stays):
        def tokens(self, session, rows, context):
            session.run([[5] * 20] * len(rows))
            for i, row in enumerate(rows):
                row.accept(5, None)
                yield i, 5

    with pytest.raises(AssertionError, match="no row has"):
        law_left(model, Runs(), told)
