"""draft = dflash: heads in speculators' layout, with sliding layers, scales and a vocabulary of their own."""

import pytest
import torch

import accel
from accel.compiler.load.heads._folder import head_at
from accel.ir.errors import CaptureError
from accel.runtime.speculation.blocks import BlockFollower
from accel.runtime.tree.chain import Chain

from ...dflash_case import (
    BLOCK,
    LAYERS,
    block_logits,
    config_for,
    speculators_config,
    tensors_for,
    with_vocabulary,
    written,
)
from ...heads_case import as_plain, drafts, llama_in, target_of, texts_of

WINDOW, DRAFTED, SCALES = 5, 70, (1.7, 0.6, 2.0)
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": WINDOW,
}
SCALED = dict(
    zip(
        ("input_embedding_scale", "output_multiplier", "final_logit_softcapping"),
        SCALES,
        strict=True,
    )
)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A model, its directory, and a head's tensors for it."""
    module, folder = llama_in(tmp_path_factory.mktemp("target"), LAYERS)
    return module, folder, tensors_for(module.config.hidden_size)


def loaded(path, module):
    return head_at(path, target=target_of(module.lm_head.weight, LAYERS)).load()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("place", "anchored"), [("onnx", False), ("eager", True), ("eager", False), ("onnx", True)]
)
def test_what_a_head_says_is_that_of_the_formulas(tmp_path, monkeypatch, target, place, anchored):
    """Behind a prompt, and after tokens came that were drafted and that were not; then tokens are plain decoding's.
    anchored: the last token of the text drafts, too.
    """
    module, folder, tensors = target
    tensors, ids = with_vocabulary(
        tensors, module.config.vocab_size, DRAFTED, module.config.hidden_size
    )
    more = {**SCALED, "sample_from_anchor": anchored}
    config = speculators_config(module, DRAFTED, layers=SLIDING, **more)
    path, count = written(tmp_path / "head", config, tensors), BLOCK - 1 + anchored
    recipe = {
        "draft": {"use": "dflash", "path": str(path), "weights": ""},
        "verify": {"use": "sample-match"},
        "length": {"use": "fixed"},
    }
    out = {"out": tmp_path / "out"} if place == "onnx" else {}
    texts, rounds, said, draft = texts_of(20), (8, 9, 14), [], BlockFollower.draft

    def listening(follower, rows, most):
        said.append(draft(follower, rows, most))
        return said[-1]

    with accel.optimize(folder, recipe, target=place, max_context=64, max_batch=2, **out) as model:
        with monkeypatch.context() as patched:
            patched.setattr(BlockFollower, "draft", listening)
            tokens = drafts(model, texts, 9, rounds)
        assert as_plain(model, Chain(), 0.0, limit=count)

    usual = {"windows": (WINDOW, 0), "causal": (0,), "scales": SCALES, "skip": BLOCK - count}

    def wanted(**other):
        return torch.stack(
            [
                torch.stack(
                    [block_logits(module, tensors, t[:n], **{**usual, **other}) for t in texts]
                )
                for n in rounds
            ]
        )

    found = torch.stack([torch.from_numpy(one[..., ids]) for one in said])
    torch.testing.assert_close(found, wanted(), atol=1e-5, rtol=1e-5)
    assert tokens == ids[wanted().argmax(-1)].tolist()
    for control in (
        {"off": 1},
        {"off": -1},
        {"causal": ()},
        {"causal": (0, 1)},
        {"windows": (WINDOW + 1, 0)},
        {"windows": (0, 0)},
        {"scales": (1.0, *SCALES[1:])},
        {"scales": (*SCALES[:2], 0.0)},
    ):
        assert (found - wanted(**control)).abs().max() > 1e-3, control


@pytest.mark.parametrize(
    ("said", "speculators", "layers"),
    [
        ({}, False, (0,)),
        ({"is_causal": None}, False, (0,)),
        ({"is_causal": True}, False, (0, 1)),
        ({"is_causal": False}, False, ()),
        ({}, True, (0,)),
        ({"sliding_window_non_causal": True}, True, ()),
    ],
)
def test_layers_where_a_block_sees_none_behind(tmp_path, target, said, speculators, layers):
    module, _, tensors = target
    sliding = {**SLIDING, "sliding_window": BLOCK}
    if speculators:
        config = speculators_config(module, layers=sliding, **said)
    else:
        config = config_for(module, **sliding, **said)
    path = written(tmp_path / "head", config, tensors)
    assert loaded(path, module).model.draft_head.causal == layers


def test_tensors_of_the_target_are_left_out(tmp_path, target):
    """Of a head that drafts all tokens; the output head is the target's where the file has none."""
    module, _, tensors = target
    table = module.get_input_embeddings().weight.detach().clone()
    more = {"embed_tokens.weight": table, "verifier_norm.weight": torch.ones(table.shape[1])}
    path = written(tmp_path / "head", speculators_config(module), {**tensors, **more})
    found = loaded(path, module)
    assert found.model.lm_head.weight in found.stored
    own = {**tensors, "lm_head.weight": table}
    found = loaded(written(tmp_path / "own", speculators_config(module), own), module)
    assert torch.equal(found.model.lm_head.weight, table) and not found.stored


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t, c: t.pop("norm.weight"), "lacks norm.weight .1 of 26 tensors"),
        (lambda t, c: t.pop("lm_head.weight"), "and lm_head.weight is missing"),
        (lambda t, c: t.pop("d2t"), "has 70 tokens of 101, d2t names none"),
        (lambda t, c: t["lm_head.weight"].fill_(torch.nan), "lm_head.weight holds numbers"),
        (lambda t, c: t["d2t"].add_(90), "d2t names token 1.., and the target has 101"),
        (
            lambda t, c: c.update(aux_hidden_state_layer_ids=[1, LAYERS + 1]),
            r"comes out of layers \[0, 4\], and its target has 4",
        ),
        (lambda t, c: c.update(projector_type="domino"), "form .projector_type = 'domino'"),
        (lambda t, c: c.pop("transformer_layer_config"), "hidden_size = None; a head needs"),
        (lambda t, c: c.update(sliding_window_non_causal=True), "in layers that slide over 5"),
        (
            lambda t, c: c["transformer_layer_config"].update(intermediate_size=32),
            r"has size \[96, 48\], and \[32, 48\]",
        ),
        (
            lambda t, c: c.update(input_embedding_scale=-1),
            "input_embedding_scale = -1; a head needs",
        ),
    ],
)
def test_wrong_heads_are_refused(tmp_path, target, change, words):
    module, _, tensors = target
    sizes = module.config.vocab_size, DRAFTED, module.config.hidden_size
    tensors = {n: t.clone() for n, t in with_vocabulary(tensors, *sizes)[0].items()}
    config = speculators_config(module, DRAFTED, layers=SLIDING)
    change(tensors, config)
    path = written(tmp_path / "head", config, tensors)
    with pytest.raises(CaptureError, match=words):
        loaded(path, module)
