"""draft = gemma4-assistant: a draft is that of transformers' assistant, whatever stood before; tokens are plain
decoding's.
"""

import json
from functools import cache

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

import accel
from accel.compiler.load.heads import Target
from accel.compiler.load.heads._folder import head_at
from accel.compiler.smoke.tiny_models import randomise, small_config
from accel.compiler.with_draft import with_draft
from accel.ir.capture.capture import capture
from accel.ir.errors import CaptureError
from accel.runtime.sample.standard import Standard
from accel.runtime.speculation.constant import ConstantFollower
from accel.runtime.tree.chain import Chain
from accel.runtime.verify.spec_chain import SpecChain

from ...draft_case import rows_of
from ...heads_case import as_plain, asked, built, drafts, opened, texts_of

if "gemma4_assistant" not in CONFIG_MAPPING:
    pytest.skip("this transformers has no assistant of Gemma 4", allow_module_level=True)

VOCABULARY, WINDOW, COUNT, ROUNDS = 104, 5, 4, (8, 9, 14)
OWN = {"head_dim": 48, "num_key_value_heads": 1}  # of a full layer
TOLD = Target(3, None, ((2, 24), (2, 24), (1, 48)), (WINDOW, WINDOW, 0), (None, None, None))


EACH = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY}
KINDS = ("sliding", "sliding", "full")
SHAPES = {  # as of the published models
    "dense": (KINDS, {}),
    "each": ((*KINDS, "sliding", "full"), {**EACH, "num_kv_shared_layers": 2}),
}


def text_config(kinds, **more):
    return small_config(
        "gemma4_text",
        num_hidden_layers=len(kinds),
        layer_types=[f"{kind}_attention" for kind in kinds],
        per_layer_config={i: OWN for i, kind in enumerate(kinds) if kind == "full"},
        sliding_window=WINDOW,
        vocab_size=VOCABULARY,
        **{"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, **more},
        attention_k_eq_v="hidden_size_per_layer_input" not in more,
    )


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    """Models, and their directories, by SHAPES."""
    from transformers import AutoModelForCausalLM

    @cache
    def made(shape):
        kinds, more = SHAPES[shape]
        config = AutoModelForCausalLM.from_config(text_config(kinds, **more))
        module = randomise(config, "target").eval()
        folder = tmp_path_factory.mktemp(shape)
        module.save_pretrained(folder)
        return module, folder

    return made


def assistant(folder, centroids=False, **more):
    """One with random weights, and its folder."""
    from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM

    inner = text_config(("sliding", "full"), hidden_size=40, intermediate_size=52)
    config = Gemma4AssistantConfig(
        text_config=inner.to_dict(),
        backbone_hidden_size=64,
        use_ordered_embeddings=centroids,
        num_centroids=8,
        centroid_intermediate_top_k=3,
    )
    module = randomise(Gemma4AssistantForCausalLM(config), "assistant").eval()
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in module.model.layers:
            layer.layer_scalar.fill_(0.8)
        if centroids:
            module.masked_embedding.token_ordering.copy_(torch.randperm(VOCABULARY, generator=g))
    module.save_pretrained(folder)
    return module, folder


@torch.no_grad()
def said(module, drafter, text, follow, moves=False, layer=1, before=0):
    """The logits [n,V] of the tokens behind a text, along those of `follow`, as transformers drafts them. The controls:
    a place that moves, keys of another layer that slides, the hidden state of `before` tokens before.
    """
    sliding = [one.self_attn for one in module.model.layers[:2]]
    for i, one in enumerate(sliding):
        one.store_full_length_kv = i == layer
    out = module(
        torch.tensor([text[:-1]]),
        output_hidden_states=True,
        return_shared_kv_states=True,
        use_cache=False,
    )
    for i, one in enumerate(sliding):
        one.store_full_length_kv = i == 1
    h, token, found = out.hidden_states[-1][:, [-1 - before]], text[-1], []
    for i, later in enumerate(follow):
        e = module.get_input_embeddings()(torch.tensor([[token]]))
        place = torch.tensor([[len(text) - 1 + moves * i]])
        one = drafter(
            inputs_embeds=torch.cat([e, h], -1),
            position_ids=place,
            shared_kv_states=out.shared_kv_states,
        )
        found.append(one.logits[0, -1])
        h, token = one.last_hidden_state, later
    return torch.stack(found)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("place", "centroids", "shape"),
    [
        ("onnx", False, "dense"), ("eager", True, "dense"), ("eager", False, "dense"), ("onnx", True, "dense"),
        ("eager", False, "each"), ("onnx", True, "each"),
    ],
)  # fmt: skip
def test_a_draft_is_that_of_transformers(tmp_path, monkeypatch, targets, place, centroids, shape):
    """Behind a prompt, and after tokens came that were drafted and that were not; then tokens are plain decoding's, and
    what tokens are drawn with is what the assistant says along them.
    """
    module, folder = targets(shape)
    drafter, path = assistant(tmp_path / "head", centroids)
    texts, listened, plain = texts_of(20), [], ConstantFollower.said

    def listening(follower, before):
        listened.append(plain(follower, before))
        return listened[-1]

    assert with_draft("base", path).tables["draft"]["use"] == "gemma4-assistant"
    with built("gemma4-assistant", folder, path, place) as model:
        with monkeypatch.context() as patched:
            patched.setattr(ConstantFollower, "said", listening)
            tokens = drafts(model, texts, COUNT, ROUNDS)
        assert as_plain(model, Chain(), 0.0, "spec-chain", limit=COUNT)
        rows = rows_of([text[:10] for text in texts], Standard(temperature=0.8), 1)
        with model.session(2) as session:
            drafters = opened(model, session, rows, rule=SpecChain())
            session.prompt(np.array([row.prompt[:-1] for row in rows]))
            trees = asked(drafters, rows, 0, 1, limit=COUNT)
            drafters.close()

    def wanted(**other):
        """Logits [rounds,rows,n,V] along what was drafted."""
        return torch.stack(
            [
                torch.stack(
                    [
                        said(module, drafter, t[:n], drafted, **other)
                        for t, drafted in zip(texts, row, strict=True)
                    ]
                )
                for n, row in zip(ROUNDS, tokens, strict=True)
            ]
        )

    found = torch.from_numpy(np.stack(listened)[:, :, 0])
    found = found.unflatten(0, (len(ROUNDS), COUNT)).transpose(1, 2)
    torch.testing.assert_close(found, wanted(), atol=1e-5, rtol=1e-5)
    assert tokens == wanted().argmax(-1).tolist()
    for control in ({"moves": True}, {"layer": 0}, {"before": 1}):
        assert (found - wanted(**control)).abs().max() > 1e-3, control
    for text, tree in zip(texts, trees, strict=True):
        q = torch.softmax(said(module, drafter, text[:10], tree.tokens.tolist()) / 0.8, -1)
        np.testing.assert_allclose(tree.q, q, atol=2e-6)


@pytest.mark.long
@pytest.mark.parametrize("place", ["eager", "onnx"])
def test_a_model_with_embeddings_for_each_layer_is_transformers_own(tmp_path, targets, place):
    """Without a head. Its layers are found; the control: a layer takes the part of another."""
    module, folder = targets("each")
    out = {"out": tmp_path / "out"} if place == "onnx" else {}
    text = np.array(texts_of(12)[:1])
    with torch.no_grad():
        want = module(torch.from_numpy(text)).logits
        table = module.model.embed_tokens_per_layer.weight
        kept = table.clone()
        table.copy_(table.unflatten(1, (5, -1)).roll(1, 1).flatten(1))
        other = module(torch.from_numpy(text)).logits
        table.copy_(kept)
    with accel.optimize(folder, target=place, max_context=64, **out) as model:
        with model.session(1) as session:
            found = torch.from_numpy(session.run(text, last_only=False))
    torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)
    assert (found - other).abs().max() > 1e-2


@pytest.mark.long
@pytest.mark.parametrize(("centroids", "rows"), [(True, 39), (False, VOCABULARY)])
def test_words_of_chosen_centroids_alone_are_read(tmp_path, centroids, rows):
    """Of 3 of 8 centroids. The control: all are where there are none."""
    _, path = assistant(tmp_path / "head", centroids)
    loaded = head_at(path, target=TOLD).load()
    program = capture(loaded.model, stored=loaded.stored)
    (read,) = (
        n for n in program.nodes() if any("lm_head" in str(a.target) for a in n.all_input_nodes)
    )
    assert int(read.meta["val"].shape[2]) == rows


def inner(**change):
    return lambda t, c: c["text_config"].update(change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t, c: t.pop("pre_projection.weight"), "lacks pre_projection.weight .1 of"),
        (lambda t, c: t.pop("model.embed_tokens.weight"), "lacks lm_head.weight"),
        (lambda t, c: t.pop("masked_embedding.centroids.weight"), "lacks centroids.weight"),
        (lambda t, c: t.pop("masked_embedding.token_ordering"), "is no order of 104 tokens"),
        (lambda t, c: t["masked_embedding.token_ordering"].fill_(1), "is no order of 104 tokens"),
        (lambda t, c: t["model.norm.weight"].fill_(torch.nan), "norm.weight holds numbers"),
        (lambda t, c: t.update(extra=torch.zeros(2)), "has extra .1 tensors more"),
        (lambda t, c: c.update(backbone_hidden_size=63), r"has size \[40, 128\], and \[40, 126\]"),
        (lambda t, c: c.update(backbone_hidden_size=0), "backbone_hidden_size = 0; a head needs"),
        (lambda t, c: c.update(num_centroids=7), "num_centroids = 7 and centroid_intermediate"),
        (lambda t, c: c.update(centroid_intermediate_top_k=9), "centroid_intermediate_top_k = 9"),
        (
            lambda t, c: c.update(model_type="gemma4_unified_assistant"),
            "and accel reads a gemma4_a",
        ),
        (inner(hidden_size=None), "hidden_size = None; a head needs a whole number"),
        (inner(head_dim=32), r"of sliding_attention, of 2 heads of 32 numbers, .* \[2, 24\]"),
        (inner(sliding_window=6), "sliding_window = 6, and the model's is 5"),
        (inner(vocab_size=112), r"has size \[104, 40\], and \[112, 40\]|is no order of 112 tokens"),
    ],
)
def test_wrong_heads_are_refused(tmp_path, change, words):
    _, path = assistant(tmp_path / "head", True)
    config = json.loads((path / "config.json").read_text())
    tensors = load_file(path / "model.safetensors")
    change(tensors, config)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CaptureError, match=words):
        head_at(path, target=TOLD).load()


def test_targets_without_such_layers_are_refused(tmp_path):
    _, path = assistant(tmp_path / "head")
    full = Target(3, None, TOLD.caches, (0, 0, 0), TOLD.shares)
    with pytest.raises(CaptureError, match="last layer of sliding_attention, .* its target has no"):
        head_at(path, target=full).load()
    reads = Target(3, None, TOLD.caches, TOLD.windows, (None, None, 0))
    with pytest.raises(CaptureError, match="last layer of full_attention, .* its target has none"):
        head_at(path, target=reads).load()
