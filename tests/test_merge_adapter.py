"""merge_adapter: the weights that a recipe sees are W + s B A, exactly where peft's merged model has them."""

import copy
import json
import math
from functools import partial

import models
import numpy as np
import pytest
import torch

import accel
from accel.compiler.load.merge import merged
from accel.compiler.load.source import open_source
from accel.ir.errors import InputError
from accel.ir.peft import read_adapter

from . import adapter_case as case
from .session_ways import near

TOKENS = np.random.default_rng(0).integers(0, 90, (2, 11))
CLOSE = 1e-4  # of the largest logit
close = partial(near, bound=CLOSE)


@pytest.fixture(scope="module")
def llama():
    return models.ARCHITECTURES["llama"]()


def values(model, folder, stored=None):
    """name -> parameter after the merge; nothing of the model is written."""
    model, found = merged(model, stored or {}, read_adapter(folder))
    tensors = model.named_parameters(remove_duplicate=False)
    return {n: found[t].read() if t in found else t for n, t in tensors}


@pytest.mark.few(1)
@pytest.mark.parametrize("name, ends", [("llama", ["q_proj", "down_proj"]), ("gpt2", ["c_attn"])])
def test_a_merged_build_is_the_model_of_the_formula(tmp_path, name, ends):
    model = models.ARCHITECTURES[name]()
    folder = case.write(tmp_path / "a", model, ends, rank=3, alpha=5)
    want = case.logits(case.merged(model, folder, 5 / 3), TOKENS)
    before = case.logits(model, TOKENS)
    with accel.optimize(model, merge_adapter=folder, max_context=32, max_batch=2) as built:
        got = built.logits(TOKENS)
    close(got, want)
    wrong = case.logits(case.merged(model, folder, 5 / 4), TOKENS)
    for other in (before, wrong):  # the check can fail
        assert np.abs(got - other).max() > 100 * CLOSE * np.abs(other).max()
    assert np.array_equal(case.logits(model, TOKENS), before)  # the user's model is as it was


@pytest.mark.parametrize(
    "config, scale",
    [
        ({}, 8 / 4), ({"use_rslora": True}, 8 / math.sqrt(4)),
        ({"alpha_pattern": {"layers.1.self_attn.q_proj": 3}}, None),
    ],
)  # fmt: skip
def test_the_scale_is_that_of_the_configuration(tmp_path, llama, config, scale):
    folder = case.write(tmp_path, llama, ["q_proj"], rank=4, alpha=8, **config)
    tensors, found = case.tensors_of(folder), values(llama, folder)
    for name, module in case.modules(llama, "q_proj").items():
        a, b = (tensors[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
        s = scale or (3 / 4 if ".1." in name else 8 / 4)
        torch.testing.assert_close(found[f"{name}.weight"], module.weight + s * b @ a)
    assert found["lm_head.weight"] is llama.lm_head.weight


def test_weights_of_a_folder_stay_mapped_until_they_are_read(tmp_path, llama):
    """A bfloat16 checkpoint: the update is added to the widened weight, tensor by tensor."""
    half = copy.deepcopy(llama).bfloat16()
    half.save_pretrained(tmp_path / "model")
    folder = case.write(tmp_path / "a", half, ["v_proj"], dtype=torch.bfloat16)
    loaded = open_source(tmp_path / "model").load()
    _, found = merged(loaded.model, loaded.stored, read_adapter(folder))
    want = case.merged(copy.deepcopy(half).float(), folder, 5 / 3)
    for (name, tensor), there in zip(
        loaded.model.named_parameters(), want.parameters(), strict=True
    ):
        assert found[tensor].source.dtype is torch.bfloat16
        assert (found[tensor] is loaded.stored[tensor]) == ("v_proj" not in name)
        torch.testing.assert_close(found[tensor].read(), there.detach())


@pytest.mark.long
def test_quantised_weights_are_of_the_merged_model(tmp_path, llama):
    folder = case.write(tmp_path, llama, ["q_proj", "up_proj"])
    options = {"max_context": 32, "max_batch": 2}
    with accel.optimize(llama, "int8", merge_adapter=folder, **options) as built:
        got = built.logits(TOKENS)
    with accel.optimize(case.merged(llama, folder, 5 / 3), "int8", **options) as built:
        want = built.logits(TOKENS)
    close(got, want)


@pytest.mark.long
def test_a_half_precision_module_is_merged(tmp_path, llama):
    half = copy.deepcopy(llama).half()
    folder = case.write(tmp_path, half, ["o_proj"])
    want = case.logits(case.merged(copy.deepcopy(half).float(), folder, 5 / 3), TOKENS)
    with accel.optimize(
        half, target="eager", verify=False, merge_adapter=folder, max_batch=2
    ) as built:
        close(built.logits(TOKENS), want)


def test_saved_modules_take_the_place_of_the_models(tmp_path, llama):
    head = torch.randn_like(llama.lm_head.weight)
    folder = case.written(tmp_path, {"base_model.model.lm_head.weight": head}, r=1)
    assert torch.equal(values(llama, folder)["lm_head.weight"], head)


def peft_cases():
    q, every = ["q_proj"], "all-linear"
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return [
        ("llama", {"target_modules": every, "use_rslora": True, "rank_pattern": {"q_proj": 2}}),
        ("llama", {"target_modules": every, "use_dora": True}),
        ("llama", {"target_modules": ["embed_tokens", *q], "use_dora": True}),
        ("llama", {"target_modules": r".*\.1\..*(k|up)_proj", "modules_to_save": ["lm_head"]}),
        (
            "llama",
            {"target_modules": q, "layers_to_transform": [0], "alpha_pattern": {"q_proj": 2}},
        ),
        ("qwen2", {"target_modules": ["v_proj"], "bias": "all"}),
        ("gpt2", {"target_modules": ["c_attn", "c_proj"], "use_dora": True}),
        ("mixtral", {"target_modules": q, "target_parameters": experts}),
        ("gpt_oss", {"target_modules": q, "target_parameters": experts}),
    ]


@pytest.mark.parametrize(
    "name, options", peft_cases(), ids=lambda v: v if isinstance(v, str) else ""
)
def test_every_weight_is_what_peft_merges(tmp_path, name, options):
    peft = pytest.importorskip("peft")
    from accel.compiler.smoke.tiny_models import small_model

    model = models.ARCHITECTURES[name]() if name in models.ARCHITECTURES else small_model(name)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=6, **options)
    theirs = peft.get_peft_model(copy.deepcopy(model), config)
    for parameter_name, tensor in theirs.named_parameters():
        if tensor.requires_grad:
            noise = torch.Generator().manual_seed(len(parameter_name))
            tensor.data += torch.randn(tensor.shape, generator=noise) / 10
    theirs.save_pretrained(tmp_path)
    found = values(model, tmp_path)
    changed = 0
    for other, tensor in theirs.merge_and_unload().named_parameters():
        torch.testing.assert_close(found[other], tensor.detach(), rtol=1e-4, atol=1e-5)
        changed += not torch.equal(tensor, model.get_parameter(other))
    assert changed


def change(folder, **config):
    """The adapter with other fields in its configuration."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}), encoding="utf-8")


@pytest.mark.parametrize(
    "config, words",
    [
        ({"peft_type": "IA3"}, "peft_type is IA3"),
        ({"init_lora_weights": "pissa_niter_4"}, "changed the base weights"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is set"),
        ({"lora_alpha": "much"}, "lora_alpha is 'much', not a number"),
        ({"lora_alpha": float("inf")}, "lora_alpha is inf, not a number"),
        ({"alpha_pattern": [5]}, "alpha_pattern is .5., not an object"),
        ({"target_parameters": [1]}, "target_parameters is .1., not a list of names"),
        ({"target_parameters": True}, "target_parameters is True, not a list of names"),
    ],
)
def test_what_an_adapter_may_not_say(tmp_path, llama, config, words):
    folder = case.write(tmp_path, llama, ["q_proj"])
    change(folder, **config)
    with pytest.raises(InputError, match=words):
        values(llama, folder)


def test_an_adapter_of_another_model_is_refused_by_name_and_sizes(tmp_path, llama):
    other = models.ARCHITECTURES["gpt2"]()
    folder = case.write(tmp_path / "gpt2", other, ["c_attn"])
    with pytest.raises(InputError, match=r"transformer\.h\..*does not have.*\(base/name\)"):
        values(llama, folder)
    wide = {
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(2, 9),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": torch.zeros(40, 2),
    }
    folder = case.written(tmp_path / "wide", wide, r=2)
    with pytest.raises(
        InputError, match=r"lora_A.weight is for a weight \[40, 9\].* is \[40, 48\]"
    ):
        values(llama, folder)


def test_an_adapter_of_rank_zero_is_refused(tmp_path, llama):
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    empty = {
        f"{name}.lora_A.weight": torch.zeros(0, 48),
        f"{name}.lora_B.weight": torch.zeros(48, 0),
    }
    folder = case.written(tmp_path, empty, r=0)
    with pytest.raises(InputError, match=r"lora_A.weight belongs to A \[0, 48\] and B \[48, 0\]"):
        values(llama, folder)


HEAD, TABLE = "base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight"
TIED = ("lm_head.weight", "model.embed_tokens.weight")


@pytest.mark.parametrize(("saved", "other"), [(HEAD, TABLE), (TABLE, HEAD)])
def test_one_of_two_tied_weights_is_replaced_alone(tmp_path, saved, other):
    """peft unties what it saves whole: the other keeps the base model's weight."""
    model = models.ARCHITECTURES["qwen2"]()
    shared, new = model.lm_head.weight.detach().clone(), torch.randn_like(model.lm_head.weight)
    owned = {"modules_to_save": [saved.split(".")[-2]]}
    of = {saved: saved.removeprefix("base_model.model."), other: other.removeprefix("base_model.model.")}  # fmt: skip
    found = values(model, case.written(tmp_path / "one", {saved: new}, **owned))
    assert torch.equal(found[of[saved]], new)
    assert torch.equal(found[of[other]], shared)
    assert model.lm_head.weight is model.model.embed_tokens.weight  # the user's model is as it was
    both = {saved: new, other: new.clone()}
    found = values(model, case.written(tmp_path / "both", both, **owned))
    assert all(torch.equal(found[name], new) for name in TIED)
    found = values(model, case.written(tmp_path / "apart", {saved: new, other: new + 1}, **owned))
    assert torch.equal(found[of[saved]], new)
    assert torch.equal(found[of[other]], new + 1)
    loaded = case.written(tmp_path / "loaded", {saved: new})  # peft loads it into the tied tensor
    assert all(torch.equal(values(model, loaded)[name], new) for name in TIED)
    unsaid = case.written(tmp_path / "unsaid", {saved: new, other: new + 1})
    with pytest.raises(InputError, match="saves two different ones"):
        values(model, unsaid)


def tied_cases():
    q, head, table = ["q_proj"], "lm_head", "embed_tokens"
    return [
        {"target_modules": q, "modules_to_save": [head]},
        {"target_modules": q, "modules_to_save": [table]},
        {"target_modules": q, "modules_to_save": [head, table]},
        {"target_modules": q, "modules_to_save": [table], "ensure_weight_tying": True},
        {"target_modules": [head, *q]},
        {"target_modules": [table, *q]},
        {"target_modules": [head, table]},
        {"target_modules": [table], "ensure_weight_tying": True},
        {"target_modules": [head], "modules_to_save": [table]},
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", tied_cases(), ids=str)
def test_tied_weights_are_what_peft_computes_with(tmp_path, options):
    """As trained, before peft merges: merge_and_unload writes into the tensor that both still share."""
    peft = pytest.importorskip("peft")
    model = models.ARCHITECTURES["qwen2"]()
    theirs = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(r=4, lora_alpha=6, **options))  # fmt: skip
    for name, tensor in theirs.named_parameters():
        if tensor.requires_grad:
            noise = torch.Generator().manual_seed(len(name))
            tensor.data += torch.randn(tensor.shape, generator=noise) / 10
    theirs.save_pretrained(tmp_path)
    want, before = case.logits(theirs.eval(), TOKENS), case.logits(model, TOKENS)
    found, stored = merged(model, {}, read_adapter(tmp_path))
    with torch.no_grad():
        for tensor in {*found.parameters()} & stored.keys():
            value = stored[tensor].read()
            found_in = [n for n, t in found.named_parameters(remove_duplicate=False) if t is tensor]
            fresh = torch.nn.Parameter(value)
            for name in found_in:
                path, _, last = name.rpartition(".")
                setattr(found.get_submodule(path), last, fresh)
    close(case.logits(found, TOKENS), want)
    assert np.abs(want - before).max() > 100 * CLOSE * np.abs(want).max()


@pytest.mark.parametrize("recipe", ["base", pytest.param("int8", marks=pytest.mark.long)])
def test_a_build_unties_what_an_adapter_changes_alone(tmp_path, recipe):
    """Of a bfloat16 folder, whose weights stay mapped, and with a recipe that stores weights in codes."""
    model = models.ARCHITECTURES["qwen2"]()
    model.bfloat16().save_pretrained(tmp_path / "model")
    new = torch.randn(model.lm_head.weight.shape)
    folder = case.written(tmp_path / "a", {HEAD: new}, modules_to_save=["lm_head"])
    want = type(model).from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    before = case.logits(want, TOKENS)
    want.lm_head.weight = torch.nn.Parameter(new)
    options = {"max_context": 32, "max_batch": 2}
    with accel.optimize(tmp_path / "model", recipe, merge_adapter=folder, **options) as built:
        got = built.logits(TOKENS)
    if recipe == "base":
        close(got, case.logits(want, TOKENS))
    else:
        with accel.optimize(want, recipe, **options) as built:
            close(got, built.logits(TOKENS))
    assert np.abs(got - before).max() > 0.1


def test_damage_is_named(tmp_path, llama):
    with pytest.raises(InputError, match="does not exist"):
        read_adapter(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds no adapter_config.json"):
        read_adapter(tmp_path / "empty")
    (tmp_path / "empty" / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(InputError, match="adapter_config.json is not a configuration"):
        read_adapter(tmp_path / "empty")
    folder = case.write(tmp_path / "a", llama, ["q_proj"])
    weights = folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-7])
    with pytest.raises(InputError, match="cut or damaged"):
        read_adapter(folder)
    weights.unlink()
    (folder / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(InputError, match="pickle, which may run code; save it as safetensors"):
        read_adapter(folder)
    half = {"base_model.model.x.lora_A.weight": torch.zeros(2, 9)}
    with pytest.raises(InputError, match="x has no lora_B"):
        read_adapter(case.written(tmp_path / "half", half))
    with pytest.raises(InputError, match="does not know what .*vera_lambda"):
        read_adapter(case.written(tmp_path / "v", {"x.vera_lambda_b": torch.zeros(2)}))
