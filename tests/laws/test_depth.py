"""Laws of the depth axis: all layers on is the full model, and what a plan leaves out is left out. Those of
methods that delete layers: `test_depth_deletes.py`.
"""

import numpy as np
import pytest

import accel
from accel.ir.axis import find_axes
from accel.ir.errors import InputError, RecipeError
from accel.passes.depth._delete import Deletion

from ..depth_case import LAYERS, NEVER, TOKENS, WHOLE, far, oracle, plan
from ..router_case import opened

AXIS = find_axes()["depth"]
NAMES = AXIS.names()
JOINTS = [("llama", "nested"), ("gemma2", "propagate"), ("gpt2", "propagate")]


def on(compiled):
    """What makes a call run all layers."""
    depth = compiled.facts.depth
    exits = {"threshold": NEVER} if depth.threshold is not None else {}
    return {"run_layers": WHOLE, **exits}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [n for n in NAMES if not issubclass(AXIS.method(n), Deletion)])
def test_all_layers_on_is_the_full_model_bit_for_bit(name, deep):
    _, compiled = deep("llama", use=name, **AXIS.small(name), **opened("llama", LAYERS, name))
    assert compiled.report["grade"] == AXIS.build(name, **AXIS.small(name)).grade
    _, base = deep("llama")
    for kernels in {"grouped", "native"} & set(base.artifact.entries["step"].graphs):
        with (
            accel.load(base.artifact.path, kernels=kernels) as full,
            accel.load(compiled.artifact.path, kernels=kernels) as conditional,
            full.session() as want,
            conditional.session() as got,
        ):
            for start, end in ((0, 9), (9, 10), (10, 14), (6, 7), (7, 8)):
                want.rewind(start)
                got.rewind(start)
                part = TOKENS[:1, start:end]
                assert np.array_equal(got.run(part, **on(conditional)), want.run(part))


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "cache"), JOINTS)
def test_a_plan_runs_its_layers_and_no_others(name, cache, deep):
    module, compiled = deep(name, use="unified-skip", cache=cache)
    first = [plan(0, 1, 3), plan(0, 3), plan(3)]
    plans = first if cache == "nested" else [plan(1), plan(0, 2, 3), WHOLE]
    ran = np.zeros((LAYERS, TOKENS.shape[1]), bool)
    with compiled.session(2) as session:
        for start, end, run in (
            (0, 9, WHOLE),
            (9, 10, plans[0]),
            (10, 17, plans[1]),
            (17, 24, plans[2]),
        ):
            ran[:, start:end] = run[:, None]
            got = session.run(TOKENS[:, start:end], run_layers=run)
            assert far(got, oracle(module, TOKENS[:, :end], ran[:, :end])[:, start:]) < 1e-4
        session.rewind(9)  # and all of them again
        got = session.run(TOKENS[:, 9:12], run_layers=WHOLE)
        assert far(got, oracle(module, TOKENS[:, :12], ran[:, :12] | True)[:, 9:]) < 1e-4
    wrong = np.roll(ran, 1, axis=0)  # the control: with other layers other numbers
    assert far(oracle(module, TOKENS, wrong), oracle(module, TOKENS, ran)) > 1e-2


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "cache"), [*JOINTS[:2], ("llama", "calm")])
def test_onnx_is_the_eager_oracle_for_any_plans(name, cache, deep):
    method = (
        {"use": "calm", "first": 1, "every": 1, "threshold": NEVER}
        if cache == "calm"
        else {"use": "unified-skip", "cache": cache}
    )
    built = [deep(name, target, **method)[1] for target in ("onnx", "eager")]
    rng = np.random.default_rng(5)
    sessions = [compiled.session(2) for compiled in built]
    refused = 0
    for _ in range(14):
        held = sessions[0].lengths
        back = rng.integers(0, held + 1) if rng.random() < 0.3 else held
        counts = rng.integers(0, 4, 2)
        counts[rng.integers(2)] = 3
        tokens = rng.integers(0, 90, (2, 3))
        given = {"run_layers": rng.random(LAYERS) < 0.6} if rng.random() < 0.7 else {}
        if cache == "calm" and rng.random() < 0.7:
            given["threshold"] = float(rng.uniform(0.01, 0.5))
        if "run_layers" in given:
            given["run_layers"][rng.integers(LAYERS)] = True
        found = []
        for session in sessions:
            session.rewind(np.minimum(back, session.lengths))
            try:
                found.append(session.run(tokens, counts, **given))
            except InputError:
                refused += 1
                found.append(session.run(tokens, counts))
        assert far(*found) < 1e-4
        assert (sessions[0].lengths == sessions[1].lengths).all()
    assert (refused > 0) == (cache == "nested") and refused % 2 == 0


def test_by_default_a_prompt_runs_all_layers_and_a_token_the_plan(deep):
    module, compiled = deep("llama", use="unified-skip", cache="nested")
    chosen = np.array(compiled.facts.depth.plan)
    assert chosen.sum() == LAYERS // 2
    ran = np.repeat(WHOLE[:, None], 14, 1)
    with compiled.session() as session:
        session.run(TOKENS[:1, :8])
        for place in (8, 9):
            ran[:, place] = chosen
            got = session.run(TOKENS[:1, place : place + 1])
            assert (
                far(got, oracle(module, TOKENS[:1, : place + 1], ran[:, : place + 1])[:, -1:])
                < 1e-4
            )
        ran[:, 10:] = chosen[
            :, None
        ]  # what was left out stays off, until those tokens are forgotten
        got = session.run(TOKENS[:1, 10:14])
        assert far(got, oracle(module, TOKENS[:1, :14], ran)[:, 10:]) < 1e-4
        session.rewind(8)
        got = session.run(TOKENS[:1, 8:14])
        assert far(got, oracle(module, TOKENS[:1, :14], ran | True)[:, 8:]) < 1e-4
    one = compiled.generate(TOKENS[0, :8], 6).tokens
    assert (
        one
        == deep("llama", "eager", use="unified-skip", cache="nested")[1]
        .generate(TOKENS[0, :8], 6)
        .tokens
    )


def test_a_nested_cache_is_left_alone_and_a_propagated_one_is_written(deep):
    for name, cache, changes in (("llama", "nested", False), ("gpt2", "propagate", True)):
        _, compiled = deep(name, use="unified-skip", cache=cache)
        with compiled.session() as session:
            session.run(TOKENS[:1, :9])
            held = session._core.backend._buffers
            before = {name: held[name].copy() for name in ("kv.1.k", "kv.2.k")}
            session.run(TOKENS[:1, 9:12], run_layers=plan(0, 2, 3))
            assert np.array_equal(held["kv.1.k"], before["kv.1.k"]) is not changes
            assert not np.array_equal(held["kv.2.k"], before["kv.2.k"])


@pytest.mark.parametrize(("name", "cache"), [("llama", "nested"), ("gpt2", "propagate")])
def test_plans_of_rows_and_forks_stay_apart(name, cache, deep):
    _, compiled = deep(name, use="unified-skip", cache=cache)
    with compiled.session(2) as session:
        session.run(TOKENS[:, :5])
        session.run(TOKENS[:, 5:7], [2, 0], run_layers=plan(0, 3))  # row 0 alone lacks two layers
        other = session.fork()
        session.run(TOKENS[:, 5:7], [0, 2], run_layers=WHOLE)
        if cache == "nested":
            with pytest.raises(InputError, match="layer 1 was skipped for token 5 of row 0"):
                other.run(TOKENS[:, 5:6], run_layers=WHOLE)
        other.rewind([5, 5])
        again = other.run(TOKENS[:, 5:7], run_layers=WHOLE)
        assert far(again, compiled.logits(TOKENS[:, :7])[:, 5:]) < 1e-4
        other.close()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"run_layers": [True] * 3}, r"bool \[3\]; give 4 bools"),
        ({"run_layers": [False] * 4}, "skips every layer"),
        ({"run_layers": [0, 1, 1, 1]}, r"int64 \[4\]; give 4 bools"),
        ({"run_layers": [[True] * 4]}, r"bool \[1, 4\]"),
        ({"run_layers": [[True], [True, False]]}, "give 4 bools"),
        ({"run_layers": "all"}, "give 4 bools"),
        ({"threshold": 0.5}, "no early exits"),
    ],
)
def test_a_bad_plan_is_refused_and_changes_nothing(given, words, deep):
    _, compiled = deep("llama", use="unified-skip", cache="nested")
    with compiled.session() as session:
        session.run(TOKENS[:1, :3])
        with pytest.raises(InputError, match=words):
            session.run(TOKENS[:1, 3:5], **given)
        assert session.length == 3
        assert far(session.run(TOKENS[:1, 3:5]), compiled.logits(TOKENS[:1, :5])[:, 3:]) < 1e-4


def test_a_model_without_conditions_takes_no_plan(deep):
    with (
        deep("llama")[1].session() as session,
        pytest.raises(InputError, match="with a depth recipe"),
    ):
        session.run(TOKENS[:1], run_layers=WHOLE)


def test_a_nan_is_no_threshold(deep):
    with deep("llama", use="calm", first=1, every=1, threshold=NEVER)[1].session() as session:
        for value in (float("nan"), "0.5", True):
            with pytest.raises(InputError, match="threshold is"):
                session.run(TOKENS[:1], threshold=value)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("calm", {"threshold": -0.1}),
        ("calm", {"first": -1}),
        ("shortgpt", {"share": 1.0}),
        ("shortgpt", {"tokens": 0}),
        ("unified-skip", {"speedup": 0.5}),
        ("unified-skip", {"cache": "nestd"}),
    ],
)
def test_an_option_out_of_range_is_refused_by_the_name_of_its_table(name, options):
    with pytest.raises(RecipeError, match=f"^depth.{name}: {next(iter(options))}"):
        AXIS.build(name, **options)
