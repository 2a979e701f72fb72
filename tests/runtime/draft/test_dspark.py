"""draft = dspark: what the places of a block say is that of the published formulas; tokens are plain decoding's."""

from functools import partial

import numpy as np
import pytest
import torch

from accel.compiler.load.heads._folder import head_at
from accel.compiler.with_draft import with_draft
from accel.ir.errors import CaptureError, RecipeError
from accel.runtime.draft.dspark import DSpark
from accel.runtime.sample.standard import Standard
from accel.runtime.speculation.walk import WalkFollower
from accel.runtime.tree.chain import Chain
from accel.runtime.verify.spec_chain import SpecChain

from ...dflash_case import BLOCK, LAYERS, with_vocabulary, written
from ...draft_case import rows_of
from ...dspark_case import dspark_config, dspark_tensors, walk
from ...heads_case import as_plain, asked, built, drafts, llama_in, opened, target_of, texts_of

DRAFTED, ROUNDS = 70, (8, 9, 14)
build = partial(built, "dspark")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A model, and its directory."""
    return llama_in(tmp_path_factory.mktemp("target"), LAYERS)


def loaded(path, module):
    return head_at(path, target=target_of(module.lm_head.weight, LAYERS)).load()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("place", "kind", "speculators"),
    [
        ("onnx", "rnn", True),
        ("onnx", "gated", False),
        ("eager", "vanilla", True),
        ("eager", "rnn", False),
        ("onnx", "vanilla", False),
        ("eager", "gated", True),
    ],
)
def test_places_say_what_the_formulas_do(tmp_path, monkeypatch, target, place, kind, speculators):
    """Behind a prompt, and after tokens came that were drafted and that were not; then tokens are plain decoding's."""
    module, folder = target
    tensors, ids = dspark_tensors(module, kind), np.arange(module.config.vocab_size)
    if speculators:
        tensors, ids = with_vocabulary(tensors, ids.size, DRAFTED, module.config.hidden_size)
        w2 = "markov_head.markov_w2.weight"
        tensors[w2] = tensors[w2][:DRAFTED]
    config = dspark_config(module, kind, speculators, DRAFTED if speculators else None)
    path = written(tmp_path / "head", config, tensors)
    texts, said, listened = texts_of(20), [], WalkFollower.said

    def listening(follower, before):
        said.append(listened(follower, before))
        return said[-1]

    with build(folder, path, place) as model:
        with monkeypatch.context() as patched:
            patched.setattr(WalkFollower, "said", listening)
            tokens = drafts(model, texts, 9, ROUNDS)
        assert as_plain(model, Chain(), 0.0, "spec-chain", limit=BLOCK)

    def wanted(count=BLOCK, **other):
        """Logits [rounds,rows,B,Vd] along what was drafted."""
        return torch.stack(
            [
                torch.stack(
                    [
                        walk(module, tensors, t[:n], count, drafted, **other)[0]
                        for t, drafted in zip(texts, row, strict=True)
                    ]
                )
                for n, row in zip(ROUNDS, tokens, strict=True)
            ]
        )

    found = torch.from_numpy(np.stack(said)[:, :, 0][..., ids])
    found = found.unflatten(0, (len(ROUNDS), BLOCK)).transpose(1, 2)
    torch.testing.assert_close(found, wanted(), atol=1e-5, rtol=1e-5)
    want = [[walk(module, tensors, t[:n], BLOCK)[2] for t in texts] for n in ROUNDS]
    assert tokens == want
    controls = [{"off": 1}, {"first": 1}, {"markov": False}, {"late": True}, {"causal": (0, 1)}]
    for control in controls + [{"stays": False}] * (kind == "rnn"):
        assert (found - wanted(**control)).abs().max() > 1e-3, control


def test_probabilities_are_those_that_tokens_were_drawn_with(tmp_path, target):
    """Each row of q is that of the place along the drawn tokens, at the row's temperature. A draft ends before the
    first place that is not sure enough, by the tokens before it.
    """
    module, folder = target
    tensors = dspark_tensors(module, "gated")
    path = written(tmp_path / "head", dspark_config(module, "gated"), tensors)
    texts, sizes = texts_of(20), []
    with build(folder, path, threshold=0.45) as model:
        for seed in range(6):
            rows = rows_of([text[: 8 + seed] for text in texts], Standard(temperature=0.8), seed)
            with model.session(2) as session:
                drafters = opened(model, session, rows, rule=SpecChain())
                session.prompt(np.array([row.prompt[:-1] for row in rows]))
                trees = asked(drafters, rows, 0, 1)
                drafters.close()
            for row, tree in zip(rows, trees, strict=True):
                said, sure, _ = walk(
                    module, tensors, row.seen.tolist(), BLOCK, [*tree.tokens, *[0] * BLOCK]
                )
                ends = next((k for k, one in enumerate(sure) if one < 0.45), BLOCK)
                assert len(tree) == ends
                sizes.append(ends)
                if ends:
                    q = torch.softmax(said[:ends] / 0.8, -1)
                    np.testing.assert_allclose(tree.q[:ends], q, atol=2e-6)
    assert len(set(sizes)) > 2, "drafts end at different places"


@pytest.mark.parametrize(
    ("more", "with_markov"), [({}, True), ({"confidence_head_with_markov": False}, False)]
)
def test_what_is_sure_may_know_the_token_before(tmp_path, target, more, with_markov):
    module, _ = target
    tensors = dspark_tensors(module, "vanilla", with_markov=with_markov)
    path = written(tmp_path / "head", dspark_config(module, "vanilla", **more), tensors)
    head, text = loaded(path, module).model, texts_of(20)[0]
    hidden, before = torch.randn(4, module.config.hidden_size), torch.tensor(text[:4])
    with torch.no_grad():
        found = head.markov(before[None], hidden[None], hidden[None, :, :0])[1][0, :, 0]
    e = tensors["markov_head.markov_w1.weight"][before]
    read = torch.cat([hidden, e], -1) if with_markov else hidden
    want = read @ tensors["confidence_head.proj.weight"][0] + tensors["confidence_head.proj.bias"]
    torch.testing.assert_close(found, want)


@pytest.mark.long
def test_a_head_without_confidence(tmp_path, target):
    """It is not asked, whatever the threshold, and reads no hidden state where it goes by the token before alone."""
    module, folder = target
    config = dspark_config(module, "vanilla", enable_confidence_head=False)
    tensors = dspark_tensors(module, "vanilla", confident=False)
    path, texts = written(tmp_path / "head", config, tensors), texts_of(20)
    assert with_draft("base", path).tables["draft"]["use"] == "dspark"
    with build(folder, path, threshold=0.9) as model:
        found = drafts(model, texts, 9, (8, 14))
    assert found == [[walk(module, tensors, t[:n], BLOCK)[2] for t in texts] for n in (8, 14)]


@pytest.mark.parametrize("threshold", [-0.1, 1.0])
def test_wrong_thresholds(threshold):
    with pytest.raises(RecipeError, match="give a chance of 0 or more and less than 1"):
        DSpark(threshold=threshold)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t, c: t.pop("embed_tokens.weight"), "lacks embed_tokens.weight .1 of 33 tensors"),
        (lambda t, c: t.pop("lm_head.weight"), "lacks lm_head.weight"),
        (lambda t, c: t.pop("markov_head.joint_proj.bias"), "lacks markov_head.joint_proj.bias"),
        (lambda t, c: t.pop("confidence_head.proj.weight"), "lacks confidence_head.proj.weight"),
        (lambda t, c: t["markov_head.markov_w1.weight"].fill_(torch.nan), "w1.weight holds number"),
        (lambda t, c: c.update(markov_rank=6), r"has size \[101, 7\], and \[101, 6\]"),
        (lambda t, c: c.update(markov_rank=0), "markov_rank = 0; a head needs a whole number of 1"),
        (lambda t, c: c.update(markov_rank=48), "markov_rank is 48, and hidden_size 48"),
        (
            lambda t, c: c.update(markov_head_type="lstm"),
            "markov_head_type 'lstm' does not exist; known",
        ),
        (lambda t, c: c.update(enable_confidence_head=False), "has confidence_head.proj.bias .2"),
        (lambda t, c: c.update(mask_token_id=101), "mask_token_id is 101, of 101"),
        (lambda t, c: c.update(target_layer_ids=[0, 4]), r"of layers \[0, 4\], and its target has"),
        (lambda t, c: c.update(num_target_layers=5), "num_target_layers = 5, and the model has 4"),
        (lambda t, c: c.update(sample_from_anchor=False), "says sample_from_anchor = False, and"),
        (lambda t, c: c.update(rope_is_neox_style=False), "says rope_is_neox_style = False, and"),
        (lambda t, c: c.update(model_type="gemma4_text"), "of model_type 'gemma4_text', and accel"),
        (lambda t, c: c.update(draft_vocab_size=70), "has 70 tokens of 101, and d2t names none"),
        (lambda t, c: c.update(hidden_size=32), r"has size \[32, 48\], and \[32, 32\]"),
    ],
)
def test_wrong_heads_are_refused(tmp_path, target, change, words):
    module, _ = target
    tensors, config = dspark_tensors(module, "rnn"), dspark_config(module, "rnn")
    change(tensors, config)
    path = written(tmp_path / "head", config, tensors)
    with pytest.raises(CaptureError, match=words):
        loaded(path, module)
