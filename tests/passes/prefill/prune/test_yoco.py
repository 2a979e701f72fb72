"""YOCO: one cache for half of the layers, and prompts that leave these layers at all tokens but the last."""

import models
import numpy as np
import pytest
import torch

import accel
from accel.compiler.explain import costs
from accel.compiler.smoke.tiny_models import randomise, small_config
from accel.ir.capture.arch.yoco import YocoConfig
from accel.ir.errors import PassError, RecipeError
from accel.ir.region import Region
from accel.ir.window import Window
from accel.runtime.session import core

TOKENS = np.random.default_rng(5).integers(0, 90, (3, 50))
COUNTS = np.array([30, 21, 1])
EXIT = {"prefill.prune": {"use": "yoco", "least": 4}}
BACK = 16  # tokens that a law takes back
NEWEST = {"window": {"use": "newest", "back": BACK}}


def gemma3n():
    from transformers import AutoModelForCausalLM

    config = small_config("gemma3n_text")
    return randomise(AutoModelForCausalLM.from_config(config), "gemma3n_text").eval()


def built(module, target, tables=EXIT):
    return accel.optimize(module, tables, max_context=64, max_batch=3, target=target)


@pytest.fixture(
    scope="module",
    params=[
        "yoco-eager",
        pytest.param("yoco-onnx-newest", marks=pytest.mark.long),
        pytest.param("yoco-onnx", marks=pytest.mark.long),
        pytest.param("gemma3n-eager", marks=pytest.mark.long),
        pytest.param("gemma3n-eager-newest", marks=pytest.mark.long),
    ],
)
def pair(request):
    """A module, and the model with early exit."""
    name, target, *window = request.param.split("-")
    module = models.yoco() if name == "yoco" else gemma3n()
    with built(module, target, EXIT | (NEWEST if window else {})) as compiled:
        yield module, compiled


def longer(module, tables):
    return accel.optimize(module, tables, max_context=128, target="eager")


def logits(module, tokens):
    with torch.no_grad():
        found = module(torch.from_numpy(tokens)[None])
    return getattr(found, "logits", found)[0].numpy()


def law_of_exit(module, model):
    """After prompts, tokens, another prompt and a rewind each row has the logits of the module."""
    rows = [TOKENS[i, :n] for i, n in enumerate(COUNTS)]

    def check(got):
        for row, given in zip(got, rows, strict=True):
            want = logits(module, given)
            assert np.abs(row[-1] - want[-1]).max() < 1e-4 * np.abs(want).max()

    with model.session(3) as session:
        check(session.prompt(TOKENS[:, :30], COUNTS))
        calls = session.stats["calls"]
        assert session.stats["tokens"] == COUNTS.sum()
        for new in (TOKENS[:, 30:31], TOKENS[:, 31:40]):
            rows = [np.concatenate(both) for both in zip(rows, new, strict=True)]
            check(session.run(new, last_only=True))
        assert (calls, session.stats["calls"]) == (2, 5)  # each long one leaves early
        session.rewind(COUNTS)
        rows = [
            np.concatenate([r[:n], t[40:43]]) for r, n, t in zip(rows, COUNTS, TOKENS, strict=True)
        ]
        check(session.prompt(TOKENS[:, 40:43]))
        assert session.stats["calls"] == 6  # and a short one runs whole


@pytest.mark.few(1)
def test_prompts_that_leave_early_have_the_models_logits(pair):
    law_of_exit(*pair)


@pytest.mark.parametrize("broken", ["nothing is written", "one slot further"])
def test_the_law_catches(pair, broken, monkeypatch):
    part = core.SessionCore.part

    def wrong(self, entry, tokens, positions, slots, real):
        if broken == "one slot further":
            part(self, entry, tokens, positions, slots + 1, real)
        else:
            self.count(1, real, 0.0)

    monkeypatch.setattr(core.SessionCore, "part", wrong)
    with pytest.raises(AssertionError):
        law_of_exit(*pair)


def test_upper_layers_are_not_in_the_entry(pair):
    module, model = pair
    program = model.program
    step, fill = (program.entries[n] for n in ("step", "fill"))
    assert len(program.nodes(entry=fill)) < 0.7 * len(program.nodes(entry=step))
    if isinstance(module, models.Yoco):
        layers = [n.target for n in fill.graph.nodes if isinstance(n.target, Region)]
        assert [layer.name for layer in layers] == ["layer.0", "layer.1", "layer.2"]
        counts = [len(list(layer.graph.nodes)) for layer in layers]
        assert counts[2] < counts[1] / 2  # its keys and values alone
    assert "logits" not in fill.output_nodes()
    assert model.report["grade"] == "distribution-exact"


def test_memory_is_its_formula():
    layers, window = 5, 3
    with built(models.yoco(layers, window), "eager", {}) as model:
        half, size = layers // 2, 10
        found = {s.name: s.shape for s in model.program.state if s.role in ("k", "v")}
        own = {f"kv.{i}.{part}": ("B", 4, "C", size) for i in range(half) for part in "kv"}
        assert found == own | {f"kv.{half}.{part}": ("B", 2, "C", size) for part in "kv"}
        shares = [layer.shares for layer in model.facts.layers]
        assert shares == [None] * (half + 1) + [half] * (layers - half - 1)
        assert [layer.window for layer in model.facts.layers] == [window] * half + [0] * (
            layers - half
        )


@pytest.mark.long
def test_bytes_are_one_global_cache_and_a_window_of_each_lower_layer(monkeypatch):
    """2 n_kv D of each token, and 2 H D of each slot of the lower half, whose number the text does not change."""
    for module in (core, costs):
        monkeypatch.setattr(module, "CHUNK", 8)
        monkeypatch.setattr(module, "STEP", 8)
    layers, window, heads, kv, size = 5, 3, 4, 2, 10
    plan = Window(window, 8)
    for tables in ({}, EXIT):
        more = {"window": {"use": "newest", "back": plan.back}}
        with built(models.yoco(layers, window), "eager", tables | more) as model:
            assert model.facts.window == plan
            found = costs.cache(model.program, None, {}, (6, 30, 61), 0)
            held = {}
            for prompt in (6, 30, 61):
                with model.session() as session:
                    session.prompt(TOKENS.reshape(1, -1)[:, :prompt])
                    session.run([[1]])
                    held[prompt] = session.stats["kv_bytes"]
                slots = -(-(prompt + 1) // 8) * 8
                own = min(slots, -(-plan.most // 8) * 8)
                floats = 2 * kv * size * slots + layers // 2 * 2 * heads * size * own
                assert held[prompt] == 4 * floats + 8 * (slots + own) == found.bytes(prompt)
            # what 32 tokens more take: the global cache and the positions of its slots
            assert held[61] - held[30] == 32 * (4 * 2 * kv * size + 8)


def test_a_window_of_all_tokens_is_full_attention():
    wide, wider, narrow = (models.yoco(window=n) for n in (21, 60, 20))
    rows = [logits(m, TOKENS[0, :21]) for m in (wide, wider, narrow)]
    assert np.array_equal(rows[0], rows[1]) and np.abs(rows[0] - rows[2])[-1].max() > 1e-3


def test_a_model_without_shared_caches_is_refused_unless_asked():
    with pytest.raises(
        PassError, match=r"0 layers above layer 2 .*recipe gemfilter or fastkv, or layers = 0"
    ):
        built(models.llama(), "eager")
    with pytest.raises(PassError, match="yoco: 1 layers above layer 2 .* fewer than layers = 2"):
        built(models.yoco(), "eager", {"prefill.prune": {"use": "yoco", "layers": 2}})


@pytest.mark.parametrize(("option", "value", "least"), [("layers", -1, 0), ("least", 0, 1)])
def test_options_that_make_no_sense_are_refused(option, value, least):
    words = f"prefill.prune.yoco: {option} is {value}; give at least {least}"
    with pytest.raises(RecipeError, match=words):
        built(models.yoco(), "eager", {"prefill.prune": {"use": "yoco", option: value}})


@pytest.mark.parametrize(
    "wrong", [{"num_hidden_layers": 1}, {"window": 0}, {"num_key_value_heads": 3}, {"head_dim": 7}]
)
def test_a_configuration_that_cannot_be_is_an_error(wrong):
    sizes = dict(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=4, window=3)  # fmt: skip
    with pytest.raises(ValueError, match="window"):
        YocoConfig(**{**sizes, **wrong})


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "tables",
    [
        {"kv.reuse": {"use": "paged-prefix", "block": 4}},
        {"kv.codec": {"use": "kivi", "residual": 8, "group": 2}},
    ],
    ids=["paged-prefix", "kivi"],
)
def test_slots_that_begin_elsewhere(tables):
    """Blocks of earlier tokens are no slots any more when a second prompt comes."""
    found = []
    for more in ({}, EXIT):
        with (
            built(models.yoco(), "eager", {**tables, **more}) as model,
            model.session(3) as session,
        ):
            out = [session.prompt(TOKENS[:, :30], COUNTS), session.prompt(TOKENS[:, 30:47])]
            found.append([*out, session.run(TOKENS[:, 47:])[:, :1]])
            found[-1].append(session.stats["calls"])
    assert found[0].pop() < found[1].pop()
    for want, got in zip(*found, strict=True):
        assert np.abs(got - want).max() < 1e-3 * np.abs(want).max()


@pytest.mark.long
def test_an_eviction_sees_the_last_queries_of_all_layers():
    evict = {
        "kv.score": {"use": "snapkv", "window": 4},
        "kv.budget": {"use": "uniform", "tokens_kept": 12},
    }
    found = []
    for more in ({}, {"prefill.prune": {"use": "yoco", "least": 4, "layers": 0}}):
        with (
            built(models.llama(), "eager", {**evict, **more}) as model,
            model.session(3) as session,
        ):
            out = [session.prompt(TOKENS[:, :30], COUNTS)] + [
                session.run(TOKENS[:, [30 + i]]) for i in range(2)
            ]
            found.append(np.concatenate(out, axis=1))
    assert np.abs(found[0] - found[1]).max() < 1e-4 * np.abs(found[0]).max()


def test_the_last_token_of_a_prompt_reads_all_of_it_where_single_tokens_choose():
    """No call of its prompt is one of those in which tokens choose; a prompt that is too short is run whole."""
    module, tables = models.llama(), {"prefill.prune": {"use": "yoco", "layers": 0, "least": 4}}
    quest = {"use": "quest", "tokens_read": 12, "page": 4, "dense_layers": 0}
    with longer(module, {**tables, "kv.select": quest}) as model, model.session() as session:
        for count in (90, 50, 36):
            tokens = np.random.default_rng(6).integers(3, 60, (1, count))
            got = session.prompt(tokens)[0, -1]
            assert np.abs(got - logits(module, tokens[0])[-1]).max() < 1e-3
            session.rewind(0)
