"""FastCoT over the toy: what its rationale is, what is taken as it is, the answer behind it, ends, bad input."""

from types import SimpleNamespace

import numpy as np
import pytest

from accel.compiler.assemble import assemble
from accel.ir.errors import InputError, RecipeError
from accel.ir.recipe import Recipe
from accel.runtime.artifact.artifact import open_artifact
from accel.runtime.backends.onnx.backend import OrtBackend
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.logits_processors import Processed
from accel.runtime.decode.structured_outputs import StructuredOutputsParams
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.loop import fastcot
from accel.runtime.loop.fastcot import FastCoT
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.sample.standard import Standard
from accel.runtime.session.session import Session

from ...draft_case import plain, rows_of
from ..test_logits_processors import held_to

PROMPTS = [[5, 17, 200, 3, 88], [9], list(range(40, 61))]
WARM = Standard(temperature=0.3, top_k=4)
ANSWER = " so the"


def run(toy, rows, *options, answer=ANSWER):
    """The rows' tokens, the calls, and of each row that came so far: (its new tokens then, the tokens taken as is)."""
    parts, take = {}, fastcot._Rounds._take

    def spied(self, i, ids, logits):
        parts.setdefault(i, (list(self._rows[i].tokens), ids.tolist()))
        take(self, i, ids, logits)

    model = SimpleNamespace(tokenizer=Tokenizer(toy.path / "tokenizer.json"))
    with pytest.MonkeyPatch.context() as patched, toy.session(batch=len(rows)) as session:
        patched.setattr(fastcot._Rounds, "_take", spied)
        list(FastCoT(*options, answer).tokens(session, rows, DecodeContext(model=model)))
        assert session.lengths.tolist() == [row.seen.size - 1 for row in rows]
        return [row.tokens for row in rows], session.stats["calls"], parts


def law_of_parts(toy, sampler=Standard()):  # noqa: B008  (frozen)
    """An exact rationale, guesses, the answer's beginning, and what plain decoding makes of all of them."""
    begins = Tokenizer(toy.path / "tokenizer.json").encode(ANSWER, special=False)
    whole = plain(toy.session(batch=3), rows_of(PROMPTS, sampler, limit=40))
    sizes = []
    for window in (0, 1, 5):
        for passes in (1, 2, 7):
            rows = rows_of(PROMPTS, sampler, limit=40)
            got, calls, parts = run(toy, rows, window, passes)
            reasoned = 0
            for i, (exact, given) in parts.items():
                assert exact == whole[i][: len(exact)] and len(exact) >= passes
                assert given[len(given) - len(begins) :] == begins
                assert window or len(exact) == passes
                assert len(given) - len(begins) <= window
                sizes.append(len(given) - len(begins))
                if sampler.greedy:
                    size = len(exact) + len(given)
                    assert got[i][:size] == exact + given
                    rest = rows_of([[*PROMPTS[i], *got[i][:size]]], limit=40 - size)
                    assert got[i][size:] == plain(toy.session(), rest)[0]
                reasoned = max(reasoned, 40 - len(exact) - len(given))
            assert calls == passes + reasoned
    assert max(sizes) == 5 and min(sizes) == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("sampler", [Standard(), WARM])
def test_its_parts(toy, sampler):
    law_of_parts(toy, sampler)


@pytest.mark.few(1)
@pytest.mark.parametrize("broken", ["trusts", "forgets"])
def test_rationales_or_answers_that_are_others_are_caught(toy, monkeypatch, broken):
    if broken == "trusts":  # all guesses are taken
        monkeypatch.setattr(fastcot._Rounds, "_judge", fastcot._Rounds._take)
    else:  # those that are taken as they are are no context
        take = fastcot._Rounds._take

        def forgets(self, i, ids, logits):
            take(self, i, ids, np.repeat(logits[:1], len(logits), 0))

        monkeypatch.setattr(fastcot._Rounds, "_take", forgets)
    with pytest.raises(AssertionError):
        law_of_parts(toy)


@pytest.mark.parametrize("sampler", [Standard(), WARM, Standard(repetition_penalty=1.3)])
def test_with_passes_enough_it_is_plain_decoding(toy, sampler):
    want = plain(toy.session(batch=3), rows_of(PROMPTS, sampler, limit=30))
    for window in (0, 4, 50):
        rows = rows_of(PROMPTS, sampler, limit=30)
        got, calls, parts = run(toy, rows, window, 30)
        assert got == want and not parts and calls <= 30
        assert window or calls == 30
    assert sum(row.drafting["accepted"] for row in rows)


def test_guesses_end_where_nothing_may_follow(toy):
    """The guesses come there, and the text never does."""
    want = plain(toy.session(batch=3), rows_of(PROMPTS, limit=30))
    rows = rows_of(PROMPTS, limit=30)
    for row in rows:
        row.sampler = Processed(Standard(), toy.vocab, processors=[held_to(PROMPTS, want)])
    assert run(toy, rows, 6, 30)[0] == want


def test_a_row_that_writes_the_answer_itself_goes_on_by_itself(toy):
    tokenizer = Tokenizer(toy.path / "tokenizer.json")
    (want,) = plain(toy.session(), rows_of(PROMPTS[:1], limit=30))
    place = next(n for n in range(4, 20) if len(tokenizer.decode([want[n]])) > 1)
    answer = tokenizer.decode([want[place]])
    (got,), calls, parts = run(toy, rows_of(PROMPTS[:1], limit=30), 4, 25, answer=answer)
    exact, given = parts[0]
    assert got == want and not given and answer in tokenizer.decode(exact)
    assert calls > 30 - len(exact)


@pytest.mark.few(2)
@pytest.mark.parametrize("ends", [{"limit": 1}, {"limit": 5}, {"max_context": 24}, {"eos": 5}])
def test_rows_end_within_what_is_taken(toy, ends):
    """A guess that would end a row is not taken."""
    begins = Tokenizer(toy.path / "tokenizer.json").encode(ANSWER, special=False)
    whole = plain(toy.session(batch=3), rows_of(PROMPTS))
    free = run(toy, rows_of(PROMPTS), 6, 3)
    if "eos" in ends:
        exact, given = free[2][0]
        ends = {"eos": [next(token for token in given if token not in exact)]}
    rows = rows_of(PROMPTS, **ends)
    got, _, parts = run(toy, rows, 6, 3)
    for i, (exact, given) in parts.items():
        if "eos" not in ends:
            assert rows[i].finish in ("length", "context") and exact == whole[i][: len(exact)]
            assert (exact + given)[: len(got[i])] == got[i][: len(exact + given)]
        else:
            assert given[len(given) - len(begins) :] == begins
            assert not set(ends["eos"]) & set(given[: len(given) - len(begins)])
    assert "eos" not in ends or len(parts[0][1]) < len(free[2][0][1])


def test_an_answer_is_taken_in_calls_that_a_session_has_room_for(toy, monkeypatch):
    """As of caches that are about to encode tokens: a wider call would read other values."""
    want, few, _ = run(toy, rows_of(PROMPTS), 0, 1)
    run_, widths = Session.run, []

    def spied(self, tokens, *given, **more):
        widths.append(np.shape(tokens)[1])
        return run_(self, tokens, *given, **more)

    monkeypatch.setattr(Session, "run", spied)
    monkeypatch.setattr(Session, "room", property(lambda self: np.array([2, 9, 1])))
    got, calls, _ = run(toy, rows_of(PROMPTS), 0, 1)
    assert got == want and calls > few
    (ids,) = {len(Tokenizer(toy.path / "tokenizer.json").encode(ANSWER, special=False))}
    assert max(widths) == 1 + ids <= 9


def test_bad_input(toy):
    assert assemble(Recipe.load("fastcot")).grade == "approximate"
    for options, why in (((-1,), "window is -1; give 0 to 256"), ((1, 0), "passes is 0")):
        with pytest.raises(RecipeError, match=f"loop.fastcot: {why}"):
            FastCoT(*options)
    with pytest.raises(InputError, match="answer is text, but this model has no tokenizer"):
        FastCoT(answer="x").check(None)
    artifact = open_artifact(toy.path)
    with CompiledModel(
        OrtBackend(artifact), artifact.facts, recipe={"tables": {"loop": {"use": "fastcot"}}},
        tokenizer=Tokenizer(toy.path / "tokenizer.json"), artifact=artifact,
    ) as model:  # fmt: skip
        with pytest.raises(InputError, match="structured_outputs: .* a grammar cannot rule"):
            model.generate("a", structured_outputs=StructuredOutputsParams(regex="[a-z]*"))
        assert len(model.generate("for i in", 20, eos=[], logprobs=1).logprobs[0]) == 20
