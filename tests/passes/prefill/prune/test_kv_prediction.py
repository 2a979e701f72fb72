"""KV Prediction: keys and values of upper layers of a prompt, out of those of the layer in the middle."""

import models
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import accel
from accel.compiler.load.second_model import second_model
from accel.compiler.over_state import keys_of, over_state
from accel.compiler.pipeline import pipeline
from accel.ir.capture.capture import capture
from accel.ir.errors import PassError, RecipeError
from accel.ir.region import Region
from accel.ir.tables import Observed, Rows
from accel.passes.kv._shared.tables import measured
from accel.passes.prefill.prune.kv_prediction import KvPrediction, split
from accel.passes.trained import measured_for, sample, write

TOKENS = np.random.default_rng(5).integers(0, 90, (3, 40))
COUNTS = np.array([30, 21, 1])
LAYERS = 3  # of the module: two run, and the last is predicted


def flat(name="llama"):
    """A module whose layers before the last add nothing to its stream, so that the last layer's keys and values are
    linear in those of the middle one.
    """
    module = models.ARCHITECTURES[name]()
    with torch.no_grad():
        for layer in module.model.layers[: LAYERS - 1]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        middle, last = module.model.layers[LAYERS - 2 :]
        last.input_layernorm.weight.copy_(middle.input_layernorm.weight)
        mix = torch.randn(20, 20, generator=torch.Generator().manual_seed(0)) / 20**0.5
        for part in ("k_proj", "v_proj"):
            into, out = (getattr(layer.self_attn, part).weight for layer in (last, middle))
            into.copy_(mix @ out)
    return module


def written(module, file, change=lambda parts: parts):
    """The maps of a module, measured of random tokens."""
    program = over_state(capture(module, max_context=64))
    ids = torch.randint(0, 90, (4, 41), generator=torch.Generator().manual_seed(1))
    text = [(ids, torch.ones(4, 40))]
    parts = change(measured(KvPrediction(), program, text))
    write(KvPrediction(), file, parts, sample(program, keys_of(program)), {})
    return parts


def built(module, file, target="eager", **options):
    prune = {"use": "kv-prediction", "table": str(file), "least": 1, **options}
    return accel.optimize(
        module, {"prefill.prune": prune}, max_context=64, max_batch=3, target=target
    )


def prompted(model):
    """Logits after prompts, of two tokens, and after a second prompt."""
    with model.session(3) as session:
        out = [session.prompt(TOKENS[:, :30], COUNTS), session.run(TOKENS[:, 30:32])]
        out.append(session.prompt(TOKENS[:, 32:38]))
    return np.concatenate(out, axis=1)


def law_of_exact_maps(module, model):
    """Where the maps are exact, so are all logits."""
    with accel.optimize(module, max_context=64, max_batch=3, target="eager") as plain:
        want = prompted(plain)
    assert np.abs(prompted(model) - want).max() < 5e-3 * np.abs(want).max()


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    module, file = flat(), tmp_path_factory.mktemp("maps") / "maps.safetensors"
    written(module, file)
    return module, file


def test_exact_maps_give_an_exact_prompt_and_onnx_is_eager(exact):
    module, file = exact
    before = {n: p.clone() for n, p in module.state_dict().items()}
    with built(module, file) as model, built(module, file, "onnx") as compiled:
        law_of_exact_maps(module, model)
        a, b = prompted(model), prompted(compiled)
        assert np.abs(a - b).max() < 1e-4 * np.abs(a).max()
        with accel.optimize(module, max_context=64, max_batch=3) as plain:
            assert str(model.program.step.graph) == str(
                plain.program.step.graph
            )  # decoding is as before
            assert compiled.artifact.entries["step"] == plain.artifact.entries["step"]
            assert model.program.state == plain.program.state
    assert all(torch.equal(p, before[n]) for n, p in module.state_dict().items())


def test_the_layers_above_are_not_run(exact):
    with built(*exact) as model:
        calls = [
            n.target
            for n in model.program.entries["fill"].graph.nodes
            if isinstance(n.target, Region)
        ]
        sizes = [len(list(layer.graph.nodes)) for layer in calls]
        assert len(sizes) == LAYERS and sizes[1] < 0.7 * sizes[0]
        targets = [n.target for n in calls[-1].graph.nodes]
        assert accel.ir.ops.attention.attention.default not in targets
        assert model.report["grade"] == "approximate"


@pytest.mark.parametrize("broken", ["bias", "swapped"])
def test_the_law_catches(exact, broken, tmp_path):
    def change(parts):
        found = parts[LAYERS - 1]["map"]
        if broken == "bias":
            found[-1] += 0.3
        else:
            found.copy_(found.roll(found.shape[1] // 2, dims=1))
        return parts

    module, file = exact[0], tmp_path / "maps.safetensors"
    written(module, file, change)
    with built(module, file) as model, pytest.raises(AssertionError):
        law_of_exact_maps(module, model)


def test_maps_are_least_squares():
    r = torch.Generator().manual_seed(0)
    k, v, noise = (torch.randn(1, 2, 300, 4, generator=r) for _ in range(3))
    above = Observed(k, 2 * k + v + 0.1 * noise, v - 1, 1.0)
    rows = Rows(torch.zeros(1, 301), torch.ones(1, 300), {0: Observed(k, k, v, 1.0), 1: above})
    found = KvPrediction().measure([rows])
    assert found[0]["map"].shape == (0, 16) and found[1]["map"].shape == (17, 16)
    want = torch.zeros(17, 16)
    want[:8, :8], want[8:16, :8] = 2 * torch.eye(8), torch.eye(8)
    want[8:16, 8:], want[16, 8:] = torch.eye(8), -1.0
    assert (found[1]["map"] - want).abs().max() < 0.05
    assert [split(list(range(n))) for n in (2, 3, 4)] == [(0, [1]), (1, [2]), (1, [2, 3])]


# By a model of its own


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model's folder, the model, and a smaller one of the same tokens."""
    path = tmp_path_factory.mktemp("beside")
    module = models.ARCHITECTURES["llama"]()
    module.save_pretrained(path / "same")
    small = LlamaForCausalLM(
        LlamaConfig(**{**module.config.to_dict(), "num_hidden_layers": 2, "hidden_size": 24})
    )
    models.randomise(small, "small").save_pretrained(path / "small")
    return path, module


def mapped_by(folder, file, name="same", change=lambda parts: parts):
    """Maps of the module, measured beside the model of a folder."""
    path, module = folder
    method = KvPrediction(aux=str(path / name))
    program = over_state(capture(module, max_context=64))
    program.second_model = second_model([method], pipeline(), program.facts, None)
    ids = torch.randint(0, 90, (4, 41), generator=torch.Generator().manual_seed(1))
    parts = change(measured(method, program, [(ids, torch.ones(4, 40))]))
    write(method, file, parts, measured_for(method, program, keys_of(program)), {})
    return parts


def identity(parts):
    """Of the same model: each layer's keys and values are its own."""
    return {i: {"map": torch.eye(*part["map"].shape)} for i, part in parts.items()}


@pytest.mark.long
def test_the_same_model_and_maps_that_change_nothing_give_an_exact_prompt(folder, tmp_path):
    file, aux = tmp_path / "same.safetensors", str(folder[0] / "same")
    maps = mapped_by(folder, file, change=identity)
    assert all(part["map"].shape == (41, 40) for part in maps.values())
    with built(folder[1], file, aux=aux) as model:
        law_of_exact_maps(folder[1], model)
        with (
            model.session() as session
        ):  # a later prompt has a past that the other model did not read
            session.prompt(TOKENS[:1, :9])
            before = session.stats["calls"]
            session.prompt(TOKENS[:1, 9:20])
            assert session.stats["calls"] == before + 1


@pytest.mark.long
def test_onnx_by_another_model_is_eager_and_decoding_is_as_before(folder, tmp_path):
    file, aux = tmp_path / "same.safetensors", str(folder[0] / "same")
    mapped_by(folder, file)
    with built(folder[1], file, aux=aux) as model, built(folder[1], file, "onnx", aux=aux) as other:
        a, b = prompted(model), prompted(other)
        assert np.abs(a - b).max() < 1e-4 * np.abs(a).max()
        with accel.optimize(folder[1], max_context=64, max_batch=3, target="eager") as plain:
            assert str(model.program.step.graph) == str(plain.program.step.graph)
            assert model.program.state == plain.program.state


@pytest.mark.long
@pytest.mark.parametrize("broken", ["layers", "bias"])
def test_the_law_catches_other_maps(folder, broken, tmp_path):
    def change(parts):
        found = identity(parts)
        if broken == "bias":
            found[1]["map"][-1] += 0.3
        else:
            found[1]["map"] = found[1]["map"].roll(20, dims=1)
        return found

    file = tmp_path / "maps.safetensors"
    mapped_by(folder, file, change=change)
    with built(folder[1], file, aux=str(folder[0] / "same")) as model:
        with pytest.raises(AssertionError):
            law_of_exact_maps(folder[1], model)


@pytest.mark.long
def test_a_smaller_model_fills_the_cache_and_another_is_refused(folder, tmp_path):
    path, module = folder
    file = tmp_path / "small.safetensors"
    parts = mapped_by(folder, file, "small")
    with built(module, file, aux=str(path / "small")) as model:
        with accel.optimize(module, max_context=64, max_batch=3, target="eager") as plain:
            assert prompted(model).shape == prompted(plain).shape
            error = np.abs(prompted(model) - prompted(plain)).max()
        assert error > 1e-3  # it is an approximation
    assert [part["map"].shape[1] for part in parts.values()] == [40] * LAYERS
    with pytest.raises(PassError, match="was measured for another model"):
        built(module, file, aux=str(path / "same"))
    other = LlamaForCausalLM(LlamaConfig(**{**module.config.to_dict(), "vocab_size": 77}))
    other.save_pretrained(path / "other")
    with pytest.raises(RecipeError, match="other has 77 tokens, and .* 101; set `aux`"):
        built(module, file, aux=str(path / "other"))
    with pytest.raises(RecipeError, match="nowhere is not a folder; set `aux`"):
        built(module, file, aux=str(path / "nowhere"))


@pytest.mark.long
def test_what_cannot_be_predicted_is_refused(exact, tmp_path):
    module, file = exact
    with pytest.raises(PassError, match="recipe yoco, which is exact"):
        built(models.yoco(), file)
    with pytest.raises(PassError, match="measured for another model"):
        built(module, "")
    with pytest.raises(
        PassError, match=r"kv-prediction: .*no\.safetensors does not exist; measure it"
    ):
        built(module, tmp_path / "no.safetensors")
    with pytest.raises(RecipeError, match="kv-prediction: least is 0"):
        built(module, file, least=0)


def test_maps_of_other_sizes_are_refused(exact, tmp_path):
    module = exact[0]
    short = tmp_path / "short.safetensors"
    written(module, short, lambda parts: {i: {"map": p["map"][:-2]} for i, p in parts.items()})
    with pytest.raises(
        PassError,
        match="takes 38 numbers of a token, but the layer that it is predicted from has 40",
    ):
        built(module, short)
