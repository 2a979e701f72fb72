"""Random small decoders, each compiled and held to its own module; more by tools/models/random_decoders.py."""

from functools import cache

import pytest
import random_decoders
from decoders.model import build
from decoders.spec import CHOICES, Spec, random_spec, settle
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import accel
from accel.ir.capture.flex import flex_uncompiled
from accel.runtime.session.session import Session

SPECS = st.builds(
    lambda case, parts: settle(Spec(case, **{**parts, "layers": 1})),
    st.integers(0, 999),
    st.fixed_dictionaries({name: st.sampled_from(choices) for name, choices in CHOICES.items()}),
)


PARTS = 10  # tests of their own, which run at the same time


@cache
def drawn() -> list[Spec]:
    """Thirty, the same each time."""
    specs = []

    @settings(
        deadline=None, derandomize=True, max_examples=30, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(SPECS)
    def draw(spec):
        specs.append(spec)

    draw()
    assert len(specs) == 30
    return specs


@pytest.mark.few(1)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_random_decoder_is_right_or_refused(part):
    for spec in drawn()[part::PARTS]:
        with flex_uncompiled():
            result = random_decoders.attempt(spec)
        about = f"{result.about}: {random_decoders.differences(spec)}"
        assert result.verdict in ("right", "refused"), about


@pytest.mark.long
@pytest.mark.parametrize("case", [0, 10])
def test_a_random_decoder_is_right_in_onnx(case):
    result = random_decoders.attempt(random_spec(case, seed=1), "onnx")
    assert result.verdict == "right", result.about


def test_a_spec_is_drawn_again_by_its_number():
    assert random_spec(7, seed=1) == random_spec(7, seed=1) != random_spec(7, seed=2)


# Controls: what `compare` is there to see


@pytest.fixture(scope="module")
def plain():
    with accel.optimize(build(Spec()), target="eager", max_context=48, max_batch=3) as compiled:
        yield compiled


@pytest.mark.parametrize("other", [{"mask": "window"}, {"case": 1}, {"head": "cap"}])
def test_another_model_is_told_apart(plain, other):
    assert not random_decoders.compare(build(Spec()), plain, 37, 0)
    assert "logits differ" in random_decoders.compare(build(Spec(**other)), plain, 37, 0)


def test_a_rewind_that_forgets_nothing_is_seen(plain, monkeypatch):
    monkeypatch.setattr(Session, "rewind", lambda self, length: None)
    assert random_decoders.compare(build(Spec()), plain, 37, 0).startswith("rewound row 0")


def test_padding_that_stays_is_seen(plain, monkeypatch):
    run = Session.run
    monkeypatch.setattr(Session, "run", lambda self, tokens, lengths=None: run(self, tokens))
    assert random_decoders.compare(build(Spec()), plain, 37, 0).startswith("after padding row 0")


def test_a_fault_of_accels_own_is_no_refusal(monkeypatch):
    def broken(*_, **__):
        raise accel.PassError("Rope changed what the program computes. Report it")

    monkeypatch.setattr(accel, "optimize", broken)
    assert random_decoders.attempt(Spec()).verdict == "crashed"
