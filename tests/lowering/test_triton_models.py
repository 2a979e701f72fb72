"""Whole tiny models on the Triton target: what the eager one gives, whichever way a session is driven."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import models
import numpy as np
import pytest
import torch

import accel
from accel.compiler.pipeline import pipeline
from accel.ir.axis import find_axes
from accel.ir.capture.capture import capture
from accel.ir.errors import AccelError, Miscompiled
from accel.lowering import triton
from accel.lowering.triton.lowered import lower_program, triton_error
from accel.lowering.triton.rules import accel_attention
from accel.passes import run
from accel.passes.check import NumericCheck
from accel.passes.state.trees import Trees
from accel.runtime.backends.triton.backend import TritonBackend
from accel.runtime.model.compiled import CompiledModel

from .. import diffusion_case, test_canvas
from ..session_ways import close
from ..tree_case import PARENTS, ancestors
from .triton_case import needs_gpu, on_device

of_a_llama = pytest.mark.parametrize("both", ["llama"], indirect=True)
KINDS = ["llama", "gemma2", "plain_latent", "falcon_h1"]


def module(kind: str, count: int = 2) -> torch.nn.Module:
    return models.make(kind, count)


def beside(eager: CompiledModel) -> CompiledModel:
    """The same program on the Triton target."""
    lowered = lower_program(eager.program)
    return CompiledModel(TritonBackend(lowered), eager.facts, recipe=eager.recipe, program=lowered)


@pytest.fixture(scope="module", params=KINDS)
def both(request):
    """(kind, Triton, eager)"""
    eager = accel.optimize(
        module(request.param), target="eager", max_context=64, max_batch=2, verify=False
    )
    with eager, beside(eager) as model:
        yield request.param, model, eager


def driven(model: CompiledModel) -> list[np.ndarray]:
    """A ragged prefill, a token, a rewind, several tokens, a fork."""
    ids = np.random.default_rng(3).integers(3, 50, (2, 20))
    found = []
    with model.session(2) as session:
        found.append(session.run(ids[:, :7], [7, 4]))
        found.append(session.run(ids[:, 7:8]))
        session.rewind([6, 3])
        found.append(session.run(ids[:, 10:13]))
        with session.fork() as other:
            found.append(other.run(ids[:, 14:15]))
        found.append(session.run(ids[:, 15:17], last_only=True))
    return found


@pytest.mark.few(1)
def test_every_call_of_a_session_is_as_on_the_eager_target(both):
    for got, want in zip(driven(both[1]), driven(both[2]), strict=True):
        close(got, want)


@pytest.mark.long
def test_any_tokens_of_a_canvas_are_written():
    """Which are brought together in the buffers that the step reads."""
    module, compiled = diffusion_case.eager(False)
    with beside(compiled) as model:
        test_canvas.law_any_slots(module, model, calls=[[9, 8], [3, 2]])


@pytest.mark.few(1)
def test_greedy_tokens_are_the_same(both):
    _, model, eager = both
    prompts = [[5, 9, 40], [7, 7]]
    got, want = (m.generate(prompts, 4, eos=[]).tokens for m in (model, eager))
    assert got == want and len(got[0]) == 4


@of_a_llama
def test_what_a_layer_of_a_llama_is_made_of(both):
    graph = both[1].program.compiled["step"].module.graph
    calls = [n.target for n in graph.nodes if n.op == "call_function"]
    names = [getattr(c, "__name__", "") for c in calls]
    counts = {n: names.count(n) for n in ("attended", "place_both", "turned", "survey", "append")}
    assert counts == {"attended": 2, "place_both": 2, "turned": 2, "survey": 1, "append": 1}
    assert not {
        c for c in calls if str(c) in ("accel.attention.default", "accel.kv_append.default")
    }
    assert torch.ops.aten.copy_.default not in calls, "everything is written in place"


@of_a_llama
def test_buffers_stay_where_they_are(both):
    model = both[1]
    with model.session(1) as session:
        session.run(np.array([[3, 4, 5]]))
        backend = session._core.backend
        before = {n: t.data_ptr() for n, t in backend._state.items()}
        session.run(np.array([[6]]))
        session.rewind(2)
        session.run(np.array([[6]]))
        assert {n: t.data_ptr() for n, t in backend._state.items()} == before
        assert session.stats["kv_bytes"] == sum(
            t.numel() * t.element_size() for t in backend._state.values()
        )


def test_the_numeric_check_sees_a_wrong_kernel(monkeypatch):
    program = capture(models.tiny(), max_context=64)
    check = NumericCheck(program)
    lowered = lower_program(accel.optimize(models.tiny(), target="eager", verify=False).program)
    assert triton_error(lowered, check.cases) < 1e-4
    right = accel_attention.survey
    blind = lambda *args: (right(*args)[0], right(*args)[1] * 0)  # noqa: E731
    graph = lowered.compiled["step"].module.graph
    for node in graph.find_nodes(op="call_function", target=right):
        node.target = blind
    lowered.compiled["step"].module.recompile()
    with pytest.raises(Miscompiled, match="target 'triton' differs from the model"):
        triton_error(lowered, check.cases)


def test_optimize_builds_and_checks_it():
    with accel.optimize(models.tiny(), target="triton", max_context=32) as model:
        assert model.report["target"] == "triton" and model.report["errors"]["triton"] < 1e-4
        assert len(model.generate([3, 4], 3, eos=[]).tokens[0]) == 3
        with pytest.raises(AccelError, match="no artifact to save"):
            model.save("somewhere")
    with pytest.raises(AccelError, match="target 'triton' writes no files; use target='onnx'"):
        accel.optimize(models.tiny(), target="triton", out="somewhere")


def test_a_tree_in_one_call_is_as_on_the_eager_target():
    program = capture(module("mistral"), max_context=64)
    run(program, pipeline(recipe_passes=[Trees()]))
    lowered = lower_program(program)
    tokens = np.random.default_rng(4).integers(0, 90, (2, 5 + len(PARENTS)))

    def logits(call, move):
        state = {s.name: move(s.allocate(B=2, C=20)) for s in program.state}
        for ids, slot, tree in (
            (tokens[:, :5], 0, np.tri(5, dtype=bool)),
            (tokens[:, 5:], 5, ancestors()),
        ):
            places = np.broadcast_to(slot + tree.sum(1) - 1, ids.shape)
            given = {
                "tokens": ids, "positions": places, "rows": np.broadcast_to(np.arange(ids.shape[1]), ids.shape),
                "slots": np.full(2, slot), "tree": np.broadcast_to(tree, (2, *tree.shape)),
            }  # fmt: skip
            out = call(
                "step",
                {**move({n: torch.from_numpy(np.array(a)) for n, a in given.items()}), **state},
            )
            state = {n: out[f"{n}.next"] for n in state}
        return out["logits"].cpu()

    close(logits(lowered.run, on_device), logits(program.run, lambda x: x))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("score", "keep"), [("snapkv", "drop"), ("h2o", "drop"), ("k-centre", "subgen")]
)
def test_eviction_is_as_on_the_eager_target(score, keep):
    tables = {"kv": {"score": {"use": score}, "budget": {"use": "uniform", "tokens_kept": 8}}}
    if keep != "drop":
        tables["kv"]["keep"] = {"use": keep, "clusters": 3, "slots": 4}
    eager = accel.optimize(
        module("llama"),
        {"about": "", "papers": [], **tables},
        target="eager",
        max_context=64,
        verify=False,
    )
    prompt = np.random.default_rng(0).integers(3, 90, (1, 24)).tolist()
    with eager, beside(eager) as model:
        assert model.generate(prompt, 3, eos=[]).tokens == eager.generate(prompt, 3, eos=[]).tokens


@pytest.mark.long
@pytest.mark.parametrize("name", find_axes()["prefill.sparse"].names())
def test_sparse_prefill_is_as_on_the_eager_target(name):
    table = {"prefill.sparse": {"use": name, **find_axes()["prefill.sparse"].small(name)}}
    eager = accel.optimize(
        module("llama"), table, target="eager", max_context=64, max_batch=2, verify=False
    )
    tokens = np.random.default_rng(0).integers(3, 50, (2, 45))
    with eager, beside(eager) as model:
        found = []
        for each in (eager, model):
            with each.session(2) as session:
                found += [session.prompt(tokens, [45, 29]), session.run(tokens[:, :1])]
        close(found[2], found[0])
        close(found[3], found[1])


@pytest.mark.long
@pytest.mark.parametrize("recipes", [["kv-int8"], ["kv-int8", "knorm"]], ids=str)
def test_a_cache_in_8_bits_is_as_on_the_eager_target(recipes):
    with accel.optimize(
        module("llama"), recipes, target="eager", max_context=64, verify=False
    ) as eager:
        model = beside(eager)
        graph = model.program.compiled["step"].module.graph
        names = [getattr(n.target, "__name__", "") for n in graph.nodes if n.op == "call_function"]
        assert names.count("place_rounded") == 4 and names.count("attended") == 2
        assert not {n for n in names if n.startswith(("encode_rows", "decode_rows", "append"))} - {
            "append"
        }
        prompt = np.random.default_rng(0).integers(3, 90, (1, 12))
        with model.session() as session, eager.session() as other:
            assert {t.dtype for n, t in bound(session, "kv.0.k").items()} == {torch.int8}
            close(session.run(prompt), other.run(prompt))
            close(session.run(prompt[:, :1]), other.run(prompt[:, :1]))


@pytest.mark.parametrize("recipes", [["kv-float16"], ["kv-float16", "knorm"]], ids=str)
def test_a_cache_of_halves_is_as_on_the_eager_target(recipes):
    with accel.optimize(
        module("llama"), recipes, target="eager", max_context=64, verify=False
    ) as eager:
        model = beside(eager)
        graph = model.program.compiled["step"].module.graph
        read = [n.args[2] for n in graph.nodes if getattr(n.target, "__name__", "") == "attended"]
        dtypes = {x.meta["val"].dtype for parts in read for part in parts for x in part[:2]}
        assert len(read) == 2 and dtypes == {torch.float16}, "attention reads halves"
        prompt = np.random.default_rng(0).integers(3, 90, (1, 12))
        with model.session() as session, eager.session() as other:
            assert {t.dtype for n, t in bound(session, "kv.0.k").items()} == {torch.float16}
            close(session.run(prompt), other.run(prompt))
            close(session.run(prompt[:, :1]), other.run(prompt[:, :1]))


DEPTH = [{"use": "unified-skip"}, {"use": "calm", "threshold": 0.03}]


@pytest.mark.long
@pytest.mark.parametrize("table", DEPTH, ids=str)
def test_layers_under_conditions_are_as_on_the_eager_target(table):
    recipe = {"about": "", "papers": [], "depth": table}
    with accel.optimize(
        module("llama", 4), recipe, target="eager", max_context=64, verify=False
    ) as eager:
        model = beside(eager)
        prompt = np.random.default_rng(0).integers(3, 90, (1, 9))
        graph = model.program.compiled["step"].module.graph
        names = [getattr(n.target, "__name__", "") for n in graph.nodes]
        assert (
            "branch_layer_1" in names and names.count("survey") == 1 and "copy_" not in str(names)
        )
        with model.session() as session, eager.session() as other:
            for part in (prompt, prompt[:, :1], prompt[:, 1:2]):
                close(session.run(part), other.run(part))


def bound(session, name: str) -> dict[str, torch.Tensor]:
    session._core.backend.resize(256)
    return {name: session._core.backend._state[name]}


@of_a_llama
def test_sessions_in_threads_do_not_disturb_each_other(both):
    _, model, eager = both
    prompts = [[5, 9, 40], [8, 7, 30]]
    want = [eager.generate([p], 2, eos=[]).tokens[0] for p in prompts]
    with ThreadPoolExecutor() as pool:
        got = pool.map(lambda p: model.generate([p], 2, eos=[]).tokens[0], prompts)
    assert list(got) == want


# Where it cannot run

ASKS = """
import os
os.environ.pop("TRITON_INTERPRET", None)
from accel.lowering.triton import missing
print(missing())
import triton
os.environ["TRITON_INTERPRET"] = "1"
print(missing())
"""


def test_the_error_says_why_it_cannot_run_and_what_to_do():
    done = subprocess.run([sys.executable, "-c", ASKS], capture_output=True, text=True, check=True)
    without, late = done.stdout.splitlines()
    assert "triton was imported before TRITON_INTERPRET was set" in late
    if not torch.cuda.is_available():
        assert "no CUDA GPU; set TRITON_INTERPRET=1" in without and "target='onnx'" in without


def test_optimize_refuses_before_any_work(monkeypatch):
    with pytest.raises(
        AccelError, match="numerics = batch-invariant cannot be combined with target = triton"
    ):
        accel.optimize("there/is/no/model", "batch-invariant", target="triton")
    monkeypatch.setattr(triton, "missing", lambda: "the reason")
    with pytest.raises(AccelError, match="target 'triton': the reason"):
        accel.optimize("there/is/no/model", target="triton")


# On a GPU


@of_a_llama
@pytest.mark.skipif(**needs_gpu)
def test_decoding_is_recorded(both):
    kind, model, eager = both
    with model.session(1) as session:
        session.run(np.array([[3, 4, 5]]))
        for token in (6, 7, 8, 9):
            session.run(np.array([[token]]))
        recorded = session._core.backend._recorded
        assert len(recorded) == 1 and not recorded.refused
    close(model.logits([[3, 4, 5, 6, 7]]), eager.logits([[3, 4, 5, 6, 7]]))
