"""The variant chosen by measurement and the costs of calls, and how both are kept."""

import dataclasses
import json
import time

import models
import onnx
import pytest
from typer.testing import CliRunner

import accel
from accel import cli
from accel.ir.errors import ArtifactError, InputError
from accel.ir.user_cache import cache_folder
from accel.lowering.onnx import native
from accel.runtime.artifact.artifact import open_artifact
from accel.runtime.backends.onnx import backend as ort
from accel.runtime.backends.onnx import tune
from accel.runtime.backends.onnx.backend import OrtBackend
from accel.runtime.backends.onnx.tune import AUTO, WORK, choose
from accel.runtime.decode.costs import TOKENS, Costs, known
from accel.runtime.model.load import from_artifact

pytestmark = pytest.mark.usefixtures("real_time")


@pytest.fixture
def artifact(build, monkeypatch, tmp_path):
    """An artifact of which nothing is known yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return build("llama").compiled.artifact


@pytest.fixture
def opened(monkeypatch):
    """The files that were opened."""
    files = []
    for module in (tune, ort):
        real = module.open_session
        note = lambda path, *a, real=real, **k: (files.append(path.name), real(path, *a, **k))[1]  # noqa: E731
        monkeypatch.setattr(module, "open_session", note)
    return files


def kept(tmp_path, kind="tuning"):
    (file,) = (tmp_path / "accel" / kind).iterdir()
    return file


def rewrite(file, change):
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def test_every_variant_is_measured_at_every_shape_and_remembered(artifact, opened, tmp_path):
    start = time.perf_counter()
    first = choose(artifact, AUTO, 1)
    assert time.perf_counter() - start < 10  # two, but for what else the machine does
    graphs = set(artifact.entries["step"].graphs)
    assert first.why == "measured" and first.kernels in graphs and first.seconds > 0
    assert [(c.tokens, c.context) for c in first.costs] == [(1, 256), (8, 256), (128, 256)]
    for cost in first.costs:
        assert set(cost.seconds) == graphs - set(first.refused)
        assert all(0 < s < 1 for s in cost.seconds.values())
    assert set(opened) == set(artifact.entries["step"].probes.values())
    opened.clear()
    again = choose(artifact, AUTO, 1)
    assert again == dataclasses.replace(first, seconds=0.0) and not opened
    assert not list(tmp_path.rglob("*.part"))


def slow(factor):
    """As if something else had run while the first shape was measured."""

    def change(value):
        for name, seconds in value["value"]["costs"][0]["seconds"].items():
            value["value"]["costs"][0]["seconds"][name] = seconds * factor

    return change


def test_what_a_busy_machine_spoilt_is_measured_again_a_few_times(artifact, monkeypatch, tmp_path):
    def level(costs):
        for cost in costs[0]:
            cost.seconds.update(dict.fromkeys(cost.seconds, 0.01))
        return costs

    real = tune._measure
    monkeypatch.setattr(tune, "_measure", lambda *args: level(real(*args)))
    choose(artifact, AUTO, 1)
    assert choose(artifact, AUTO, 1).seconds == 0, "it was sound"
    rewrite(kept(tmp_path), slow(100))
    spoilt = choose(artifact, AUTO, 1, measure=False)
    found = choose(artifact, AUTO, 1)
    assert found.seconds > 0 and spoilt.costs[0].seconds["grouped"] == 1
    assert found.costs[0].seconds == dict.fromkeys(found.costs[0].seconds, 0.01), (
        "the least of both"
    )
    for _ in range(3):
        rewrite(kept(tmp_path), slow(100))
        last = choose(artifact, AUTO, 1)
    assert last.seconds == 0, "this machine is as it is"


def test_other_threads_are_measured_anew(artifact):
    assert choose(artifact, AUTO, 1, measure=False) is None
    choose(artifact, AUTO, 1)
    assert choose(artifact, AUTO, 1, measure=False) is not None
    assert choose(artifact, AUTO, 2, measure=False) is None


@pytest.mark.parametrize(("factor", "want"), [(0.3, "fused"), (0.97, "grouped"), (3, "grouped")])
def test_the_table_decides_and_the_portable_one_wins_near_ties(artifact, tmp_path, factor, want):
    choose(artifact, AUTO, 1)

    def change(value):
        for cost in value["value"]["costs"]:
            cost["seconds"] = dict.fromkeys(cost["seconds"], 1.0) | {"fused": factor}

    rewrite(kept(tmp_path), change)
    assert choose(artifact, AUTO, 1, measure=False).kernels == want


def test_decode_weighs_more_than_a_call_that_nobody_makes():
    assert all(cell in WORK for cell in tune.CELLS)
    assert WORK[1, 512] > WORK[128, 512] > WORK[8, 512] == 0


@pytest.mark.parametrize(("node", "ahead"), [(tune.NODE, True), (0.0, False)])
def test_of_equal_kernels_the_graph_of_fewer_nodes_is_taken(artifact, monkeypatch, node, ahead):
    """A step of small products is as much dispatch as it is products."""
    monkeypatch.setattr(tune, "_turns", lambda sessions, *_: dict.fromkeys(sessions, 1e-5))
    monkeypatch.setattr(tune, "NODE", node)
    graphs = artifact.entries["step"].graphs
    sizes = {
        name: len(onnx.load(artifact.path / file, load_external_data=False).graph.node)
        for name, file in graphs.items()
    }
    found = choose(artifact, AUTO, 1)
    assert found.kernels == (min(sizes, key=sizes.get) if ahead else "grouped")


def spoil_time(value):
    value["value"]["costs"][0]["seconds"]["fused"] = "soon"


def spoil_variant(value):
    del value["value"]["costs"][0]["seconds"]["fused"]


def spoil_key(value):
    value["key"]["cpu"] = "another"


def spoil_shape(value):
    value["value"]["costs"].clear()


@pytest.mark.parametrize("spoil", [spoil_time, spoil_variant, spoil_key, spoil_shape, None])
def test_a_damaged_memory_is_measured_anew(artifact, tmp_path, spoil):
    choose(artifact, AUTO, 1)
    file = kept(tmp_path)
    if spoil:
        rewrite(file, spoil)
    else:
        file.write_bytes(b"\xff{")
    assert choose(artifact, AUTO, 1, measure=False) is None
    assert choose(artifact, AUTO, 1).seconds > 0
    assert choose(artifact, AUTO, 1, measure=False) is not None


def test_nothing_can_be_kept(artifact, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert choose(artifact, AUTO, 1).why == "measured"
    assert choose(artifact, AUTO, 1).seconds > 0


def test_a_relative_cache_folder_is_none(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "accel"


def test_a_variant_that_does_not_open_is_left_out_with_its_reason(artifact, monkeypatch):
    real = tune.open_session

    def some(path, *args, **options):
        if "fused" in path.name:
            raise ArtifactError("no such operator here")
        return real(path, *args, **options)

    monkeypatch.setattr(tune, "open_session", some)
    found = choose(artifact, AUTO, 1)
    assert found.refused == {"fused": "no such operator here"} and found.kernels != "fused"
    assert choose(artifact, AUTO, 1, measure=False).refused == found.refused


def test_one_graph_alone_is_opened_for_the_step(artifact, opened):
    with from_artifact(artifact, threads=1, kernels="fused") as model:
        model.logits([[1, 2, 3]])
        assert opened == ["step.fused.onnx"]
        assert (model.tuning.kernels, model.tuning.why) == ("fused", "asked for")
    opened.clear()
    with from_artifact(artifact, threads=1) as model:
        model.logits([[1, 2, 3]])
        steps = [name for name in opened if not name.startswith("probe.")]
        assert steps == [artifact.entries["step"].graphs[model.tuning.kernels]]


def test_an_unknown_variant_is_refused_before_anything_is_opened(artifact, opened):
    with pytest.raises(ArtifactError, match="did you mean 'grouped'"):
        accel.load(artifact.path, kernels="groupd")
    assert not opened


def test_generation_says_which_variant_ran_and_what_calls_cost(artifact):
    with from_artifact(artifact, threads=1, kernels="grouped") as model:
        stats = model.generate([1, 2], 3).stats
        assert stats["kernels"] == "grouped" and stats["costs"] is None
        ratios = model.costs.ratios
        assert model.generate([1, 2], 3).stats["costs"] == ratios
    with from_artifact(artifact, threads=1, kernels="grouped") as model:  # remembered
        assert model.generate([1, 2], 3).stats["costs"] == ratios


# The costs of a call


def test_costs_are_measured_on_the_step_and_remembered(artifact, monkeypatch, tmp_path):
    with from_artifact(artifact, threads=1, kernels="grouped") as model:
        found = model.costs
    assert found.tokens == TOKENS and all(0 < s < 1 for s in found.seconds)
    assert found.ratio(1) == 1 and found.ratio(32) > 1.2  # 32 tokens are more work than one
    engine = OrtBackend(artifact, threads=1, kernels="grouped")
    assert known(engine.cost_key) == found
    assert known(OrtBackend(artifact, threads=1, kernels="fused").cost_key) is None
    slow = dict(tokens=list(TOKENS), seconds=[9.0, *found.seconds[1:-1], 1e-9], runs=1)
    rewrite(
        kept(tmp_path, "costs"), lambda value: value.update(value=slow)
    )  # a busy machine at the first point
    for runs in (2, 3, 3):
        with from_artifact(artifact, threads=1, kernels="grouped") as model:
            merged = model.costs
            assert model.costs is merged and merged.runs == runs
        assert merged.seconds[0] < 1 and merged.seconds[-1] == 1e-9, "the least of all measurements"

    def broken(value):
        value["value"]["seconds"].pop()

    rewrite(kept(tmp_path, "costs"), broken)
    assert known(engine.cost_key) is None


def test_ratios_between_the_points_and_none_beyond():
    costs = Costs((1, 2, 4), (2.0, 3.0, 7.0))
    assert [costs.ratio(t) for t in (1, 2, 3, 4)] == [1, 1.5, 2.5, 3.5]
    for tokens in (0, 5):
        with pytest.raises(InputError, match=r"1\.\.4"):
            costs.ratio(tokens)


def test_a_short_context_and_the_eager_target_have_costs_too():
    with accel.optimize(models.tiny(), target="eager", max_context=6, verify=False) as model:
        assert model.costs.tokens == (1, 2, 3, 4, 6) and model.tuning is None
        assert model.generate([1], 2).stats["kernels"] is None


def test_a_closed_model_has_no_costs(artifact):
    model = from_artifact(artifact, threads=1)
    model.close()
    with pytest.raises(InputError, match="closed"):
        _ = model.costs


def test_inspect_measures_when_asked_and_else_tells_what_is_known(artifact):
    def call(*flags):
        done = CliRunner().invoke(
            cli.app, ["inspect", str(artifact.path), "--threads", "1", *flags]
        )
        assert done.exit_code == 0, done.output
        return done.output

    assert "not measured on this machine yet" in call()
    assert json.loads(call("--json"))["tuning"] is None
    found = json.loads(call("--json", "--measure"))
    assert found["tuning"]["why"] == "measured" and found["costs"]["tokens"] == list(TOKENS)
    shown = call()
    assert "fused ms" in shown and "c(T)/c(1)" in shown and "not measured" not in shown


def test_run_and_bench_take_a_variant(artifact):
    def call(*words):
        return CliRunner().invoke(cli.app, [*words, "--threads", "1", "--json"])

    path = str(artifact.path)
    done = call("run", path, "--tokens", "1,2", "--max-new-tokens", "2", "--kernels", "fused")
    assert json.loads(done.stdout)["stats"]["kernels"] == "fused"
    done = call("bench", path, "--context", "4", "--tokens", "2", "--kernels", "grouped")
    assert json.loads(done.stdout)["kernels"] == "grouped"


def test_a_model_that_cannot_be_measured_still_runs(artifact, monkeypatch):
    def fails(*_):
        raise RuntimeError("Gather: indices element out of data bounds")

    monkeypatch.setattr(tune, "_turns", fails)
    with from_artifact(artifact, threads=1) as model:
        assert len(model.generate([1, 2], 2).tokens[0]) == 2
        assert model.tuning.kernels == "grouped" and "out of data bounds" in model.tuning.why


@pytest.mark.long
@pytest.mark.skipif(native.library()[0] is None, reason=native.library()[1])
def test_products_of_few_bits_are_measured_too(monkeypatch, tmp_path, opened):
    """Without attention's probes beside them, and where one of them is refused."""
    native.library()  # which is compiled into the folder that is the cache now
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    accel.optimize(models.qwen3(), "int4", max_context=64, out=tmp_path / "artifact").close()
    artifact = open_artifact(tmp_path / "artifact")
    entry = artifact.entries["step"]
    assert set(entry.products) == {"grouped", "native"} and set(entry.probes) == set(entry.graphs)
    for file in entry.products.values():
        session = ort.open_session(artifact.path / file, threads=1)
        assert 0.5 < float(session.get_modelmeta().custom_metadata_map["share"]) * 3 < 1.01
        assert {i.name.split(".")[0] for i in session.get_inputs()} == {"x"}
    del opened[:]
    found = choose(artifact, AUTO, 1)
    assert found.why == "measured" and set(opened) == {
        *entry.probes.values(),
        *entry.products.values(),
    }
    assert all(set(c.seconds) == set(entry.graphs) for c in found.costs)
    real = tune.open_session

    def refuse(path, *args, **kwargs):
        if path.name == "products.native.onnx":
            raise ArtifactError("no such operator here")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(tune, "recall", lambda *_: None)
    monkeypatch.setattr(tune, "open_session", refuse)
    found = choose(artifact, AUTO, 1)
    assert found.refused == {"native": "no such operator here"} and found.kernels != "native"
    assert all(set(c.seconds) == {"grouped", "fused"} for c in found.costs)
