"""draft = dflash2: what the places of a block say is that of the published formulas; tokens are plain decoding's."""

from functools import partial

import numpy as np
import pytest
import torch

from accel.compiler.load.heads._folder import head_at
from accel.compiler.with_draft import with_draft
from accel.ir.errors import CaptureError
from accel.runtime.sample.standard import Standard
from accel.runtime.speculation.walk import WalkFollower
from accel.runtime.tree.chain import Chain
from accel.runtime.verify.spec_chain import SpecChain

from ...dflash2_case import CANDIDATES, dflash2_config, dflash2_tensors, path
from ...dflash_case import BLOCK, LAYERS, written
from ...draft_case import rows_of
from ...heads_case import as_plain, asked, built, drafts, llama_in, opened, target_of, texts_of

DRAFT, ROUNDS, WINDOW = BLOCK - 1, (8, 9, 14), BLOCK + 1
build = partial(built, "dflash2")
SLIDING = {
    "layer_types": ["sliding_attention"] * 2,
    "use_sliding_window": True,
    "sliding_window": WINDOW,
}
SCALES = (1.7, 0.6, 4.0)
SCALED = {
    "input_embedding_scale": SCALES[0],
    "output_multiplier": SCALES[1],
    "final_logit_softcapping": SCALES[2],
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A model, and its directory."""
    return llama_in(tmp_path_factory.mktemp("target"), LAYERS)


def loaded(path, module):
    return head_at(path, target=target_of(module.lm_head.weight, LAYERS)).load()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("place", "speculators", "kernel"),
    [("onnx", False, 2), ("eager", True, 2), ("onnx", True, 3), ("eager", False, 3)],
)
def test_places_say_what_the_formulas_do(tmp_path, monkeypatch, target, place, speculators, kernel):
    """Behind a prompt, and after tokens came that were drafted and that were not; then tokens are plain decoding's. A
    head of the authors is causal where its layers slide, and one of speculators is not.
    """
    module, folder = target
    tensors = dflash2_tensors(module, kernel)
    config = dflash2_config(
        module, speculators, **({"layers": SLIDING} if speculators else SLIDING)
    )
    config |= {**SCALED, "conv_kernel_size": kernel}
    if speculators:
        del config["sliding_window_non_causal"]
    else:
        config["dflash_config"].pop("conv_kernel_size")
    folder_of_head, texts = written(tmp_path / "head", config, tensors), texts_of(20)
    said, listened = [], WalkFollower.said

    def listening(follower, before):
        said.append(listened(follower, before))
        return said[-1]

    with build(folder, folder_of_head, place) as model:
        with monkeypatch.context() as patched:
            patched.setattr(WalkFollower, "said", listening)
            tokens = drafts(model, texts, 9, ROUNDS)
        assert as_plain(model, Chain(), 0.0, "spec-chain", limit=DRAFT)

    usual = {"windows": (WINDOW,) * 2, "causal": () if speculators else (0, 1), "scales": SCALES}

    def wanted(rounds, **other):
        """Logits [rounds,rows,B-1,V] along what was drafted."""
        return torch.stack(
            [
                torch.stack(
                    [
                        path(module, tensors, t[:n], DRAFT, drafted, **{**usual, **other})[0]
                        for t, drafted in zip(texts, row, strict=True)
                    ]
                )
                for n, row in rounds
            ]
        )

    rounds = list(zip(ROUNDS, tokens, strict=True))
    found = torch.from_numpy(np.stack(said)[:, :, 0])
    found = found.unflatten(0, (len(ROUNDS), DRAFT)).transpose(1, 2)
    torch.testing.assert_close(found, wanted(rounds), atol=1e-5, rtol=1e-5)
    assert (found.isfinite().sum(-1) == CANDIDATES).all()
    want = [[path(module, tensors, t[:n], DRAFT, **usual)[1] for t in texts] for n in ROUNDS]
    assert tokens == want

    def apart(**other):
        """Whether the last round's candidates are others, or what is said of them."""
        one, last = wanted(rounds[-1:], **other)[0], found[-1]
        same = (one.isfinite() == last.isfinite()).all(-1)
        by = torch.where(last.isfinite(), last - one, 0)[same]
        return not same.all() or by.abs().max() > 1e-3

    for control in (
        {"conv": {"back": 2}},
        {"conv": {"back": -1}},
        {"conv": {"late": True}},
        {"conv": {"by_input": False}},
        {"conv": None},
        {"knows": False},
        {"off": 1},
        {"first": 1},
        {"causal": (0,)},
        {"windows": (WINDOW + 1, 0)},
    ):
        assert apart(**control), control
    assert not apart()


def test_probabilities_are_those_that_tokens_were_drawn_with(tmp_path, target):
    """Each row of q is a softmax over the candidates of the place along the drawn tokens, at the row's temperature."""
    module, folder = target
    tensors = dflash2_tensors(module)
    where, texts = written(tmp_path / "head", dflash2_config(module), tensors), texts_of(20)
    drawn, greedy, other = [], [], 0.0
    with build(folder, where) as model:
        for seed in range(3):
            rows = rows_of([text[: 8 + seed] for text in texts], Standard(temperature=0.8), seed)
            with model.session(2) as session:
                drafters = opened(model, session, rows, rule=SpecChain())
                session.prompt(np.array([row.prompt[:-1] for row in rows]))
                trees = asked(drafters, rows, 0, 1)
                drafters.close()
            for row, tree in zip(rows, trees, strict=True):
                seen = row.seen.tolist()
                assert len(tree) == DRAFT
                q = torch.softmax(path(module, tensors, seen, DRAFT, tree.tokens)[0] / 0.8, -1)
                np.testing.assert_allclose(tree.q, q, atol=1e-5)
                assert ((np.asarray(tree.q) > 0).sum(-1) <= CANDIDATES).all()
                drawn.append(tree.tokens.tolist())
                greedy.append(path(module, tensors, seen, DRAFT)[1])
                wrong = path(module, tensors, seen, DRAFT, tree.tokens, knows=False)[0] / 0.8
                other = max(other, float(np.abs(tree.q - torch.softmax(wrong, -1).numpy()).max()))
    assert drawn != greedy, "tokens are drawn, not chosen"
    assert other > 1e-2, "the control: what the token before says is in q"


def test_only_the_token_before_in_a_block_is_near(tmp_path, target):
    """Not one of text, of another block or of padding, whatever lies beside it in a call."""
    module, _ = target
    where = written(tmp_path / "head", dflash2_config(module), dflash2_tensors(module))
    last = torch.tensor([[1.0, 1, 0, -1, -2, 0, -1, 1, 0, 0], [0, -1, -2, -3, 1, 0, 0, 0, 0, 0]])
    near = torch.tensor([[0, 0, 0, 1, 1, 0, 1, 0, 0, 0], [0, 1, 1, 1, 0, 0, 0, 0, 0, 0]])
    assert torch.equal(loaded(where, module).model.near(last[..., None])[..., 0], near.bool())


@pytest.mark.long
@pytest.mark.parametrize("place", ["eager", "onnx"])
def test_heads_in_8_bits_and_of_speculators_own_output_head(tmp_path, target, place):
    """Tokens stay plain decoding's, whatever codes do to drafts; a folder's own output head says the tokens."""
    module, folder = target
    tensors = dflash2_tensors(module)
    tensors["lm_head.weight"] = torch.randn(
        module.lm_head.weight.shape, generator=torch.Generator().manual_seed(9)
    )
    where = written(tmp_path / "head", dflash2_config(module, speculators=True), tensors)
    assert with_draft("base", where).tables["draft"]["use"] == "dflash2"
    with build(folder, where) as model:
        found = drafts(model, texts_of(20), 9, (8, 14))
    assert found == [
        [path(module, tensors, t[:n], DRAFT)[1] for t in texts_of(20)] for n in (8, 14)
    ]
    with build(folder, where, place, "int8") as model:
        assert as_plain(model, Chain(), 0.0, "spec-chain", limit=DRAFT)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda t, c: t.pop("layers.1.mlp_conv.base_kernel"),
            "lacks layers.1.mlp_conv.base_kernel .1 of 36 tensors",
        ),
        (
            lambda t, c: t.pop("candidate_selector.successor_codebook"),
            "lacks candidate_selector.successor_codebook",
        ),
        (
            lambda t, c: t["candidate_selector.predecessor_codebook"].fill_(torch.nan),
            "predecessor_codebook holds numbers",
        ),
        (
            lambda t, c: c["dflash_config"].pop("selector_rank"),
            "selector_rank = None; a head needs a whole number of 1",
        ),
        (
            lambda t, c: c["dflash_config"].update(conv_kernel_size=0),
            "conv_kernel_size = 0; a head needs a whole number of 1",
        ),
        (
            lambda t, c: c["dflash_config"].update(conv_kernel_size=3),
            r"base_kernel has size \[2, 2, 48\], and \[2, 3, 48\] by its config",
        ),
        (
            lambda t, c: c["dflash_config"].update(conv_kernel_size=BLOCK + 1),
            "conv_kernel_size = 7, and blocks have 6 tokens",
        ),
        (
            lambda t, c: c["dflash_config"].update(conv_group_size=7),
            "conv_group_size = 7, and it must divide hidden_size = 48",
        ),
        (
            lambda t, c: c["dflash_config"].update(selector_rank=6),
            r"codebook has size \[101, 7\], and \[101, 6\]|has size \[7, 48\], and \[6, 48\]",
        ),
        (
            lambda t, c: c["dflash_config"].update(selector_top_k=102),
            "selector_top_k = 102, and the head has 101 tokens",
        ),
        (lambda t, c: c.update(sample_from_anchor=True), "says sample_from_anchor = True, and"),
        (lambda t, c: c.update(markov_rank=8), "says markov_rank = 8, and"),
        (lambda t, c: c.update(draft_vocab_size=70), "says draft_vocab_size = 70 of 101 tokens"),
        (lambda t, c: c.update(num_target_layers=5), "num_target_layers = 5, and the model has 4"),
        (
            lambda t, c: c.update(architectures=["DFlashDraftModel"]),
            "a later form .conv_kernel_size = 2., and by the names",
        ),
    ],
)
def test_wrong_heads_are_refused(tmp_path, target, change, words):
    module, _ = target
    tensors, config = dflash2_tensors(module), dflash2_config(module)
    change(tensors, config)
    where = written(tmp_path / "head", config, tensors)
    with pytest.raises(CaptureError, match=words):
        loaded(where, module)
