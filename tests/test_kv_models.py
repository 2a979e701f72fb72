"""Eviction on models of other kinds, and on the ONNX target: handled right, or refused with the reason."""

from functools import cache

import models
import numpy as np
import pytest
import torch

import accel
from accel.compiler.smoke.smoke import compare
from accel.compiler.smoke.tiny_models import randomise, small_config
from accel.ir.errors import PassError
from accel.passes.kv.compress import Compress
from accel.passes.kv.keep.drop import Drop
from accel.passes.kv.score.knorm import KNorm
from accel.runtime.kv.budget.uniform import Uniform
from accel.runtime.model.load import from_artifact
from accel.runtime.session.state import recurrent_history as past

from .kv_case import FOREVER, conversation, encoded, evicting, kept, ragged_is_alone, recipe
from .session_ways import close, singles

KINDS = [
    "gemma2",
    "plain_latent",
    "jamba",
    "bart",
]  # windows and caps; a latent; recurrences; an encoder


@pytest.fixture(scope="module")
def made(stateful):
    """made(kind, score, **axes) -> a small model of the kind that evicts."""

    @cache
    def get(kind, score, **axes):
        return evicting(stateful(kind), recipe(score, kept=8, **axes))

    return get


@pytest.fixture(scope="module", autouse=True)
def bart():
    """An encoder-decoder among the models that fixtures find by name."""

    def make():
        from transformers import AutoModelForSeq2SeqLM

        config = small_config("bart", encoder_layers=1)
        model = randomise(AutoModelForSeq2SeqLM.from_config(config), "bart").eval()
        model.generation_config.decoder_start_token_id = 1
        return model

    models.ARCHITECTURES["bart"] = make
    yield
    del models.ARCHITECTURES["bart"]


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_only_the_tokens_that_stay_are_seen(made, kind):
    """Against a full cache in which the rest is hidden."""
    case = made(kind, "streaming-llm")
    tokens = case.tokens(1, 28)
    sessions = [case.session(), case.session(budget=FOREVER)]
    for s in sessions:
        encoded(case, s)
        s.run(tokens[:, :20])
        s.end_prompt()
    held = sessions[1]._core.backend._state["kv.pos"]
    sessions[1]._core.backend._state["kv.pos"] = held.masked_fill((held >= 2) & (held < 14), -1)
    some, full = (singles(s, tokens[:, 20:24]) for s in sessions)
    close(some, full)
    some, full = (s.run(tokens[:, 24:]) for s in sessions)
    close(some, full)
    dense = case.session(budget=FOREVER)
    encoded(case, dense)
    dense.run(tokens[:, :24])
    assert not np.allclose(dense.run(tokens[:, 24:]), some, atol=1e-3), "the rest does count"


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("score, axes", [("streaming-llm", {}), ("snapkv", {"budget": "ada-kv"})])
def test_a_row_of_a_batch_is_that_row_alone(made, kind, score, axes):
    ragged_is_alone(made(kind, score, **axes), [30, 17, 6])


@pytest.mark.long
def test_windows_keep_nothing_that_they_do_not_see(made):
    session = made("gemma2", "streaming-llm").session()
    session.run(made("gemma2", "streaming-llm").tokens(1, 20))
    session.end_prompt()
    found = {layer: where[0, 0].tolist() for layer, where in kept(session).items()}
    assert found == {0: [15, 16, 17, 18, 19], 1: [0, 1, 14, 15, 16, 17, 18, 19]}  # a window of 6


@pytest.mark.few(1)
@pytest.mark.parametrize("when", [{"use": "prompt"}, {"use": "every", "tokens": 6}])
def test_recurrent_state_goes_back_to_where_tokens_were_compressed(made, when):
    """Through more copies of it than are kept; queries are not looked at twice."""
    case = made("jamba", "snapkv", budget="ada-kv")
    tokens = case.tokens(2, 60)
    session, control = case.session(2, when=when), case.session(2, when=when)
    for s in (session, control):
        s.run(tokens[:, :10], [10, 9])
        s.end_prompt()
    if when["use"] == "prompt":
        for i in range(past.SNAPSHOTS + 2):
            session.run(tokens[:, 20 + i : 31 + i])
    else:
        session.run(tokens[:, 40:42])
    low = session.held_from
    assert (low == control.held_from).all() and (session.lengths > low).all()
    session.rewind(low)
    close(singles(session, tokens[:, 20:23]), singles(control, tokens[:, 20:23]))
    for s in (session, control):
        s.run(tokens[:, 23:29], [6, 4])
        s.end_prompt()
    for a, b in zip(kept(session).values(), kept(control).values(), strict=True):
        assert np.array_equal(a, b)
    close(singles(session, tokens[:, 30:33]), singles(control, tokens[:, 30:33]))


def test_a_copy_that_may_be_thrown_away_is_caught(made, monkeypatch):
    monkeypatch.setattr(past.RecurrentHistory, "pin", lambda self, holder: None)
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        test_recurrent_state_goes_back_to_where_tokens_were_compressed(made, {"use": "prompt"})


@pytest.mark.parametrize(
    "kind, reason",
    [("bloom", r"bias by position \(ALiBi"), ("mamba", "no layer of this model has a key cache")],
)
def test_what_cannot_be_is_refused(stateful, kind, reason):
    program = stateful(kind)
    with pytest.raises(PassError, match=reason):
        report = Compress(KNorm(), Uniform(), Drop()).run(program)
        raise PassError(str(report.refused[0]))


def test_a_second_reader_of_the_cache_is_refused(stateful):
    program = stateful("llama")
    stored = next(
        n
        for n in program.step.graph.nodes
        if str(n.target).startswith("accel.kv_append") and n.meta["val"].dim() == 4
    )
    with program.step.graph.inserting_after(stored):
        program.step.graph.call_function(torch.ops.aten.relu.default, (stored,)).meta["val"] = (
            stored.meta["val"]
        )
    with pytest.raises(
        PassError, match="relu_default reads the cache of layer 0 outside its attention"
    ):
        Compress(KNorm(), Uniform(), Drop()).run(program)


# ONNX


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "score, axes",
    [("snapkv", {"budget": "ada-kv", "keep": "value-merge"}), ("h2o", {"when": "every"})],
)
def test_onnx_is_the_eager_target(score, axes):
    """Ragged prompts and single tokens, turn by turn, in every variant of the step."""
    model, tables = models.make("llama", 2), recipe(score, **axes)
    tables["kv.when"] |= {"tokens": 3} if axes.get("when") == "every" else {}
    with accel.optimize(model, tables, max_context=128, max_batch=3, verify=False) as built:
        eager = accel.optimize(
            model, tables, target="eager", max_context=128, max_batch=3, verify=False
        )
        tokens = np.stack([np.random.default_rng(i).permutation(98)[:88] for i in range(3)])
        want = conversation(eager.session(3), tokens, [40, 23, 9])
        for variant in built.artifact.entries["step"].graphs:
            with (
                from_artifact(built.artifact, kernels=variant) as compiled,
                compiled.session(3) as session,
            ):
                for got, there in zip(
                    conversation(session, tokens, [40, 23, 9]), want, strict=True
                ):
                    close(got, there)
                bytes_ = session.stats["kv_bytes"]
                with session.fork() as other:
                    assert other.stats["kv_bytes"] == bytes_
                    close(other.run(tokens[:, :1]), session.run(tokens[:, :1]))
                session.rewind(0)
                for got, there in zip(
                    conversation(session, tokens, [40, 23, 9]), want, strict=True
                ):
                    close(got, there)


@pytest.mark.long
def test_smoke_compares_a_recipe_that_counts():
    """It is rewound to nothing."""
    model = models.make("llama", 2)
    compiled = accel.optimize(
        model, "h2o", target="eager", max_context=64, max_batch=4, verify=False
    )
    errors = compare(model, compiled)
    assert len(errors) == 4 and 0 < max(errors.values()) < 1e-5, errors
